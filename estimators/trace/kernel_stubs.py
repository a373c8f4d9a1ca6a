"""Fused operations as one node each, on a build of MLX that has no kernels of the target.

MLX records a custom Metal kernel without Metal while it exports a function, so that a kernel
without a body can stand for any fused operation. What the operations cast and broadcast before
their kernels follows mlx/fast.cpp; when attention is fused follows mlx/kernels.py.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

from memfit.estimators.base.records import record
from memfit.estimators.machine.device import Backend
from memfit.estimators.mlx.kernels import is_fused
from memfit.estimators.mlx.versions import MLX_VERSION
from memfit.estimators.trace.compiled_regions import ANY_SHAPE, BEGINS, ENDS
from memfit.estimators.trace.libraries import PrivateLibrary, changed, set_attributes

# Names of nodes that are no operation: the borders of what mx.compile was given.
_NAME_ENDS = "__end"
# Primitives that mlx/export.cpp has no row for, by the function that makes them.
_NOT_EXPORTED = {
    "bitwise_invert": "BitwiseInvert",
    "contiguous": "Contiguous",
    "from_fp8": "FromFP8",
    "qqmm": "QQMatmul",
    "segmented_mm": "SegmentedMM",
    "to_fp8": "ToFP8",
}
# Functions that weights are made with: a key of their own leaves the thread's numbers as they are.
_RANDOM = (
    *("bernoulli", "categorical", "gumbel", "laplace", "multivariate_normal", "normal"),
    *("permutation", "randint", "truncated_normal", "uniform"),
)


class _CompiledCalls:
    """Counts the calls of compiled functions in a recording."""

    def __init__(self) -> None:
        self.inside = False
        self._count = 0

    @contextmanager
    def next(self) -> Iterator[int]:
        self._count += 1
        self.inside = True
        try:
            yield self._count
        finally:
            self.inside = False


_CALLS: ContextVar[_CompiledCalls | None] = ContextVar("compiled calls", default=None)


@record(frozen=True, slots=True, kw_only=True)
class TraceTarget:
    """Whose graph is recorded; ``mlx_version`` chooses the rules, as of fused attention."""

    backend: Backend = "metal"
    nax: bool = False
    compute_capability: int | None = None
    mlx_version: tuple[int, ...] = MLX_VERSION


@cache
def library_for(backend: Backend) -> PrivateLibrary:
    """Return mlx-lm's classes as they are on a machine of ``backend``, which compute nothing.

    The library is made once and shared by all traces: a thread uses it inside `tracing` only.
    """
    import mlx.core as mx

    library = PrivateLibrary(backend)
    stubs: dict[str, Any] = {
        "compile": _compile,
        "eval": lambda *_: None,
        "async_eval": lambda *_: None,
    }
    if backend != "cpu":
        stubs |= {
            "default_device": lambda: mx.gpu,
            "metal.is_available": lambda: backend == "metal",
        }
    key = mx.random.key(0)
    for name in _RANDOM:
        stubs[f"random.{name}"] = partial(getattr(mx.random, name), key=key)
    set_attributes(library.core, stubs)
    return library


def _recording_stubs(target: TraceTarget) -> dict[str, Any]:
    """Return what else to replace in mlx.core while a call is recorded for ``target``."""
    import mlx.core as mx

    stubs: dict[str, Any] = {
        key: _alone(name, getattr(mx, key)) for key, name in _NOT_EXPORTED.items()
    }
    stubs |= {"zeros": _filled(0), "ones": _filled(1)}
    if target.backend == "cpu":
        return stubs | {
            "fast.rms_norm": _apart(mx.fast.rms_norm),
            "fast.layer_norm": _apart(mx.fast.layer_norm),
        }
    return stubs | {
        "dequantize": _alone("Quantize", mx.dequantize),
        "fast.rms_norm": _rms_norm(mx.fast.rms_norm),
        "fast.layer_norm": _layer_norm(mx.fast.layer_norm),
        "fast.rope": _rope(mx.fast.rope),
        "fast.scaled_dot_product_attention": _attention(
            mx.fast.scaled_dot_product_attention, target
        ),
    }


@contextmanager
def recorded(target: TraceTarget) -> Iterator[None]:
    """Build the graph of ``target`` inside the block, which runs while MLX exports."""
    token = _CALLS.set(_CompiledCalls())
    try:
        with changed(library_for(target.backend).core, _recording_stubs(target)):
            yield
    finally:
        _CALLS.reset(token)


def one_node(name: str, inputs: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """Return arrays shaped ``like`` others, as the outputs of one node ``name``."""
    import mlx.core as mx

    kernel: Any = mx.fast.metal_kernel(
        name=f"{name}{_NAME_ENDS}",
        input_names=[f"i{n}" for n in range(len(inputs))],
        output_names=[f"o{n}" for n in range(len(like))],
        source="",
    )
    outputs: list[Any] = kernel(
        inputs=list(inputs),
        output_shapes=[array.shape for array in like],
        output_dtypes=[array.dtype for array in like],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
    )
    return outputs


def kernel_name(exported: str) -> str:
    """Return the name a kernel was given, from the one MLX makes of it and its types.

    >>> kernel_name("custom_kernel_RMSNorm__end_bfloat16_t_bfloat16_t")
    'RMSNorm'
    """
    return exported.removeprefix("custom_kernel_").split(_NAME_ENDS)[0]


def _alone(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation that MLX cannot export, or has no kernel for here, as one node."""

    def alone(*given: Any, **settings: Any) -> Any:
        import mlx.core as mx

        values = (*given, *settings.values())
        arrays = [value for value in values if isinstance(value, mx.array)]
        return one_node(name, arrays, [original(*given, **settings)])[0]

    return alone


