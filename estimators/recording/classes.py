"""Which classes are recorded, and what of their configs are sizes."""

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.programs.dimensions import (
    CALL_FEATURES,
    QUANTISED_FEATURES,
    WINDOW,
    WINDOW_FEATURES,
    attention_features,
)
from memfit.estimators.programs.graph import RecordedAttention
from memfit.estimators.programs.kinds import layer_kinds
from memfit.estimators.trace.kernel_stubs import TraceTarget

_NAME = re.compile(r"[A-Za-z_]\w*")


class Draw(NamedTuple):
    """What is drawn for one recording."""

    config: Mapping[str, Any]
    quantize: Quantization | None


class ClassPlan(Struct, frozen=True, kw_only=True):
    """How a class is recorded."""

    base: Mapping[str, Any]
    """A small config of it, deep enough for every kind of layer beside every other."""
    dims: Mapping[str, str]
    """Names of sizes and their expressions on the config."""
    draws: Mapping[str, Sequence[Any]]
    """The values that are drawn for keys of the config, or for several keys together."""
    packed_draws: Mapping[str, Sequence[Any]] = {}
    """Those of a quantised model, where a row has whole groups."""
    layer_count: str = "num_hidden_layers"
    kinds: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    attention: tuple[RecordedAttention, ...] = ()
    module: str = ""
    """The file of the class in mlx-lm, where its name is not the model type."""
    guards: tuple[str, ...] = ()
    """Conditions that all draws fulfil, and that its graphs are known under."""
    backends: tuple[str, ...] = ("gpu",)
    """The groups of `TARGETS` that it is recorded for."""
    batches: bool = False
    """Whether several sequences are recorded too."""
    quantised_caches: bool = False
    """Whether calls with caches of few bits are recorded too."""
    others: tuple[Mapping[str, Any], ...] = ()
    """Other values of settings of the base that its graphs are recorded with."""

    def names(self) -> set[str]:
        """Return the settings that say sizes, depth and kinds."""
        texts = [*self.dims.values(), self.layer_count, *self.kinds]
        return set(_NAME.findall(" ".join(texts)))

    def layer_kinds(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        return layer_kinds(self.kinds, self.layer_count, config)

    def targets(self) -> tuple[tuple[TraceTarget, ...], ...]:
        """Return the machines of each variant."""
        return tuple(TARGETS[name] for name in self.backends)

    def call_features(self) -> tuple[str, ...]:
        """Return what tells graphs of its calls apart: conditions, then kernels."""
        windowed = WINDOW_FEATURES if WINDOW in self.dims else ()
        quantised = QUANTISED_FEATURES if self.quantised_caches else ()
        return (
            *CALL_FEATURES,
            *windowed,
            *quantised,
            *self.features,
            *attention_features(self.attention),
        )

    def draw(self, chance: random.Random, *, packed: bool) -> Draw:
        """Return a config with sizes at random."""
        choices = {**self.draws, **self.packed_draws} if packed else self.draws
        quantize = Quantization(chance.choice(_BITS), chance.choice(_GROUPS)) if packed else None
        config = dict(self.base)
        for keys, values in choices.items():
            # Several keys that depend on one another are drawn together.
            names, value = keys.split(), chance.choice(values)
            config |= zip(names, value if len(names) > 1 else (value,), strict=True)
        return Draw(config, quantize)


TARGETS = {
    # Metal and CUDA have the same graphs but for masks and where attention is fused.
    "gpu": (
        TraceTarget(),
        TraceTarget(nax=True),
        TraceTarget(backend="cuda", compute_capability=90),
    ),
    "metal": (TraceTarget(), TraceTarget(nax=True)),
    "cpu": (TraceTarget(backend="cpu"),),
}
"""The machines whose calls are graphs of one variant."""

_BITS, _GROUPS = (4, 5, 6, 8), (32, 64)
