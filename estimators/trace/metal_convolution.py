"""What convolutions copy and allocate on Metal: implicit products, Winograd, windows written out.

Source: mlx/backend/metal/conv.cpp, dispatch_conv_2D_gpu and dispatch_conv_3D_gpu.
"""

from collections.abc import Callable
from math import prod
from typing import NamedTuple

from memfit.estimators.base.units import ceil_div
from memfit.estimators.trace.layouts import View, row_strides
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

    @property
    def is_dense(self) -> bool:
        """Whether the input has no gaps."""
        return set(self.input_dilation) == {1}

    @property
    def is_special(self) -> bool:
        """Whether kernels for few channels, or for whole blocks of them, take it."""
        few = self.channels // self.groups <= _FEW_CHANNELS
        return (few or self.has_blocks) and self.is_aligned


def convolution(op: Operation) -> None:
    """Any convolution."""
    source, weight = op.inputs[:2]
    strides, padding, _, dilation, input_dilation, groups, is_flipped = op.arguments
    conv = _Convolution(
        *(source, weight, op.outputs[0]),
        *(strides, padding, dilation, input_dilation),
        *(groups, is_flipped),
    )
    op.kernels = 1
    _BY_AXES[len(source.shape) - 2](op, conv)


def _prepare(op: Operation) -> None:
    op.allocate(op.outputs[0])
    for array in op.inputs[:2]:
        if not array.row:
            copied(op, array)


def _along_one_axis(op: Operation, conv: _Convolution) -> None:
    _prepare(op)
    is_separate = conv.groups == conv.channels == conv.weight.shape[0] and conv.strides == (1,)
    is_plain = is_separate and conv.dilation == (1,) and conv.padding == (0,)
    if not (conv.is_dense and (is_plain or conv.is_special)):
        _unfold(op, conv)


def _along_two_axes(op: Operation, conv: _Convolution) -> None:
    _prepare(op)
    if conv.groups > 1:
        if not (conv.is_dense and (_is_depthwise(conv) or conv.is_special)):
            _unfold(op, conv)
    elif _is_winograd(conv):
        _winograd(op, conv)
    elif _is_padded(conv):
        _pad_channels(op, conv)
    elif not (_is_implicit(conv) or (conv.is_dense and conv.is_special)):
        _unfold(op, conv)


def _is_padded(conv: _Convolution) -> bool:
    is_unit = conv.is_dense and set(conv.strides) == {1}
    has_work = prod(conv.out.shape[:-1]) >= _LARGE_OUTPUT and prod(conv.kernel) >= 9
    return is_unit and has_work and not conv.is_special and conv.is_aligned


def _is_implicit(conv: _Convolution) -> bool:
    whole = conv.channels % _BLOCK == 0 and conv.weight.shape[0] % _BLOCK == 0
    return whole or prod(conv.out.shape[:-1]) >= _LARGE_OUTPUT


def _is_depthwise(conv: _Convolution) -> bool:
    return (
        conv.groups == conv.channels == conv.weight.shape[0]
        and set(conv.dilation) == {1}
        and max(conv.kernel) <= 7
        and max(conv.strides) <= 2
        and conv.channels % _BLOCK == 0
    )


def _is_winograd(conv: _Convolution) -> bool:
    channels, results = conv.channels, conv.weight.shape[0]
    return (
        not conv.is_flipped
        and {*conv.strides, *conv.dilation, *conv.input_dilation} == {1}
        and conv.kernel == (3, 3)
        and channels % 32 == results % 32 == 0
        and prod(conv.source.shape[:-1]) >= _LARGE_INPUT
        and channels + results >= _MANY_CHANNELS
    )


def _winograd(op: Operation, conv: _Convolution) -> None:
    """winograd_conv_2D_gpu, in one step: a device with little memory takes several."""
    batch, *lengths, channels = conv.source.shape
    results, size = conv.weight.shape[0], conv.source.itemsize
    tiles = batch * prod(ceil_div(length, _TILE) for length in conv.out.shape[1:-1])
    padded = (
        _TILE * ceil_div(length + 2 * pad - 2, _TILE) + 2
        for length, pad in zip(lengths, conv.padding, strict=True)
    )
    op.temporary(_PRODUCTS * channels * results, size)
    op.temporary(_PRODUCTS * tiles * channels, size)
    op.temporary(_PRODUCTS * tiles * results, size)
    op.temporary(batch * prod(padded) * channels, size)
    op.kernels += 5


def _along_three_axes(op: Operation, conv: _Convolution) -> None:
    is_one_group = conv.is_dense and conv.groups == 1
    if is_one_group and not conv.has_blocks:
        _pad_and_slice(op, conv)
        return
    _prepare(op)
    depth, out = conv.kernel[0], conv.out
    is_one_volume = conv.source.shape[0] == 1 and depth <= _DEEP_KERNEL
    is_plain = conv.strides[0] == conv.dilation[0] == 1 and conv.padding[0] == 0
    if is_one_group and is_one_volume and is_plain:
        # small_kd_conv_3D_gpu: a sum of plane convolutions, each in an array of its own.
        for tap in range(_DEEP_KERNEL):
            if tap < depth:
                op.temporary(out.size, out.itemsize)
        op.kernels = 2 * depth
    elif not (conv.is_dense and conv.has_blocks):
        _unfold(op, conv)


def _pad_and_slice(op: Operation, conv: _Convolution) -> None:
    """pad_and_slice_conv_3D_gpu: the result is a slice of one with whole blocks."""
    _pad_channels(op, conv)
    out, results = conv.out, conv.weight.shape[0]
    whole = ceil_div(results, _BLOCK) * _BLOCK
    op.allocate(out, out.size // results * whole * out.itemsize)
    if whole != results:
        strides = row_strides((*out.shape[:-1], whole))
        out.set_layout(strides, out.size // results * whole, row=False, column=False, dense=False)


def _pad_channels(op: Operation, conv: _Convolution) -> None:
    """Copies of input and weight with channels, and results along three axes, in whole blocks."""
    whole = ceil_div(conv.channels, _BLOCK) * _BLOCK
    source, weight = conv.source, conv.weight
    op.temporary(source.size // conv.channels * whole, source.itemsize)
    results = weight.shape[0]
    if len(source.shape) > 4:
        results = ceil_div(results, _BLOCK) * _BLOCK
    op.temporary(results * prod(conv.kernel) * whole, weight.itemsize)
    # Each is filled, then written.
    op.kernels += 4


def _unfold(op: Operation, conv: _Convolution) -> None:
    """explicit_gemm_conv_ND_gpu: the windows are written out, and multiplied."""
    results = prod(conv.out.shape[:-1])
    window = conv.weight.size // conv.weight.shape[0] * conv.groups
    op.temporary(results * window, conv.source.itemsize)
    op.kernels += 1
    if conv.groups > 1:
        # explicit_gemm_conv_group_ND_gpu transposes the weight.
        copied(op, conv.weight)


_BY_AXES: dict[int, Callable[[Operation, _Convolution], None]] = {
    1: _along_one_axis,
    2: _along_two_axes,
    3: _along_three_axes,
}
