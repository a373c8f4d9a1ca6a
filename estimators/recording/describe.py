"""What a class shows of itself at some sizes, as data with expressions in place of integers."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.programs.dimensions import config_sizes
from memfit.estimators.recording.classes import ClassPlan
from memfit.estimators.recording.fit import Fitting
from memfit.estimators.trace.traced_model import TracedModel

_DRAWS = 16
# What the caller of a description knows.
_GIVEN = ("model_type", "max_context", "first_layer", "deepstack_layers", "notes")


def class_description(plan: ClassPlan, *, seed: int = 2) -> dict[str, Any]:
    """Return the description of a class, sizes as expressions, one layer of each kind.

    Raises:
        UnsupportedError: when layers of one kind differ, or a size is no known expression.
    """
    chance, sizes, models = random.Random(seed), [], []
    for _ in range(_DRAWS):
        config = plan.draw(chance, packed=False).config
        sizes.append(config_sizes(plan.dims, config))
        model = TracedModel(config, "metal")
        models.append(_plain(model, plan.layer_kinds(config)))
    result: dict[str, Any] = _fitted(models, Fitting(sizes), plan.base["model_type"])
    return result


def _plain(model: TracedModel, kinds: tuple[str, ...]) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(model.describe(model.first_call()), enc_hook=str)
    for name in _GIVEN:
        values.pop(name)
    values["attention_widths"] = sorted(map(list, values["attention_widths"]))
    layers: dict[str, Any] = {}
    for kind, layer in zip(kinds, values.pop("layers"), strict=True):
        if layers.setdefault(kind, layer) != layer:
            raise UnsupportedError(f"layers of kind {kind!r} are not all alike")
    values["layers"] = layers
    return values


def _fitted(values: Sequence[Any], fitting: Fitting, what: str) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _fitted([each[key] for each in values], fitting, key) for key in first}
    if isinstance(first, (list, tuple)):
        return [_fitted([each[i] for each in values], fitting, what) for i in range(len(first))]
    if isinstance(first, bool) or not isinstance(first, int):
        if any(each != first for each in values):
            raise UnsupportedError(f"{what} is not the same at all sizes")
        return first
    text = fitting.text(tuple(values))
    if text is None:
        raise UnsupportedError(f"{what} is no known expression: {values[:6]}")
    return int(text) if text.lstrip("-").isdigit() else f"={text}"