def _filled(value: int) -> Callable[..., Any]:
    """Return a mx.zeros or mx.ones whose results MLX does not merge into one when it exports.

    It merges equal operations on equal scalars: every layer's empty cache would become one node.
    """

    def filled(shape: Any, dtype: Any = None, **stream: Any) -> Any:
        import mlx.core as mx

        return mx.full(shape, mx.array([value], dtype or mx.float32), **stream)

    return filled


def _apart(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a norm that shares nothing with another norm of the same array.

    Where it is several operations MLX's export merges those that are equal; a run does not.
    """

    def norm(x: Any, *settings: Any, **stream: Any) -> Any:
        return original(one_node(f"{BEGINS}norm", [x], [x])[0], *settings, **stream)

    return norm


def _rms_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    def rms_norm(x: Any, weight: Any, eps: float, **stream: Any) -> Any:
        out = original(x, weight, eps, **stream)
        given = [x] if weight is None else [x, weight]
        return one_node("RMSNorm", [array.astype(out.dtype) for array in given], [out])[0]

    return rms_norm


def _layer_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    def layer_norm(x: Any, weight: Any, bias: Any, eps: float, **stream: Any) -> Any:
        out = original(x, weight, bias, eps, **stream)
        given = [array for array in (x, weight, bias) if array is not None]
        return one_node("LayerNorm", [array.astype(out.dtype) for array in given], [out])[0]

    return layer_norm


def _rope(original: Callable[..., Any]) -> Callable[..., Any]:
    def rope(x: Any, dims: int, **settings: Any) -> Any:
        import mlx.core as mx

        out = original(x, dims, **settings)
        offset = settings["offset"]
        given = [x, offset if isinstance(offset, mx.array) else mx.array(offset)]
        if settings.get("freqs") is not None:
            given.append(settings["freqs"])
        return one_node("RoPE", given, [out])[0]

    return rope


def _attention(original: Callable[..., Any], target: TraceTarget) -> Callable[..., Any]:
    def scaled_dot_product_attention(
        q: Any, k: Any, v: Any, *, scale: float, mask: Any = None, sinks: Any = None, **rest: Any
    ) -> Any:
        out = original(q, k, v, scale=scale, mask=mask, sinks=sinks, **rest)
        array_mask = mask is not None and not isinstance(mask, str)
        fused = is_fused(
            backend=target.backend,
            mlx_version=target.mlx_version,
            nax=target.nax,
            query_tokens=q.shape[2],
            key_tokens=k.shape[2],
            key_dim=q.shape[3],
            value_dim=v.shape[3],
            heads=q.shape[1],
            kv_heads=k.shape[1],
            causal=isinstance(mask, str) and mask == "causal",
            array_mask=array_mask,
            kv_quantised=False,
            compute_capability=target.compute_capability,
        )
        if not fused:
            return out
        given = [array.astype(out.dtype) for array in (q, k, v)]
        if array_mask:
            given.append(_broadcast_mask(mask, q, k, out.dtype))
        if sinks is not None:
            given.append(sinks.astype(out.dtype))
        return one_node("ScaledDotProductAttention", given, [out])[0]

    return scaled_dot_product_attention


def _broadcast_mask(mask: Any, q: Any, k: Any, dtype: Any) -> Any:
    import mlx.core as mx

    mask = mask if mask.dtype == mx.bool_ else mask.astype(dtype)
    return mx.broadcast_to(mask, (*q.shape[:3], k.shape[2]))


def _compile(
    fun: Callable[..., Any] | None = None, *_: Any, shapeless: bool = False, **__: Any
) -> Any:
    """Stand for mx.compile: the function leaves its borders in the graph of a recorded call."""
    if fun is None:
        return partial(_compile, shapeless=shapeless)

    def marked(*given: Any, **named: Any) -> Any:
        calls = _CALLS.get()
        if calls is None or calls.inside:
            return fun(*given, **named)  # MLX too takes a compiled function inside another apart
        with calls.next() as number:
            label = f"{number}{ANY_SHAPE}" if shapeless else str(number)
            taken = _bordered(f"{BEGINS}{label}", (given, named))
            return _bordered(f"{ENDS}{label}", fun(*taken[0], **taken[1]))

    return marked


def _bordered(name: str, tree: Any) -> Any:
    """Return the tree with its arrays passed through one node ``name``."""
    import mlx.core as mx

    arrays: list[Any] = []
    _each(tree, arrays.append, mx.array)
    if not arrays:
        return tree
    passed = iter(one_node(name, arrays, arrays))
    return _each(tree, lambda _: next(passed), mx.array)


def _each(tree: Any, change: Callable[[Any], Any], kind: type) -> Any:
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)(_each(value, change, kind) for value in tree)
    if isinstance(tree, dict):
        return {key: _each(value, change, kind) for key, value in tree.items()}
    return tree
