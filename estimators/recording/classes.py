"""Which classes are recorded, and what of their configs are sizes."""

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.programs.graph import RecordedAttention
from memfit.estimators.programs.kinds import layer_kinds


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
    """The values that are drawn for keys of the config."""
    packed_draws: Mapping[str, Sequence[Any]] = {}
    """Those of a quantised model, where a row has whole groups."""
    layer_count: str = "num_hidden_layers"
    kinds: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    attention: tuple[RecordedAttention, ...] = ()

    def layer_kinds(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        return layer_kinds(self.kinds, self.layer_count, config)

    def draw(self, chance: random.Random, *, packed: bool, like: Draw | None = None) -> Draw:
        """Return sizes at random; those ``like`` another draw keep about half of its values."""
        choices = {**self.draws, **self.packed_draws} if packed else self.draws
        drawn = {key: chance.choice(values) for key, values in choices.items()}
        if like:
            drawn |= {key: like.config[key] for key in choices if chance.random() < _KEPT}
        quantize = Quantization(chance.choice(_BITS), chance.choice(_GROUPS)) if packed else None
        return Draw({**self.base, **drawn}, quantize)


_KEPT = 0.5
_BITS, _GROUPS = (4, 5, 6, 8), (32, 64)


def _steps(first: int, last: int, step: int) -> Sequence[int]:
    return range(first, last, step)


_WIDTHS = {
    "hidden_size": _steps(96, 640, 16),
    "intermediate_size": _steps(128, 640, 16),
    "vocab_size": _steps(300, 900, 7),
}
_PACKED_WIDTHS = {
    "hidden_size": _steps(128, 960, 64),
    "intermediate_size": _steps(128, 960, 64),
}
_HEADS = {
    "num_attention_heads": (4, 8, 12, 16, 24),
    "num_key_value_heads": (2, 4),
    "head_dim": (32, 64, 80, 96, 128, 256),
}
_PACKED_HEADS = {"head_dim": (32, 64, 96, 128, 256)}
_ATTENTION = RecordedAttention("num_attention_heads", "num_key_value_heads", "head_dim", "head_dim")


def _dims(*names: str) -> Mapping[str, str]:
    return {name: name for name in names}


QWEN3 = ClassPlan(
    base={
        "model_type": "qwen3",
        "hidden_size": 128,
        "num_hidden_layers": 6,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 4096,
        "vocab_size": 320,
        "tie_word_embeddings": False,
    },
    dims=_dims(*_WIDTHS, *_HEADS),
    draws={**_WIDTHS, **_HEADS},
    packed_draws={**_PACKED_WIDTHS, **_PACKED_HEADS},
    attention=(_ATTENTION,),
)

CLASSES = {plan.base["model_type"]: plan for plan in (QWEN3,)}
