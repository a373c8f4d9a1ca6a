"""What each primitive of MLX does to memory: shares a buffer, writes over it, copies, allocates.

The tables say which primitive follows which rule. Read at mlx 0.32.
"""

from collections.abc import Mapping

from memfit.estimators.machine.device import Backend
from memfit.estimators.trace import (
    cpu_rules,
    cuda_rules,
    metal_convolution,
    metal_rules,
    shared_rules,
)
from memfit.estimators.trace.operation import Rule, fresh


def _names(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


_SHARED: Mapping[str, Rule] = {
    **_names(shared_rules.look, "Copy StopGradient Depends"),
    # Its inputs end with the outputs that the function computed.
    **_names(shared_rules.look_last, "CustomTransforms"),
    **_names(shared_rules.broadcast, "Broadcast BroadcastAxes"),
    **_names(shared_rules.transpose, "Transpose"),
    **_names(shared_rules.cut, "Slice"),
    **_names(shared_rules.split, "Split"),
    **_names(shared_rules.expand, "ExpandDims"),
    **_names(shared_rules.squeeze, "Squeeze"),
    **_names(shared_rules.as_strided, "AsStrided"),
    **_names(shared_rules.reshape, "Reshape Flatten Unflatten"),
    **_names(shared_rules.reinterpret, "View"),
    **_names(shared_rules.contiguous, "Contiguous"),
    **_names(
        shared_rules.unary,
        "Abs ArcCos ArcCosh ArcSin ArcSinh ArcTan ArcTanh AsType BitwiseInvert Ceil Conjugate Cos"
        " Cosh Erf ErfInv Exp Expm1 Floor Imag Log Log1p LogicalNot Negative Real Round Sigmoid"
        " Sign Sin Sinh Sqrt Square Tan Tanh",
    ),
    **_names(
        shared_rules.binary,
        "Add ArcTan2 BitwiseBinary Divide DivMod Equal FloorDivide Greater GreaterEqual Less"
        " LessEqual LogAddExp LogicalAnd LogicalOr Maximum Minimum Multiply NotEqual Power"
        " Remainder Subtract",
    ),
    **_names(shared_rules.select, "Select"),
    **_names(shared_rules.compiled, "Compiled"),
    **_names(shared_rules.full, "Full"),
    **_names(shared_rules.softmax, "Softmax"),
    **_names(shared_rules.concatenate, "Concatenate"),
    **_names(shared_rules.pad, "Pad"),
    **_names(shared_rules.slice_update, "SliceUpdate"),
    **_names(shared_rules.scatter, "Scatter ScatterAxis MaskedScatter"),
    **_names(shared_rules.dynamic_slice, "DynamicSlice"),
    **_names(shared_rules.dynamic_slice_update, "DynamicSliceUpdate"),
    **_names(shared_rules.nothing, "Load NumberOfElements"),
    **_names(cpu_rules.log_sum_exp, "LogSumExp"),
    **_names(cpu_rules.quantize, "Quantize"),
    # The CPU runs them for any device (mlx distributed/ring/ring.cpp, communication_stream).
    **_names(cpu_rules.all_reduce, "AllReduce"),
    **_names(cpu_rules.all_gather, "AllGather"),
    **_names(cpu_rules.send, "Send"),
    **_names(cpu_rules.receive, "Recv"),
    **_names(fresh, "Arange ArgReduce Gather GatherAxis RandomBits Reduce SearchSorted"),
}

_CPU: Mapping[str, Rule] = {
    **_SHARED,
    # The CPU sorts indices in the output itself; Metal merges blocks in buffers of its own.
    **_names(fresh, "ArgPartition ArgSort"),
    **_names(cpu_rules.sort, "Sort Partition"),
    **_names(cpu_rules.scan, "Scan"),
    **_names(cpu_rules.matmul, "Matmul GatherMM SegmentedMM"),
    **_names(cpu_rules.add_matmul, "AddMM"),
    **_names(cpu_rules.quantized_matmul, "QuantizedMatmul"),
    **_names(cpu_rules.gather_quantized_matmul, "GatherQMM"),
    **_names(cpu_rules.convolution, "Convolution"),
}

_METAL: Mapping[str, Rule] = {
    **_SHARED,
    **_names(metal_rules.sort, "ArgPartition ArgSort Partition Sort"),
    **_names(metal_rules.scan, "Scan"),
    **_names(metal_rules.matmul, "Matmul AddMM"),
    **_names(fresh, "GatherMM SegmentedMM"),
    **_names(metal_rules.quantized_matmul, "QuantizedMatmul"),
    **_names(metal_rules.gather_quantized_matmul, "GatherQMM"),
    **_names(metal_convolution.convolution, "Convolution"),
    **_names(metal_rules.normalisation, "RMSNorm LayerNorm"),
    **_names(metal_rules.norm_gradient, "RMSNormVJP LayerNormVJP"),
    **_names(metal_rules.rope, "RoPE"),
    **_names(metal_rules.attention, "ScaledDotProductAttention"),
}

_CUDA: Mapping[str, Rule] = {
    **_METAL,
    **_names(cuda_rules.sort, "ArgPartition ArgSort Partition Sort"),
    **_names(cpu_rules.matmul, "Matmul AddMM"),
    **_names(cuda_rules.gather_matmul, "GatherMM"),
    **_names(cuda_rules.rope, "RoPE"),
    **_names(cuda_rules.attention, "ScaledDotProductAttention"),
}

_RULES: Mapping[str, Mapping[str, Rule]] = {"cpu": _CPU, "metal": _METAL, "cuda": _CUDA}


def rule_of(backend: Backend, name: str) -> Rule:
    """Return the rule of a primitive; any other name is a custom kernel."""
    other = fresh if backend == "cpu" else metal_rules.kernel
    return _RULES[backend].get(name, other)
