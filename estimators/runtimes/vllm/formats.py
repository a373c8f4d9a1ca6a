"""Formats of quantised checkpoints that vLLM reads, from a config alone.

Source: vLLM 0.33.0 (4ba787ec9), vllm/model_executor/layers/quantization.
"""

import re
from collections.abc import Callable, Iterable

from msgspec import Struct

from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Module, Part
from memfit.estimators.base import dtypes
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.weights.derived import tensor_bytes

Excludes = Callable[[str, Module], bool]
# An expression of an ignore list, without the repetitions that make one slow.
_EXPRESSION = re.compile(r"re:(?:[\w^$|()-]|\\\.|\.\*?)*")
_MOST_WILDCARDS = 4
_KEPT = frozenset((Part.EMBEDDING, Part.HEAD, Part.ROUTER, Part.VISION))


class Packing(Struct, frozen=True, kw_only=True):
    """How quantised matrices are stored, and which ones."""

    bits: int
    group: int = 0
    """Inputs that share a scale; 0 for all."""
    rows: int = 1
    """Rows that share a scale; 0 for all."""
    scale_bytes: int = 2
    zero_bits: int = 0
    """Bits of the zero point of each scale."""
    excludes: Excludes

    def nbytes(self, path: str, module: Module, dtype: str) -> int:
        """Return the bytes of a module's tensors."""
        if not module.quantizable or self.excludes(path, module):
            return sum(tensor_bytes(module, dtype, None))
        *matrices, rows, inputs = module.shape
        scales = -(-inputs // (self.group or inputs)) * -(-rows // (self.rows or rows))
        packed = -(-rows * inputs * self.bits // 8) + scales * self.scale_bytes
        packed += -(-scales * self.zero_bits // 8)
        return packed * (matrices[0] if matrices else 1) + dtypes.nbytes(module.bias, dtype)


def quantization_method(block: Fields) -> str:
    """Return the method of a quantisation block, empty where there is none.

    Raises:
        UnsupportedError: when vLLM does not have it.
    """
    method = block.text("quant_method", "")
    if method and method not in _READERS:
        raise _unsupported(block, "quant_method", f"vllm reads {', '.join(_READERS)}")
    return method


def packing_of(block: Fields) -> Packing:
    """Return how a config's block packs matrices.

    Raises:
        ConfigError: when the block is malformed.
        UnsupportedError: when vLLM rejects it, or only the files show what is packed.
    """
    return _READERS[quantization_method(block)](block)


def _unsupported(block: Fields, key: str, why: str) -> UnsupportedError:
    name, value = block.full_path(key), block.values.get(key)
    return UnsupportedError(f"{block.reading.name}: {name}: {str(value)[:40]!r}: {why}")


def _gptq(block: Fields) -> Packing:
    """auto_gptq.py: symmetric, in 4 or 8 bits; a group of -1 is a whole row."""
    if not block.flag("sym", True):
        raise _unsupported(block, "sym", "vllm reads symmetric GPTQ alone")
    bits = block.count("bits")
    if bits not in (4, 8):
        raise _unsupported(block, "bits", "vllm reads GPTQ of 4 or 8 bits")
    group = block.count("group_size", 128, least=-1)
    return Packing(bits=bits, group=max(group, 0), excludes=_outside_layers)


def _awq(block: Fields) -> Packing:
    """auto_awq.py: 4 bits, with zero points."""
    bits = block.count("bits", 4)
    if bits != 4:
        raise _unsupported(block, "bits", "vllm reads AWQ of 4 bits")
    return Packing(
        bits=bits,
        group=block.count("group_size", 128),
        zero_bits=bits,
        excludes=_outside_layers_or(block.texts("modules_to_not_convert") or ()),
    )


def _fp8(block: Fields) -> Packing:
    """fp8.py: a float32 scale for each block, or for each matrix."""
    rows, inputs = block.counts("weight_block_size", 2) or (0, 0)
    names = [*(block.texts("modules_to_not_convert") or ()), *(block.texts("ignored_layers") or ())]
    excludes = _outside_layers_or(names)
    return Packing(bits=8, group=inputs, rows=rows, scale_bytes=4, excludes=excludes)


def _mxfp4(block: Fields) -> Packing:
    """mxfp4.py: the experts, with a byte for 32 weights."""

    def excludes(path: str, module: Module) -> bool:
        return module.part is not Part.EXPERTS

    return Packing(bits=4, group=32, scale_bytes=1, excludes=excludes)


# Bytes of a scale by its type: of integers the model's, of floats by their format
# (compressed_tensors/schemes).
_FLOAT_SCALES = {(4, 16): 1, (4, 32): 1}


def _compressed(block: Fields) -> Packing:
    """compressed_tensors.py: one group of layers with one format."""
    groups = block.untracked("config_groups")
    if len(groups.values) != 1:
        raise _unsupported(block, "config_groups", "give the weight files: there are several")
    weights = groups.untracked(*groups.values).untracked("weights")
    bits, size = weights.count("num_bits"), weights.optional_count("group_size", least=-1)
    strategy = weights.text("strategy", "group" if size else "tensor")
    floating = weights.text("type", "int") == "float"
    rows, group = 1, max(size or 0, 0)
    if strategy == "block":
        rows, group = weights.counts("block_structure", 2) or (1, 0)
    elif strategy == "tensor":
        rows = 0
    return Packing(
        bits=bits,
        group=group,
        rows=rows,
        scale_bytes=_FLOAT_SCALES.get((bits, group), 4) if floating else 2,
        zero_bits=0 if weights.flag("symmetric", True) else bits,
        excludes=_ignored(block),
    )


def _modelopt(block: Fields) -> Packing:
    """modelopt.py: NVFP4 with a byte for 16 weights, or FP8 with one scale for a matrix."""
    settings = block.untracked("quantization") if block.has("quantization") else block
    algorithm = settings.text("quant_algo")
    excludes = _outside_layers_or(
        name.strip("*") for name in settings.texts("exclude_modules") or ()
    )
    if algorithm == "NVFP4":
        return Packing(bits=4, group=16, scale_bytes=1, excludes=excludes)
    if algorithm == "FP8":
        return Packing(bits=8, rows=0, scale_bytes=4, excludes=excludes)
    raise _unsupported(settings, "quant_algo", "give the weight files, which show its bytes")


_READERS: dict[str, Callable[[Fields], Packing]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
}


def _outside_layers(path: str, module: Module) -> bool:
    """What is left as it is without being named."""
    return module.part in _KEPT


def _outside_layers_or(names: Iterable[str]) -> Excludes:
    given = tuple(filter(None, names))

    def excludes(path: str, module: Module) -> bool:
        return _outside_layers(path, module) or any(name in path for name in given)

    return excludes


def _ignored(block: Fields) -> Excludes:
    """The linear layers that compressed-tensors names, by a path or an expression."""
    names = block.texts("ignore") or []
    plain = frozenset(name for name in names if not name.startswith("re:"))
    expressions = [_expression(block, name) for name in names if name.startswith("re:")]

    def excludes(path: str, module: Module) -> bool:
        # Where mlx-lm stacks experts, the Hub numbers them.
        name = path.replace(".switch_mlp.", ".experts.0.")
        if module.part in (Part.EMBEDDING, Part.VISION) or name in plain:
            return True
        return any(found.match(name) for found in expressions)

    return excludes


def _expression(block: Fields, name: str) -> re.Pattern[str]:
    if _EXPRESSION.fullmatch(name) and name.count("*") <= _MOST_WILDCARDS:
        try:
            return re.compile(name.removeprefix("re:"))
        except re.error:
            pass
    raise _unsupported(block, "ignore", f"give the weight files: {name[:40]!r} is not understood")
