"""What convolutions copy and allocate on Metal: implicit products, Winograd, windows written out.

Source: mlx/backend/metal/conv.cpp, dispatch_conv_2D_gpu and dispatch_conv_3D_gpu.
"""

from collections.abc import Callable
from math import prod
from typing import NamedTuple

from memfit.estimators.base.units import ceil_div
from memfit.estimators.trace.layouts import View
from memfit.estimators.trace.operation import Operation, copied

# Winograd's tiles: 8 by 8 products make 6 by 6 results.
_TILE, _PRODUCTS = 6, 64
_LARGE_INPUT, _LARGE_OUTPUT, _MANY_CHANNELS = 4096, 256, 256
# Channels are read in blocks of this size.
_BLOCK = 16
_FEW_CHANNELS = 4
_DEEP_KERNEL = 7


class _Convolution(NamedTuple):
    """One convolution, with the names of MLX's parameters."""

    source: View
    weight: View
    out: View
    strides: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    input_dilation: tuple[int, ...]
    groups: int
    is_flipped: bool

    @property
    def channels(self) -> int:
        """Channels of the input."""
        return self.source.shape[-1]

    @property
    def kernel(self) -> tuple[int, ...]:
        """Lengths of the kernel."""
        return self.weight.shape[1:-1]

    @property
    def is_aligned(self) -> bool:
        """Whether results have a number of channels that kernels write without padding."""
        results = self.weight.shape[0] // self.groups
        return results <= _BLOCK or results % _BLOCK == 0

    @property
    def has_blocks(self) -> bool:
        """Whether channels come in whole blocks."""
        return self.channels // self.groups % _BLOCK == 0 and self.is_aligned


def convolution(op: Operation) -> None:
    """Any convolution."""
    source, weight = op.inputs[:2]
    strides, padding, _, dilation, input_dilation, groups, is_flipped = op.arguments
    asked = _Convolution(
        *(source, weight, op.outputs[0]),
        *(strides, padding, dilation, input_dilation),
        *(groups, bool(is_flipped)),
    )
    op.kernels = 1
    _BY_AXES[len(source.shape) - 2](op, asked)


def _prepare(op: Operation) -> None:
    op.allocate(op.outputs[0])
    for array in op.inputs[:2]:
        if not array.row:
            copied(op, array)


def _along_one_axis(op: Operation, asked: _Convolution) -> None:
    _prepare(op)
    results, groups = asked.weight.shape[0], asked.groups
    is_dense = asked.input_dilation == (1,)
    fully_separate = groups == asked.channels == results and asked.strides == (1,)
    if is_dense and fully_separate and asked.dilation == (1,) and asked.padding == (0,):
        return
    per_group = asked.channels // groups
    if is_dense and (per_group <= _FEW_CHANNELS or asked.has_blocks) and asked.is_aligned:
        return
    _unfold(op, asked)


def _along_two_axes(op: Operation, asked: _Convolution) -> None:
    _prepare(op)
    is_dense = set(asked.input_dilation) == {1}
    few = asked.channels // asked.groups <= _FEW_CHANNELS
    is_special = (few or asked.has_blocks) and asked.is_aligned
    results = prod(asked.out.shape[:-1])
    if asked.groups > 1:
        if not (is_dense and (_is_depthwise(asked) or is_special)):
            _unfold(op, asked)
    elif _is_winograd(asked):
        _winograd(op, asked)
    elif (
        is_dense
        and set(asked.strides) == {1}
        and results >= _LARGE_OUTPUT
        and not is_special
        and asked.is_aligned
        and prod(asked.kernel) >= 9
    ):
        _pad_channels(op, asked)
    elif not (is_dense and is_special):
        whole = asked.channels % _BLOCK == 0 and asked.weight.shape[0] % _BLOCK == 0
        if not (whole or results >= _LARGE_OUTPUT):
            _unfold(op, asked)


def _is_depthwise(asked: _Convolution) -> bool:
    return (
        asked.groups == asked.channels == asked.weight.shape[0]
        and set(asked.dilation) == {1}
        and max(asked.kernel) <= 7
        and max(asked.strides) <= 2
        and asked.channels % _BLOCK == 0
    )


