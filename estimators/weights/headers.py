"""Bytes and parameters of a checkpoint's tensors, read from shard headers."""

from collections.abc import Callable, Iterable, Mapping
from math import prod

from msgspec import field

from memfit.estimators.arch.model import Module
from memfit.estimators.weights.derived import FLOATING, TensorGroup, WeightTotals, part_of
from memfit.estimators.weights.quantization_plan import Declared

COMPANIONS = (
    ".scales",
    ".biases",
    "_proj_scales",
    ".qzeros",
    ".g_idx",
    "_scale_inv",
    ".weight_scale",
    ".weight_scale_2",
    ".weight_shape",
    ".weight_zero_point",
    ".global_scale",
    "_global_scale",
    ".input_scale",
    "activation_scale",
    ".k_scale",
    ".v_scale",
    ".SCB",
    ".absmax",
    ".quant_map",
    "__nf4",
    "__fp4",
)
"""Tensors that hold no parameters: scales, zero points and shapes of packed formats, as MLX,
AutoAWQ, GPTQ, compressed-tensors, ModelOpt and bitsandbytes name them."""


class HeaderTotals(WeightTotals):
    """Totals of headers."""

    kept: list[TensorGroup] = field(default_factory=list)
    """The tensors that the model class does not drop."""


def read_headers(
    groups: Iterable[TensorGroup],
    modules: Mapping[str, Module],
    declared: Declared,
    is_dropped: Callable[[str], bool],
) -> HeaderTotals:
    """Return the totals of a checkpoint's tensors, by the modules of the model class.

    A tensor with a name that is not the class's belongs to the part that its name suggests,
    and is loaded unless the class drops it.
    """
    totals = HeaderTotals()
    for group in groups:
        name = group.name
        # A bare parameter has a module's path, any other a leaf after it.
        module = modules.get(name) or modules.get(name.rpartition(".")[0])
        if module:
            part, loaded = module.part, module.loaded
        else:
            part, loaded = part_of(name), not is_dropped(name)
        if loaded:
            totals.kept.append(group)
        totals.add(
            part,
            group.copies * group.nbytes,
            parameters=group.copies * _parameters(group, module, declared),
            loaded=loaded,
        )
    return totals


def _parameters(group: TensorGroup, module: Module | None, declared: Declared) -> int:
    """The number of parameters in a tensor: packed ones are unpacked, scales have none."""
    name, dtype, shape, *_ = group
    stored = prod(shape)
    # Plain weights, which are most tensors, need none of the rules below.
    if dtype in FLOATING and name.endswith(".weight"):
        return stored
    if name.endswith(COMPANIONS):
        return 0
    if dtype == "U32" and name.endswith(".weight") and shape:
        if module and shape[-1]:
            # Rows are the header's; only the packed dimension needs the class's width.
            return stored // shape[-1] * module.shape[-1]
        # Without the class's width only the declared bits say how many a word holds.
        return stored * 32 // declared.bits
    return stored * _values_per_element(name, dtype, declared)


def _values_per_element(name: str, dtype: str, declared: Declared) -> int:
    """How many parameters one element of another library's format packs."""
    # AutoAWQ, GPTQ and compressed-tensors pack into int32; NVFP4 into bytes.
    if name.endswith((".qweight", ".weight_packed")):
        return {"I32": 32, "U8": 8}.get(dtype, declared.bits) // declared.bits
    if dtype != "U8":
        return 1
    # MXFP4 as OpenAI publishes it: two values in a byte.
    if name.endswith("_blocks"):
        return 2
    if name.endswith(".weight"):
        # NVFP4 and bitsandbytes' four bits: two in a byte; BitNet's ternary weights: four.
        return {"modelopt": 2, "bitnet": 4, "bitsandbytes": 2}.get(declared.method or "", 1)
    return 1
