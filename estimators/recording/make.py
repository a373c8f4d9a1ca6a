"""Data of a class from recordings at many small sizes."""

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from memfit.estimators.arch.registry import FAMILIES
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.programs.graph import (
    SCHEMA,
    Argument,
    BlockText,
    RecordedClass,
    Structure,
    Variant,
    layer_key,
)
from memfit.estimators.programs.select import features_met
from memfit.estimators.recording.classes import ClassPlan
from memfit.estimators.recording.describe import class_description
from memfit.estimators.recording.draws import LEAST, DrawnCall, draw_calls, models_of
from memfit.estimators.recording.fit import Fitting
from memfit.estimators.recording.plans import CLASSES
from memfit.estimators.recording.settings import class_settings, ignored_settings
from memfit.estimators.recording.split import FittedCall, Splitting, block_text, layers_root
from memfit.estimators.recording.verify import verify
from memfit.estimators.trace.kernel_stubs import TraceTarget

DATA = Path(__file__).parents[1] / "programs" / "data"
RECORDED = {name: plan for name, plan in CLASSES.items() if name not in FAMILIES}
"""Those that no formula describes; the others show that the recording is right."""


class Blocks:
    """The blocks of a class, each there once."""

    def __init__(self) -> None:
        self.texts: list[BlockText] = []
        self._positions: dict[bytes, int] = {}

    def place(self, text: BlockText) -> int:
        """Return the position of a block, which is added where there is none like it."""
        key = msgspec.json.encode(text)
        if key not in self._positions:
            self._positions[key] = len(self.texts)
            self.texts.append(text)
        return self._positions[key]


def fitted_call(drawn: Sequence[DrawnCall]) -> tuple[FittedCall, tuple[str, ...]]:
    """Return the expressions of a structure's sizes, and what held in all its recordings.

    Raises:
        UnsupportedError: when a size is no expression that is known.
    """
    fitting = Fitting([each.sizes for each in drawn])
    calls = [each.call for each in drawn]

    def text(values: tuple[int, ...], what: str) -> str:
        found = fitting.text(values)
        if found is None:
            shown = [
                {**each.sizes, "value": value} for each, value in zip(drawn, values, strict=True)
            ]
            raise UnsupportedError(f"{what} is no known expression: {shown[:8]}")
        return found

    first = calls[0]
    shapes = tuple(
        tuple(
            text(tuple(call.arrays[i].shape[axis] for call in calls), f"an axis of {array}")
            for axis in range(len(array.shape))
        )
        for i, array in enumerate(first.arrays)
    )
    arguments = tuple(
        tuple(
            _argument([call.nodes[i].arguments[k] for call in calls], partial(text, what=node.name))
            for k in range(len(node.arguments))
        )
        for i, node in enumerate(first.nodes)
    )
    return FittedCall(first, shapes, arguments), tuple(fitting.guards())


def _argument(values: list[Any], text: Callable[[tuple[int, ...]], str]) -> Argument:
    first = values[0]
    if isinstance(first, tuple):
        return tuple(_argument([each[k] for each in values], text) for k in range(len(first)))
    if isinstance(first, float):
        return 0.0
    if isinstance(first, bool) or not isinstance(first, int):
        return first
    found = text(tuple(values))
    return int(found) if found.lstrip("-").isdigit() else f"={found}"


def recorded_class(plan: ClassPlan, *, packings: Sequence[bool] = (False, True)) -> RecordedClass:
    """Return the data of a class.

    Raises:
        UnsupportedError: when its calls do not follow from sizes and kinds of layers.
    """
    from memfit.estimators.trace.libraries import versions

    digest = made_from(plan)
    plan = replace(plan, base={**class_settings(plan), **plan.base})
    settings = class_settings(plan)
    ignored = ignored_settings(plan, settings)
    free = {*ignored, *plan.names(), *(name for other in plan.others for name in other)}
    blocks, features = Blocks(), plan.call_features()
    variants = tuple(
        _variant(plan, blocks, features, targets, packed=packed)
        for targets in plan.targets()
        for packed in packings
    )
    return RecordedClass(
        schema=SCHEMA,
        model_type=plan.base["model_type"],
        versions=versions(),
        dims=plan.dims,
        layer_count=plan.layer_count,
        kinds=plan.kinds,
        attention=plan.attention,
        features=features,
        settings=settings,
        # Of a mapping with a size among its numbers the rest is fixed too.
        fixed={
            name: plan.base[name]
            for name in settings
            if name not in free or isinstance(plan.base[name], Mapping)
        },
        ignored={name: plan.base[name] for name in ignored},
        variants=variants,
        blocks=tuple(blocks.texts),
        description=class_description(plan),
        made_from=digest,
    )