def _is_winograd(asked: _Convolution) -> bool:
    channels, results = asked.channels, asked.weight.shape[0]
    return (
        not asked.is_flipped
        and {*asked.strides, *asked.dilation, *asked.input_dilation} == {1}
        and asked.kernel == (3, 3)
        and channels % 32 == results % 32 == 0
        and prod(asked.source.shape[:-1]) >= _LARGE_INPUT
        and channels + results >= _MANY_CHANNELS
    )


def _winograd(op: Operation, asked: _Convolution) -> None:
    """winograd_conv_2D_gpu, in one step: a device with little memory takes several."""
    batch, *lengths, channels = asked.source.shape
    results, size = asked.weight.shape[0], asked.source.itemsize
    tiles = batch * prod(ceil_div(length, _TILE) for length in asked.out.shape[1:-1])
    padded = (
        _TILE * ceil_div(length + 2 * pad - 2, _TILE) + 2
        for length, pad in zip(lengths, asked.padding, strict=True)
    )
    op.temporary(_PRODUCTS * channels * results, size)
    op.temporary(_PRODUCTS * tiles * channels, size)
    op.temporary(_PRODUCTS * tiles * results, size)
    op.temporary(batch * prod(padded) * channels, size)
    op.kernels += 5


def _along_three_axes(op: Operation, asked: _Convolution) -> None:
    source, weight, out = asked.source, asked.weight, asked.out
    is_dense = set(asked.input_dilation) == {1}
    if is_dense and not asked.has_blocks and asked.groups == 1:
        # pad_and_slice_conv_3D_gpu: the result is a slice of one with whole blocks.
        _pad_channels(op, asked)
        results = weight.shape[0]
        whole = ceil_div(results, _BLOCK) * _BLOCK
        op.allocate(out, out.size // results * whole * out.itemsize)
        if whole != results:
            steps, step = [1], whole
            for length in reversed(out.shape[1:-1]):
                steps.append(step)
                step *= length
            strides = (step, *reversed(steps))
            out.set_layout(
                strides, out.size // results * whole, row=False, column=False, dense=False
            )
        return
    _prepare(op)
    is_small = (
        is_dense
        and asked.has_blocks
        and asked.groups == 1
        and source.shape[0] == 1
        and asked.kernel[0] <= _DEEP_KERNEL
        and asked.strides[0] == asked.dilation[0] == 1
        and asked.padding[0] == 0
    )
    if is_small:
        # small_kd_conv_3D_gpu: a sum of plane convolutions, each in an array of its own.
        for _ in range(asked.kernel[0]):
            op.temporary(out.size, out.itemsize)
        op.kernels = 2 * asked.kernel[0]
    elif not (is_dense and asked.has_blocks):
        _unfold(op, asked)


def _pad_channels(op: Operation, asked: _Convolution) -> None:
    """Copies of input and weight with channels, and results along three axes, in whole blocks."""
    whole = ceil_div(asked.channels, _BLOCK) * _BLOCK
    source, weight = asked.source, asked.weight
    op.temporary(source.size // asked.channels * whole, source.itemsize)
    results = weight.shape[0]
    if len(source.shape) > 4:
        results = ceil_div(results, _BLOCK) * _BLOCK
    op.temporary(results * prod(asked.kernel) * whole, weight.itemsize)
    # Each is filled, then written.
    op.kernels += 4


def _unfold(op: Operation, asked: _Convolution) -> None:
    """explicit_gemm_conv_ND_gpu: the windows are written out, and multiplied."""
    results = prod(asked.out.shape[:-1])
    window = asked.weight.size // asked.weight.shape[0] * asked.groups
    op.temporary(results * window, asked.source.itemsize)
    op.kernels += 1
    if asked.groups > 1:
        # explicit_gemm_conv_group_ND_gpu transposes the weight.
        copied(op, asked.weight)


_BY_AXES: dict[int, Callable[[Operation, _Convolution], None]] = {
    1: _along_one_axis,
    2: _along_two_axes,
    3: _along_three_axes,
}
