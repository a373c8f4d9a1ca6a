"""Which classes are recorded, and what of their configs are sizes."""

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.programs.graph import RecordedAttention
from memfit.estimators.programs.kinds import layer_kinds

_NAME = re.compile(r"[A-Za-z_]\w*")


class Draw(NamedTuple):
    """What is drawn for one recording."""

    config: Mapping[str, Any]
    quantize: Quantization | None
    values: Mapping[str, Any]
    """By key of the plan's draws."""


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
    batches: bool = False
    """Whether several sequences are recorded too."""
    others: tuple[Mapping[str, Any], ...] = ()
    """Other values of settings of the base that its graphs are recorded with."""

    def names(self) -> set[str]:
        """Return the settings that say sizes, depth and kinds."""
        texts = [*self.dims.values(), self.layer_count, *self.kinds]
        return set(_NAME.findall(" ".join(texts)))

    def layer_kinds(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        return layer_kinds(self.kinds, self.layer_count, config)

    def draw(self, chance: random.Random, *, packed: bool, like: Draw | None = None) -> Draw:
        """Return sizes at random; those ``like`` another draw keep some of its values."""
        choices = {**self.draws, **self.packed_draws} if packed else self.draws
        drawn = {key: chance.choice(values) for key, values in choices.items()}
        if like:
            kept = chance.choice(_KEPT)
            drawn |= {key: like.values[key] for key in choices if chance.random() < kept}
        quantize = Quantization(chance.choice(_BITS), chance.choice(_GROUPS)) if packed else None
        config = dict(self.base)
        for keys, value in drawn.items():
            # Several keys that depend on one another are drawn together.
            names = keys.split()
            config |= zip(names, value if len(names) > 1 else (value,), strict=True)
        return Draw(config, quantize, drawn)


_KEPT = (0.3, 0.6, 0.9)
_BITS, _GROUPS = (4, 5, 6, 8), (32, 64)