def _variant(
    plan: ClassPlan,
    blocks: Blocks,
    features: tuple[str, ...],
    targets: Sequence[TraceTarget],
    *,
    packed: bool,
) -> Variant:
    drawn = draw_calls(plan, targets, packed=packed)
    chosen: dict[str, set[Hashable]] = defaultdict(set)
    for key, calls in drawn.items():
        for each in calls:
            chosen[features_met(features, each.sizes)].add(key)
    structures = []
    for calls in drawn.values():
        texts = sorted({features_met(features, each.sizes) for each in calls})
        when = tuple(text for text in texts if len(chosen[text]) == 1)
        if when and models_of(calls, plan.dims) >= LEAST:
            structures.append(_structure(plan, blocks, calls, when))
    backends = dict.fromkeys(target.backend for target in targets)
    facts = {"packed": (packed,), "backend": tuple(backends)}
    return Variant(facts, tuple(sorted(structures, key=lambda each: each.when)))


def _structure(
    plan: ClassPlan, blocks: Blocks, calls: Sequence[DrawnCall], when: tuple[str, ...]
) -> Structure:
    fitted, guards = fitted_call(calls)
    names = [array.name for array in fitted.call.arrays if array.role == "weight"]
    kinds = plan.layer_kinds(plan.base)
    prologue, *layers = Splitting(fitted, layers_root(names)).blocks(len(kinds))
    placed: dict[str, int] = {}
    for layer, block in enumerate(layers):
        key, position = layer_key(kinds, layer), blocks.place(block_text(block))
        if placed.setdefault(key, position) != position:
            raise UnsupportedError(f"layers of kind {key!r} differ: {layer} from one before it")
    return Structure(when, (*guards, *plan.guards), blocks.place(block_text(prologue)), placed)


def recorded(model_type: str, *, packings: Sequence[bool] = (False, True)) -> RecordedClass:
    """Return the data of a class by its model type."""
    return recorded_class(CLASSES[model_type], packings=packings)


def made_from(plan: ClassPlan) -> str:
    """Return a digest of what decides the data of a class, but for the libraries' versions."""
    plain = ClassPlan(base={}, dims={}, draws={})
    stated = {
        name: getattr(plan, name)
        for name in plan.__struct_fields__
        if getattr(plan, name) != getattr(plain, name)
    }
    return sha256(repr(stated).encode()).hexdigest()[:16]


def data_text(recorded: RecordedClass) -> str:
    """Return the data of a class as its file has it: one line for each array and node."""
    fields = msgspec.to_builtins(recorded)
    lines = [
        f"{_json(name)}: {_json(value)}," for name, value in fields.items() if name not in _LISTED
    ]
    return "\n".join(
        (
            "{",
            *lines,
            '"variants": [',
            ",\n".join(map(_variant_text, fields["variants"])),
            "],",
            '"blocks": [',
            ",\n".join(map(_block_text, fields["blocks"])),
            "]",
            "}",
            "",
        )
    )


_ENDS = ("evaluated", "cached", "exports")
_LISTED = ("variants", "blocks")


def _json(value: Any) -> str:
    return json.dumps(value, separators=(", ", ": "))


def _variant_text(variant: Mapping[str, Any]) -> str:
    structures = ",\n".join(map(_json, variant["structures"]))
    return f'{{"facts": {_json(variant["facts"])}, "structures": [\n{structures}\n]}}'


def _block_text(block: Mapping[str, Any]) -> str:
    inputs, nodes = (",\n".join(map(_json, block[name])) for name in ("inputs", "nodes"))
    ends = ", ".join(
        f'"{name}": {_json(block[name])}' for name in ("evaluated", "cached", "exports")
    )
    return f'{{"inputs": [\n{inputs}\n], "nodes": [\n{nodes}\n], {ends}}}'


def main(names: Sequence[str]) -> None:
    """Write the data of the named classes, of all without names."""
    for name in names or sorted(RECORDED):
        made = recorded(name)
        verify(CLASSES[name], made)
        (DATA / f"{name}.json").write_text(data_text(made), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
