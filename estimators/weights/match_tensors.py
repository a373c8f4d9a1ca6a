"""A checkpoint's tensors compared with the model class, as mlx-lm's strict load does.

Source: mlx-lm utils.py, load_model; mlx nn/layers/base.py, load_weights.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import prod

from msgspec import Struct, field

from memfit.estimators.arch.model import Module, Part
from memfit.estimators.arch.registry import ClassRow
from memfit.estimators.base.dtypes import FLOAT_MODES, Quantization
from memfit.estimators.base.errors import InputError
from memfit.estimators.weights.derived import TensorGroup
from memfit.estimators.weights.quantization_plan import Declared

_LEAVES = frozenset({"weight", "bias", "scales", "biases", "global_scale", "weight_scale"})
# bitnet_quantize replaces Linear layers alone (mlx-lm models/bitlinear_layers.py).
_NOT_LINEAR = (Part.EMBEDDING, Part.EXPERTS)

TensorParts = dict[str, TensorGroup]


class Match(Struct):
    """How the tensors fit the class, and where not, why mlx-lm refuses to load them."""

    formats: dict[str, Quantization | None] = field(default_factory=dict)
    """The format of each matrix; None: not quantised."""
    unknown: list[str] = field(default_factory=list)
    """Tensors that the class has no place for."""
    missing: list[str] = field(default_factory=list)
    """Names in the class without a tensor."""
    wrong: list[str] = field(default_factory=list)
    """Tensors of another shape than the class's."""

    @property
    def loads(self) -> bool:
        """Whether every tensor has a place and every place a tensor."""
        return not (self.unknown or self.missing or self.wrong)


def match_tensors(
    tensors: Iterable[TensorGroup],
    modules: Mapping[str, Module],
    declared: Declared,
    rules: ClassRow,
) -> Match:
    """Return how loaded tensors, less those the class drops, fit the class's modules."""
    result = Match()
    found: dict[str, TensorParts] = defaultdict(dict)
    for tensor in tensors:
        base, _, leaf = tensor.name.rpartition(".")
        if tensor.name in modules:
            found[tensor.name]["weight"] = tensor
        # Names of the arrays that MLX's plain and quantised layers have.
        elif leaf in _LEAVES and base in modules:
            found[base][leaf] = tensor
        else:
            result.unknown.append(tensor.name)
    for path, module in modules.items():
        # What the class drops is not looked for either.
        if module.loaded:
            _check(path, module, found.get(path, {}), declared, result)
            weight = found.get(path, {}).get("weight")
            # Other classes transpose what they have in another order.
            if rules.keeps_shapes and not module.quantizable and weight:
                result.wrong += [weight.name] * (weight.shape != module.shape)
    return result


def _check(
    path: str, module: Module, parts: TensorParts, declared: Declared, result: Match
) -> None:
    weight, bias = parts.get("weight"), parts.get("bias")
    if weight is None:
        result.missing.append(path)
        return
    if bias is None and module.bias:
        result.missing.append(f"{path}.bias")
    # A bias where the class has none is an extra name, not a wrong shape.
    elif bias is not None and prod(bias.shape) != module.bias:
        (result.wrong if module.bias else result.unknown).append(bias.name)
    if declared.method == "bitnet" and weight.dtype == "U8":
        _check_ternary(module, weight, parts, result)
    elif "scales" in parts:
        _check_quantised(path, module, parts, declared, result)
    else:
        result.formats[path] = None
        result.unknown += [parts[leaf].name for leaf in parts if leaf not in ("weight", "bias")]
        if prod(weight.shape) != module.elements:
            result.wrong.append(weight.name)
        # The config names this matrix, so load_model packs it and looks for its scales.
        elif declared.method == "mlx" and declared.plan and declared.plan.overrides.get(path):
            result.missing.append(f"{path}.scales")


def _check_ternary(module: Module, weight: TensorGroup, parts: TensorParts, result: Match) -> None:
    """Four weights per byte along the outputs, one scale (mlx-lm models/bitlinear_layers.py)."""
    outputs = module.shape[0]
    if module.part in _NOT_LINEAR or weight.shape != (-(-outputs // 4), *module.shape[1:]):
        result.wrong.append(weight.name)
    elif "weight_scale" not in parts:
        result.missing.append(f"{weight.name}_scale")


def _check_quantised(
    path: str, module: Module, parts: TensorParts, declared: Declared, result: Match
) -> None:
    scales = parts["scales"]
    # load_model quantises a module where the weights have its scales, if it can be quantised.
    if declared.quantises is None or not module.quantizable:
        result.unknown.append(scales.name)
        return
    quantization = _inferred(module, parts["weight"], scales)
    overrides = declared.plan.overrides if declared.method == "mlx" and declared.plan else {}
    if quantization is None or overrides.get(path, quantization) != quantization:
        result.wrong.append(parts["weight"].name)
        return
    result.formats[path] = quantization
    has_biases, affine = "biases" in parts, quantization.mode == "affine"
    if has_biases and not affine:
        result.unknown.append(parts["biases"].name)
    elif affine and not has_biases:
        result.missing.append(f"{path}.biases")
    elif has_biases and parts["biases"].shape != scales.shape:
        result.wrong.append(parts["biases"].name)


def _inferred(module: Module, weight: TensorGroup, scales: TensorGroup) -> Quantization | None:
    """The format by the shapes of weight and scales: mlx-lm utils.py, infer_quant_config."""
    *rows, inputs = module.shape
    if not weight.shape or not scales.shape or not scales.shape[-1]:
        return None
    columns, groups = weight.shape[-1], scales.shape[-1]
    # Only the last axis is packed.
    if weight.shape[:-1] != tuple(rows) or scales.shape[:-1] != tuple(rows):
        return None
    if 32 * columns % inputs or inputs % groups:
        return None
    bits, group_size = 32 * columns // inputs, inputs // groups
    modes = {value: mode for mode, value in FLOAT_MODES.items()}
    # Only the floating-point modes have scales of one byte (utils.py, infer_quant_config).
    mode = modes.get((bits, group_size), "affine") if scales.dtype == "U8" else "affine"
    try:
        return Quantization(bits, group_size, mode)
    except InputError:
        return None
