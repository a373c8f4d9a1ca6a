"""What mlx_lm.convert makes of a checkpoint: floating parameters are cast, then matrices packed."""

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from msgspec.structs import replace

from memfit.estimators.arch.model import Model, Module, Part
from memfit.estimators.base import dtypes
from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.results.estimate import Note
from memfit.estimators.weights.derived import (
    FLOATING,
    QuantizationPlan,
    TensorGroup,
    WeightTotals,
    derive,
)
from memfit.estimators.weights.footprint import WeightFootprint, footprint_of
from memfit.estimators.weights.quantization_plan import Declared

# mlx-lm convert.py, MODEL_CONVERSION_DTYPES; with another name nothing is cast.
_CONVERSION_TYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
# MLX packs into words of 32 bits, and the floating modes have scales of one byte (mlx ops.cpp).
_WORD_BITS = 32


def conversion_type(config: Mapping[str, Any]) -> str | None:
    """Return the type that floating parameters are cast to, None where they keep that of the files.

    Only these two keys count, whatever the type of the files is (mlx-lm 0.32.2 convert.py, convert;
    mlx-vlm 0.7.10 convert.py has the same lines).

    >>> conversion_type({"torch_dtype": "float16", "dtype": "bfloat16"})
    'F16'
    """
    name, text = config.get("torch_dtype"), config.get("text_config")
    if name is None and isinstance(text, Mapping):
        name = text.get("dtype")
    return _CONVERSION_TYPES.get(name) if isinstance(name, str) else None


def convert(
    config: Mapping[str, Any],
    model: Model,
    plan: QuantizationPlan,
    source: Declared,
    stored: tuple[TensorGroup, ...],
) -> tuple[Model, WeightFootprint]:
    """Return the model and its weights after conversion by mlx_lm.convert with a plan.

    ``source`` is the format of what is converted, and ``stored`` are its tensors as mlx-lm loads
    them; none where there are no headers, or not all of their names are known. mlx-lm leaves
    quantised matrices as they are, so that the figure is of a conversion of the original weights.
    """
    to = conversion_type(config)
    model = replace(model, dtype=to or model.dtype)
    if source.is_plain and stored:
        return model, _of_tensors(stored, model, plan, to)
    result = footprint_of(derive(model, plan), "derived", plan)
    if source.is_plain:
        return model, result
    message = (
        f"the checkpoint is quantised already ({source.method}); the figure is of a conversion of"
        " the original weights"
    )
    note = Note("warning", "already-quantised", message)
    return model, replace(result, notes=(note,), of_original=True)


def _of_tensors(
    stored: tuple[TensorGroup, ...], model: Model, plan: QuantizationPlan, to: str | None
) -> WeightFootprint:
    totals = WeightTotals()
    written: list[TensorGroup] = []
    for each in converted_parameters(stored, model, plan, to):
        parameters = prod(each.source.shape)
        for part in each.written:
            totals.add(each.module.part, part.nbytes, parameters=parameters, count=part.copies)
            # Counted with the weight: scales and biases of its groups are no parameters.
            parameters = 0
        written += each.written
    result = footprint_of(totals, "derived", plan)
    return replace(result, loaded=tuple(written), converted_from=stored)


class ConvertedParameter(NamedTuple):
    """A parameter as it is loaded, as it is cast, and the arrays that are written of it."""

    module: Module
    source: TensorGroup
    cast: TensorGroup
    written: tuple[TensorGroup, ...]
    """The parameter as it is cast, or the words, scales and biases of a packed matrix."""


def converted_parameters(
    stored: Iterable[TensorGroup], model: Model, plan: QuantizationPlan, to: str | None
) -> Iterator[ConvertedParameter]:
    """Yield what mlx_lm.convert makes of each stored tensor; ``to`` is the type it casts to."""
    modules = dict(model.all_modules())
    for group in stored:
        parent, _, leaf = group.name.rpartition(".")
        # A bare parameter has a module's path, any other a leaf after it.
        path = group.name if group.name in modules else parent
        module = modules[path]
        # A class's cast_predicate leaves out what stays float32: that keeps the type of the files.
        cast = group if module.float32 else cast_to(group, to)
        packing = plan.quantization(path, module) if leaf != "bias" else None
        parts = tuple(_packed(cast, path, packing)) if packing else (cast,)
        yield ConvertedParameter(module, group, cast, parts)


def class_order(model: Model) -> list[tuple[str, Module]]:
    """Return what the class loads, by path: mlx-lm's classes begin with the embedding."""
    outside = [(module.path, module) for module in model.modules]
    first = [pair for pair in outside if pair[1].part is Part.EMBEDDING]
    last = [pair for pair in outside if pair[1].part is not Part.EMBEDDING]
    layers = list(model.all_modules())[len(outside) :]
    return [pair for pair in (*first, *layers, *last) if pair[1].loaded]


def described_tensors(model: Model) -> Iterator[TensorGroup]:
    """Yield the parameters of a model as its class describes them, in `class_order`."""
    for path, module in class_order(model):
        dtype = "F32" if module.float32 else model.dtype
        yield TensorGroup(path, dtype, module.shape, dtypes.nbytes(module.elements, dtype))
        if module.bias:
            nbytes = dtypes.nbytes(module.bias, dtype)
            yield TensorGroup(f"{path}.bias", dtype, (module.bias,), nbytes)


def cast_to(group: TensorGroup, dtype: str | None) -> TensorGroup:
    """Return a tensor as a conversion casts it: what holds no floating numbers stays as it is."""
    return group.as_type(dtype) if dtype and group.dtype in FLOATING else group


def _packed(group: TensorGroup, path: str, packing: Quantization) -> Iterator[TensorGroup]:
    """Yield the arrays that mx.quantize makes of a matrix; affine scales have its type."""
    *rows, inputs = group.shape
    width = dtypes.nbytes(1, group.dtype)
    words, *scales = packing.tensors(prod(group.shape), width)
    columns = inputs * packing.bits // _WORD_BITS
    yield TensorGroup(f"{path}.weight", "U32", (*rows, columns), words)
    scale_type = group.dtype if packing.mode == "affine" else "U8"
    for leaf, nbytes in zip(("scales", "biases"), scales, strict=False):
        shape = (*rows, inputs // packing.group_size)
        yield TensorGroup(f"{path}.{leaf}", scale_type, shape, nbytes)
