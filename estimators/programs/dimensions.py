"""The named sizes of a call: those of the config, and those of its place in a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from memfit.estimators.arch.specs import Growth, KVBuffer
from memfit.estimators.base.workload import Workload
from memfit.estimators.mlx.call_plan import CHUNKS, PlannedCall
from memfit.estimators.mlx.kernels import AttentionCall, Mask, fused_kernel
from memfit.estimators.mlx.kv_cache import capacity_at, is_quantised
from memfit.estimators.programs.expressions import ExpressionError, compiled, evaluate
from memfit.estimators.programs.graph import RecordedAttention
from memfit.estimators.trace.kernel_stubs import TraceTarget

WINDOW = "W"
"""The name of a sliding window among the sizes, in tokens."""
# All buffers without a limit grow alike, and all with the same one.
_FULL = KVBuffer(1, 1, 1)

CALL_FEATURES = (
    "chunk",
    "P == 0",
    "L == 1",
    "C == P + L",
    "C0 == C",
    "C0 == P",
    # A buffer is cut to its tokens before it grows, but for whole steps (mlx-lm cache.py, KVCache).
    "P % 256 == 0",
    "B > 1",
    # mlx-lm copies the caches of a batch when it begins to generate.
    "B > 1 and first_token",
    # Where Metal reads a boolean mask, CUDA writes it out.
    "cuda",
)
"""Conditions that choose among the graphs of any class: a call's own and those of its caches."""
QUANTISED_FEATURES = ("Q0", "Q1")
"""Whether caches are quantised before a call and after it, where that was recorded."""
WINDOW_FEATURES = (
    "P + L <= W",
    "P < W",
    "P + 1 < W",
    "P <= W",
    "P == W",
    "P + L == W",
    "L > W",
    "PW == 0",
    "W0 == W1",
    "W1 == P + L",
    "first_token",
)
"""Those of a class with a sliding window besides."""


def config_sizes(dims: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, int]:
    """Return the named sizes that a config sets.

    Raises:
        ExpressionError: when one of them is no positive integer.
    """
    sizes: dict[str, int] = {}
    for name, text in dims.items():
        value = evaluate(text, config)
        if type(value) is not int or value < 1:
            raise ExpressionError(f"{text}: {value!r} is not a positive integer")
        sizes[name] = value
    return sizes


def attention_features(attention: Sequence[RecordedAttention]) -> tuple[str, ...]:
    """Return the names of which kernels of MLX take each attention of a class."""
    return tuple(f"fused{i}_{mask}" for i, each in enumerate(attention) for mask in each.masks)


def call_sizes(
    sizes: Mapping[str, int],
    attention: Sequence[RecordedAttention],
    workload: Workload,
    planned: PlannedCall,
    target: TraceTarget,
) -> dict[str, int]:
    """Return the sizes of a config and those of a call.

    ``B`` sequences of ``L`` tokens after ``P`` others, in caches with room for ``C0`` tokens before
    the call and ``C`` after it. With a window ``W0`` and ``W1`` are those of a rotating cache,
    ``PW`` where its next token goes and ``M1`` what a chunk keeps of it. Quantised caches have
    ``KB`` bits in groups of ``KG`` elements.
    """
    tokens, position = planned.tokens, planned.position
    end = position + tokens
    result = {
        **sizes,
        "B": workload.batch,
        "L": tokens,
        "P": position,
        "C0": capacity_at(_FULL, workload, position),
        "C": capacity_at(_FULL, workload, end),
        "chunk": int(planned.phase in CHUNKS),
        "first_token": int(planned.phase == "last_token"),
        "Q0": int(is_quantised(workload, position)),
        "Q1": int(is_quantised(workload, end)),
        "cuda": int(target.backend == "cuda"),
    }
    if result["Q1"]:
        assert workload.kv_bits is not None
        result |= {"KB": workload.kv_bits, "KG": workload.kv_group_size}
    if window := sizes.get(WINDOW):
        rotating = KVBuffer(1, 1, 1, Growth.ROTATING, window)
        result |= {
            "W0": capacity_at(rotating, workload, position),
            "W1": capacity_at(rotating, workload, end),
            "PW": position % window,
            "M1": min(position, window - 1),
        }
    names = iter(attention_features(attention))
    for each in attention:
        for mask in each.masks:
            result[next(names)] = _kernel(each, result, mask, target)
    return result


def _kernel(
    attention: RecordedAttention, sizes: Mapping[str, int], mask: Mask, target: TraceTarget
) -> int:
    """Return 1 for a fused kernel, 2 for one with a scratch buffer.

    Where all scores are held it is 0, and 3 if no heads share keys and values.
    """
    *texts, _ = attention
    heads, kv_heads, key_dim, value_dim, keys, is_there = compiled(texts)(sizes)
    if not is_there:
        return 0
    call = AttentionCall(
        backend=target.backend,
        nax=target.nax,
        query_tokens=sizes["L"],
        key_tokens=keys,
        key_dim=key_dim,
        value_dim=value_dim,
        heads=heads,
        kv_heads=kv_heads,
        mask=mask,
        batch=sizes["B"],
        compute_capability=target.compute_capability,
    )
    # mlx-lm has operations of its own for quantised caches (models/base.py).
    kernel = None if sizes["Q0"] else fused_kernel(call, target.versions.mlx)
    if kernel is None:
        return 3 if heads == kv_heads else 0
    return 2 if kernel.block else 1
