"""Tensors by the part of the model and by the group they belong to."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache
from math import prod
from typing import NamedTuple

from memfit.estimators.arch.model import Part
from memfit.estimators.base import dtypes
from memfit.estimators.checkpoint.manifest import Tensor

EXPERTS = ".experts.*."
FLOATING = frozenset({"F16", "BF16", "F32"})
"""The types of floating numbers that MLX computes with."""


class TensorGroup(NamedTuple):
    """A tensor, or several that differ only in the number of their expert."""

    name: str
    """Its name; a star is in the place of the expert's number."""
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    """Bytes of one copy."""
    copies: int = 1
    """How many tensors there are in the group."""

    def as_type(self, dtype: str) -> "TensorGroup":
        """Return the group with elements of another type."""
        return self._replace(dtype=dtype, nbytes=dtypes.nbytes(prod(self.shape), dtype))


def tensor_groups(tensors: Iterable[Tensor]) -> tuple[TensorGroup, ...]:
    """Return the tensors in order, those of a layer's experts as one group.

    >>> experts = [Tensor(f"layer.experts.{index}.w1", "U8", (2,), 2) for index in range(3)]
    >>> tensor_groups(experts)
    (TensorGroup(name='layer.experts.*.w1', dtype='U8', shape=(2,), nbytes=2, copies=3),)
    """
    counts: Counter[tuple[str, str, tuple[int, ...], int]] = Counter()
    for name, dtype, shape, nbytes in tensors:
        parent, found, rest = name.partition(".experts.")
        if found:
            index, _, place = rest.partition(".")
            # A stacked expert has no number, and is a tensor of its own.
            if index.isdecimal():
                name = f"{parent}{EXPERTS}{place}"
        counts[name, dtype, shape, nbytes] += 1
    return tuple(TensorGroup(*key, copies) for key, copies in counts.items())


def sizes(groups: Iterable[TensorGroup]) -> Counter[int]:
    """Return how many tensors there are of each size in bytes."""
    result: Counter[int] = Counter()
    for group in groups:
        result[group.nbytes] += group.copies
    return result


def part_rules(number: str, *rules: tuple[Part, str]) -> Callable[[str], Part]:
    """Return a function from a tensor's name to its part: the first pattern found decides.

    Layers and experts have the same names except for their numbers: what ``number`` finds counts
    as 0, so that each name is searched once.
    """
    numbers = re.compile(number)

    # Patterns are compiled for the first name that is not the model class's; most models have none.
    # Layers repeat, so a few hundred names remain of a hundred thousand.
    @lru_cache(maxsize=4096)
    def of_shape(name: str) -> Part:
        return next((part for part, pattern in rules if re.search(pattern, name)), Part.OTHER)

    return lambda name: of_shape(numbers.sub("0", name))


# Order matters: shared experts before experts.
_part_of = part_rules(
    r"\d+",
    (
        Part.VISION,
        r"(^|\.)(vision|visual|vit|vqmodel|audio|image|img|speech|sound|multi_modal|multimodal"
        r"|mm_|aligner|patch_merger|perceiver|resampler|conformer)|embed_(vision|audio)"
        r"|^encoder\.(conv|layers|embed)",
    ),
    (
        Part.NORM,
        r"norm\d?(\.(weight|bias|scale|\d+\.weight|\d+\.bias))?$"
        r"|(^|\.)(norm|ln|ln_f|ln_\w{1,4}|final_ln|layernorm\w*)\.(weight|bias)$"
        r"|norm\w*\.(weight|bias)$",
    ),
    (Part.SHARED_EXPERTS, r"shared?_(experts?|mlp)"),
    (
        Part.ROUTER,
        r"router|\.gate\.(weight|scales|biases|bias|wg|gate|gate_proj|qweight|qzeros|e_score\w*"
        r"|expert_bias|router_bias)|expert_bias|e_score_correction_bias|gate\.wg|\.moe\.gate\.",
    ),
    # Not the projections around them, such as pre_expert_proj and routed_expert_up_proj.
    (
        Part.EXPERTS,
        r"experts[._]|(^|\.)expert[._]|switch_(mlp|glu)|input_linear|output_linear|\.moe\.",
    ),
    (Part.HEAD, r"(^|\.)(lm_head|embed_out|output|head)\.[a-z_]+$"),
    (
        Part.EMBEDDING,
        r"(^|\.)(embed_tokens\w*|tok_embeddings|word_embeddings|wte|wpe|embed_in|embeddings?"
        r"|embed_positions)\.",
    ),
    (
        Part.ATTENTION,
        r"attn|attention|mixer|mamba|ssm|conv|temporal_block|time_mix|recurrent|rotary"
        r"|[._](qkvo|qkv|[qkvo])_proj|\.(A_log|D|dt_bias)$",
    ),
    (
        Part.MLP,
        r"mlp|feed_forward|ffn|channel_mix|feedforward|[._](gate|up|down)_proj|\.(fc|w)\d?\.",
    ),
)


def part_of(name: str) -> Part:
    """Return the part that a tensor's name suggests; ``OTHER`` when no rule knows it.

    >>> part_of("model.layers.0.mlp.switch_mlp.up_proj.scales").value
    'experts'
    """
    return _part_of(name)
