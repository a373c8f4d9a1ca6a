"""Fused operations as one node each, on a build of MLX that has no kernels of the target.

MLX records a custom Metal kernel without Metal while it exports a function, so that a kernel
without a body can represent any fused operation. What the operations cast and broadcast before
their kernels follows mlx/fast.cpp; when attention is fused follows mlx/kernels.py.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

from msgspec import Struct

from memfit.estimators.machine.device import Backend
from memfit.estimators.mlx.kernels import AttentionCall, Mask, fused_kernel
from memfit.estimators.mlx.versions import MlxVersions
from memfit.estimators.trace.compiled_functions import ANY_SHAPE, BEGINS, ENDS
from memfit.estimators.trace.libraries import PrivateLibrary, changed, set_attributes

# MLX appends types to the name of a kernel; this marks where the name ends.
_NAME_ENDS = "__end"
# Primitives that mlx/export.cpp has no row for, by the function that creates them.
_NOT_EXPORTED = {
    "bitwise_invert": "BitwiseInvert",
    "contiguous": "Contiguous",
    "from_fp8": "FromFP8",
    "qqmm": "QQMatmul",
    "segmented_mm": "SegmentedMM",
    "to_fp8": "ToFP8",
}
# Functions that weights are made with: a key of their own leaves the thread's numbers as they are.
RANDOM = (
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
_WIDTHS: ContextVar[set[tuple[int, int]] | None] = ContextVar("attention widths", default=None)


class TraceTarget(Struct, frozen=True, kw_only=True):
    """The machine and version of MLX that a graph is recorded for."""

    backend: Backend = "metal"
    nax: bool = False
    """Whether a Metal GPU has neural accelerators: `has_nax`."""
    compute_capability: int | None = None
    """Of a CUDA GPU, ten times its number: 90 for 9.0."""
    versions: MlxVersions = MlxVersions()
    """Of MLX the rules of fused attention, of mlx-lm the calls of a run."""


@cache
def library_for(backend: Backend) -> PrivateLibrary:
    """Return mlx-lm's classes as they are on a machine of ``backend``, which compute nothing.

    The library is made once and shared by all traces: a thread uses it inside `tracing` only.
    """
    import mlx.core as mx

    library = PrivateLibrary(backend)
    stubs: dict[str, Any] = {
        # Classes call these while they are imported, built or recorded.
        "compile": _compile,
        # MLX refuses to evaluate an array while it exports a function (transforms.cpp, eval_impl).
        "eval": lambda *_: None,
        "async_eval": lambda *_: None,
        # mlx-vlm makes a stream for each thread at import; a trace has one.
        "new_thread_local_stream": lambda _: None,
        "stream": lambda _: nullcontext(),
        # Only training needs the gradients that a class writes; forward it is the function.
        "custom_function": _Forward,
    }
    if backend != "cpu":
        stubs |= {
            # Classes check these two before they use a kernel of their own (mlx-lm ssm.py).
            "default_device": lambda: mx.gpu,
            "metal.is_available": lambda: backend == "metal",
        }
    key = mx.random.key(0)
    for name in RANDOM:
        stubs[f"random.{name}"] = partial(getattr(mx.random, name), key=key)
    set_attributes(library.core, stubs)
    # Classes import it by name, so it is replaced before any of them is loaded.
    library.load("mlx.nn.layers.distributed").sum_gradients = lambda _: _sum_gradients
    return library


class _Forward:
    """A custom function without its gradients."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._function(*args, **named)

    def vjp(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Ignore a gradient, as a decorator."""
        return function


def _sum_gradients(x: Any) -> Any:
    """Stand for a custom function, which MLX does not export; forward, it returns its argument."""
    # Its inputs end with what the function returns (mlx transforms.cpp, custom_vjp).
    return one_node("CustomTransforms", [x, x], [x])[0]


def recording_stubs(target: TraceTarget) -> dict[str, Any]:
    """Return what else to replace in mlx.core while a call is recorded for ``target``."""
    import mlx.core as mx

    stubs: dict[str, Any] = {
        key: _as_one_node(name, getattr(mx, key)) for key, name in _NOT_EXPORTED.items()
    }
    stubs |= {"zeros": _unmerged(0), "ones": _unmerged(1)}
    # The CPU's fallbacks are what it runs, so only their merging is prevented.
    if target.backend == "cpu":
        return stubs | {
            "dequantize": _dequantize(mx.dequantize, stubs["from_fp8"]),
            "fast.rms_norm": _unshared(mx.fast.rms_norm),
            "fast.layer_norm": _unshared(mx.fast.layer_norm),
        }
    return stubs | {
        # One kernel on a GPU, many operations in the fallback that a build without one exports.
        "dequantize": _as_one_node("Quantize", mx.dequantize),
        "fast.rms_norm": _as_one_node("RMSNorm", mx.fast.rms_norm, casts=True),
        "fast.layer_norm": _as_one_node("LayerNorm", mx.fast.layer_norm, casts=True),
        "fast.rope": _rope(mx.fast.rope),
        "fast.scaled_dot_product_attention": _attention(
            mx.fast.scaled_dot_product_attention, target
        ),
    }


@contextmanager
def recorded(target: TraceTarget) -> Iterator[None]:
    """Replace what ``target`` runs as one kernel inside the block, which MLX exports."""
    token = _CALLS.set(_CompiledCalls())
    try:
        with changed(library_for(target.backend).core, recording_stubs(target)):
            yield
    finally:
        _CALLS.reset(token)


@contextmanager
def attention_widths() -> Iterator[set[tuple[int, int]]]:
    """Yield the widths of keys and values that attention is called with inside the block."""
    seen: set[tuple[int, int]] = set()
    token = _WIDTHS.set(seen)
    try:
        yield seen
    finally:
        _WIDTHS.reset(token)


def one_node(name: str, inputs: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """Return arrays shaped ``like`` others, as the outputs of one node ``name``."""
    import mlx.core as mx

    kernel: Any = mx.fast.metal_kernel(
        name=f"{name}{_NAME_ENDS}",
        input_names=[f"i{n}" for n in range(len(inputs))],
        output_names=[f"o{n}" for n in range(len(like))],
        # Nothing is evaluated, so no kernel is ever compiled.
        source="",
    )
    outputs: list[Any] = kernel(
        inputs=list(inputs),
        output_shapes=[array.shape for array in like],
        output_dtypes=[array.dtype for array in like],
        # Any grid will do: recording.py keeps the name of a kernel and drops its arguments.
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
    )
    return outputs


def kernel_name(exported: str) -> str:
    """Return the name of a kernel, without the types that MLX appends to it.

    >>> kernel_name("custom_kernel_RMSNorm__end_bfloat16_t_bfloat16_t")
    'RMSNorm'
    """
    return exported.removeprefix("custom_kernel_").split(_NAME_ENDS)[0]


def _as_one_node(
    name: str, original: Callable[..., Any], *, casts: bool = False
) -> Callable[..., Any]:
    """Return an operation as one node: MLX cannot export it, or has no kernel for it here.

    Of some fast.cpp ``casts`` the inputs to the type of the result before the kernel.
    """

    def one(*args: Any, **settings: Any) -> Any:
        import mlx.core as mx

        values = (*args, *settings.values())
        arrays = [value for value in values if isinstance(value, mx.array)]
        # The original gives shape and type. Its own nodes lead to no result, so none is exported.
        out = original(*args, **settings)
        inputs = [array.astype(out.dtype) for array in arrays] if casts else arrays
        return one_node(name, inputs, [out])[0]

    return one


def _unmerged(value: int) -> Callable[..., Any]:
    """Return mx.zeros or mx.ones with results that MLX does not merge into one when it exports.

    It merges equal operations on equal scalars: the empty caches of all layers would be one node.
    """

    def filled(shape: Any, dtype: Any = None, **stream: Any) -> Any:
        import mlx.core as mx

        # It merges equal scalars (compile.cpp, compile_simplify), but no array that has an axis.
        return mx.full(shape, mx.array([value], dtype or mx.float32), **stream)

    return filled


def _unshared(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a norm that shares no operation with another norm of the same array.

    Without a kernel a norm is several operations. MLX's export merges equal ones; a run does not.
    """

    def norm(x: Any, *settings: Any, **stream: Any) -> Any:
        return original(one_node(f"{BEGINS}norm", [x], [x])[0], *settings, **stream)

    return norm


def _dequantize(original: Callable[..., Any], from_fp8: Callable[..., Any]) -> Callable[..., Any]:
    """Return mx.dequantize with its use of FP8, which MLX cannot export, as one node.

    Source: mlx/ops.cpp, fp_dequantize, the fallback that the CPU runs.
    """

    def dequantize(packed: Any, scales: Any, *args: Any, mode: str = "affine", **rest: Any) -> Any:
        import mlx.core as mx

        out = original(packed, scales, *args, mode=mode, **rest)
        if mode not in ("nvfp4", "mxfp8"):
            return out
        dtype, group = out.dtype, out.shape[-1] // scales.shape[-1]
        if mode == "mxfp8":
            values = from_fp8(packed.view(mx.uint8), dtype)
            powers = scales.reshape(-1, 1).astype(dtype) - mx.array(127, dtype)
            factors = mx.array(2, dtype) ** powers
        else:
            pairs, table = packed.reshape(-1, 4).view(mx.int8), mx.array([0] * 16, dtype)
            low, high = table[pairs & mx.array(15, mx.int8)], table[pairs >> mx.array(4, mx.int8)]
            values = mx.concatenate([low, high], axis=-1)
            factors = from_fp8(scales.reshape(-1, 1), dtype) * mx.array(1, dtype)
        return (values.reshape(-1, group) * factors).reshape(out.shape)

    return dequantize


def _rope(original: Callable[..., Any]) -> Callable[..., Any]:
    def rope(x: Any, dims: int, **settings: Any) -> Any:
        import mlx.core as mx

        out = original(x, dims, **settings)
        offset = settings["offset"]
        # A cache counts tokens in Python; fast.cpp makes an int32 array of the number.
        inputs = [x, offset if isinstance(offset, mx.array) else mx.array(offset)]
        # Frequencies are a third input of the kernel (fast.cpp, rope).
        if settings.get("freqs") is not None:
            inputs.append(settings["freqs"])
        return one_node("RoPE", inputs, [out])[0]

    return rope


def _attention(original: Callable[..., Any], target: TraceTarget) -> Callable[..., Any]:
    def scaled_dot_product_attention(
        q: Any, k: Any, v: Any, *, scale: float, mask: Any = None, sinks: Any = None, **rest: Any
    ) -> Any:
        import mlx.core as mx

        if (seen := _WIDTHS.get()) is not None:
            seen.add((k.shape[3], v.shape[3]))
        out = original(q, k, v, scale=scale, mask=mask, sinks=sinks, **rest)
        # mlx-lm passes an array, the word "causal" or nothing (models/base.py).
        array_mask = mask is not None and not isinstance(mask, str)
        kind: Mask = "array" if array_mask else "causal" if mask == "causal" else "none"
        kernel = fused_kernel(
            AttentionCall(
                backend=target.backend,
                nax=target.nax,
                query_tokens=q.shape[2],
                key_tokens=k.shape[2],
                key_dim=q.shape[3],
                value_dim=v.shape[3],
                heads=q.shape[1],
                kv_heads=k.shape[1],
                mask=kind,
                batch=q.shape[0],
                compute_capability=target.compute_capability,
            ),
            target.versions.mlx,
        )
        # What is not fused is recorded as fast.cpp's fallback, which the target runs too.
        if kernel is None:
            return out
        inputs = [array.astype(out.dtype) for array in (q, k, v)]
        # In the order of fast.cpp: queries, keys, values, mask, sinks.
        if array_mask:
            shape = (*q.shape[:3], k.shape[2])
            inputs.append(_broadcast_mask(mask, shape, out.dtype, target.backend))
        if sinks is not None:
            inputs.append(sinks.astype(out.dtype))
        outputs = [out]
        if kernel.block:
            row = kernel.scratch_row(k.shape[2], q.shape[3])
            outputs.append(mx.zeros((*q.shape[:2], kernel.block, row), out.dtype))
        return one_node("ScaledDotProductAttention", inputs, outputs)[0]

    return scaled_dot_product_attention


def _broadcast_mask(mask: Any, shape: tuple[int, ...], dtype: Any, backend: Backend) -> Any:
    """Return the mask as fast.cpp gives it to a fused kernel.

    A boolean one stays so on Metal; on CUDA 0 and -inf are written out for all heads, and chosen
    from (fast.cpp since 704fd1ae2: CUDA's supports_bool_mask is false).
    """
    import mlx.core as mx

    if mask.dtype != mx.bool_:
        return mx.broadcast_to(mask.astype(dtype), shape)
    mask = mx.broadcast_to(mask, shape)
    if backend != "cuda":
        return mask
    # A kernel of its own for each: an export would make those of all layers one.
    chosen = [
        one_node("Full", [mx.broadcast_to(mx.array(value, dtype), shape)], [mask.astype(dtype)])[0]
        for value in (0.0, float("-inf"))
    ]
    return mx.where(mask, *chosen)


def _compile(
    fun: Callable[..., Any] | None = None, *_: Any, shapeless: bool = False, **__: Any
) -> Any:
    """Replace mx.compile: the function marks its borders in the graph of a recorded call."""
    if fun is None:
        return partial(_compile, shapeless=shapeless)

    def marked(*args: Any, **named: Any) -> Any:
        calls = _CALLS.get()
        if calls is None or calls.inside:
            return fun(*args, **named)  # MLX too inlines a compiled function inside another
        with calls.next() as number:
            # Arguments and results pass through border nodes; compiled_functions.py removes these.
            label = f"{number}{ANY_SHAPE}" if shapeless else str(number)
            inner_args, inner_named = _bordered(f"{BEGINS}{label}", (args, named))
            return _bordered(f"{ENDS}{label}", fun(*inner_args, **inner_named))

    return marked


def _bordered(name: str, tree: Any) -> Any:
    """Return the tree with its arrays passed through one node ``name``."""
    import mlx.core as mx

    arrays: list[Any] = []
    map_arrays(tree, arrays.append, mx.array)
    if not arrays:
        return tree
    passed = iter(one_node(name, arrays, arrays))
    return map_arrays(tree, lambda _: next(passed), mx.array)


def map_arrays(tree: Any, change: Callable[[Any], Any], kind: type) -> Any:
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_arrays(value, change, kind) for value in tree)
    if isinstance(tree, dict):
        return {key: map_arrays(value, change, kind) for key, value in tree.items()}
    return tree
