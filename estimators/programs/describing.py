"""The description of a recorded class: its modules, caches and experts, at any sizes."""

from collections.abc import Mapping
from typing import Any

import msgspec

from memfit.estimators.arch.model import Layer, Model, Module
from memfit.estimators.arch.specs import MixtureOfExperts, TracedMixer
from memfit.estimators.programs.expressions import compiled

_LAYERS = "layers"


def described(
    description: Mapping[str, Any],
    kinds: tuple[str, ...],
    sizes: Mapping[str, int],
) -> Model:
    """Return the model that `trace.class_description.describe` would.

    ``description`` is that of a recorded class; it has one layer of each kind.
    """
    values = _evaluated(description, sizes)
    by_kind = {kind: _layer(layer) for kind, layer in values.pop(_LAYERS).items()}
    widths = frozenset(map(tuple, values.pop("attention_widths")))
    modules = tuple(msgspec.convert(module, Module) for module in values.pop("modules"))
    return Model(
        **values,
        attention_widths=widths,
        modules=modules,
        layers=tuple(by_kind[kind] for kind in kinds),
    )


def _layer(values: Mapping[str, Any]) -> Layer:
    experts = values["feed_forward"]
    return Layer(
        mixers=tuple(msgspec.convert(mixer, TracedMixer) for mixer in values["mixers"]),
        feed_forward=experts and msgspec.convert(experts, MixtureOfExperts),
        modules=tuple(msgspec.convert(module, Module) for module in values["modules"]),
    )


def _evaluated(value: Any, sizes: Mapping[str, int]) -> Any:
    """Return a value with its expressions, texts that begin with ``=``, as integers."""
    if isinstance(value, dict):
        return {key: _evaluated(each, sizes) for key, each in value.items()}
    if isinstance(value, list):
        return [_evaluated(each, sizes) for each in value]
    if isinstance(value, str) and value.startswith("="):
        return compiled((value[1:],))(sizes)[0]
    return value
