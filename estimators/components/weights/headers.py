"""Bytes of the parameters, read from shard headers."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.modules import Module, Part
from memfit.estimators.checkpoint.manifest import Tensor
from memfit.estimators.components.weights.parts import part_of
from memfit.estimators.components.weights.derived import Plan, WeightTotals

# Tensors that carry no parameter: scales, zero points and shapes of packed formats.
_COMPANIONS = (
    ".scales",
    ".biases",
    "_scales",
    ".qzeros",
    ".g_idx",
    "_scale_inv",
    ".weight_scale",
    ".input_scale",
    ".weight_scale_2",
    ".weight_global_scale",
    ".input_global_scale",
    ".weight_shape",
    ".weight_zero_point",
    ".k_scale",
    ".v_scale",
    ".global_scale",
)
# How many logical values one element of a packed tensor holds, by the end of its name.
_PACKED = {".qweight": {"I32": 8}, ".weight_packed": {"I32": 8, "U8": 2}, "_blocks": {"U8": 2}}


@dataclass(slots=True)
class HeaderTotals(WeightTotals):
    """Totals of headers; ``mismatch`` names the first tensor whose size the config denies."""

    loaded_parameters: int = 0
    mismatch: str | None = None


def read(tensors: Iterable[Tensor], model: Model, plan: Plan | None) -> HeaderTotals:
    """Return the totals of a checkpoint's tensors.

    Tensors are loaded when the model class has a module for them; names in another layout are
    loaded unless they are known to be dropped (vision, multi-token prediction, rotary tables).
    """
    modules = dict(model.all_modules())
    totals = HeaderTotals()
    for tensor in tensors:
        module = _module_of(tensor.name, modules)
        part = module.part if module else part_of(tensor.name)
        loaded = module.loaded if module else not _is_dropped(tensor.name, part, model)
        parameters = _logical(tensor, module, plan)
        totals.add(part, tensor.nbytes, parameters=parameters, loaded=loaded)
        totals.loaded_parameters += parameters if loaded else 0
        if module and totals.mismatch is None and parameters not in _sizes_of(tensor, module):
            totals.mismatch = tensor.name
    return totals


def _sizes_of(tensor: Tensor, module: Module) -> tuple[int, ...]:
    """The parameter counts a tensor of this module may stand for; scales stand for none."""
    if tensor.name.endswith(".bias"):
        return (module.bias,)
    return (module.elements,) if tensor.name.endswith(".weight") else (0, module.elements)


def in_mlx_layout(tensors: Iterable[Tensor], model: Model) -> bool:
    """Whether every tensor the model class needs is there under the class's own name."""
    names = {tensor.name for tensor in tensors}
    return all(
        f"{path}.weight" in names or path in names
        for path, module in model.all_modules()
        if module.loaded
    )


def _module_of(name: str, modules: dict[str, Module]) -> Module | None:
    """The module of a tensor named as the model class names it."""
    module = modules.get(name)
    return module if module else modules.get(name.rpartition(".")[0])


def _is_dropped(name: str, part: Part, model: Model) -> bool:
    """Whether the model class's ``sanitize`` drops the tensor, by what all of them drop."""
    if part is Part.VISION or ".inv_freq" in name or "mtp" in name.split("."):
        return True
    if part is Part.HEAD and model.tied_head:
        return True
    return any(index >= len(model.layers) for index in _layer_indices(name))


def _layer_indices(name: str) -> Iterator[int]:
    """The index after ``layers``; multi-token prediction layers follow the model's last."""
    words = name.split(".")
    for word, following in zip(words, words[1:], strict=False):
        if word == "layers" and following.isdecimal() and len(following) < 9:
            yield int(following)


def _logical(tensor: Tensor, module: Module | None, plan: Plan | None) -> int:
    """The number of parameters a tensor stands for: packed ones unpacked, scales none."""
    name = tensor.name
    if name.endswith(_COMPANIONS):
        return 0
    stored = prod(tensor.shape)
    for suffix, factors in _PACKED.items():
        if name.endswith(suffix):
            return stored * factors.get(tensor.dtype, 1)
    if tensor.dtype == "U32" and name.endswith(".weight") and tensor.shape:
        if module:
            # Rows are the header's; only the packed dimension needs the class's width.
            return stored // tensor.shape[-1] * module.shape[-1] if tensor.shape[-1] else 0
        return stored * 32 // plan.default.bits if plan else stored
    return stored
