"""How weights are stored: element types and quantization."""

import re
from typing import Annotated, Literal

from msgspec import Struct

from memfit.estimators.base.errors import ConfigError, InputError
from memfit.estimators.base.units import Positive, one_of

# Names as the safetensors format spells them
# (https://docs.rs/safetensors/latest/safetensors/tensor/enum.Dtype.html).
BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

# Names as configs write them (`torch_dtype`, `dtype`).
_CONFIG_NAMES = {
    "float16": "F16",
    "half": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float": "F32",
}


def from_config_name(name: str, *, where: str) -> str:
    """Return the safetensors name of a config's dtype, such as ``"bfloat16"``.

    Raises:
        ConfigError: when the name is not a floating type that weights are kept in.

    >>> from_config_name("torch.bfloat16", where="config.json: torch_dtype")
    'BF16'
    """
    dtype = _CONFIG_NAMES.get(name.removeprefix("torch."))
    if dtype is None:
        known = ", ".join(sorted(_CONFIG_NAMES))
        raise ConfigError(f"{where}: unknown dtype {name!r}; write one of {known}")
    return dtype


def nbytes(elements: int, dtype: str) -> int:
    """Return the bytes of ``elements`` packed values of ``dtype``, rounded up to whole bytes.

    >>> nbytes(3, "BF16")
    6
    """
    return -(-elements * BITS[dtype] // 8)


AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)
# The only (bits, group size) of each floating mode: mlx ops.cpp, validate_mode_with_type.
FLOAT_MODES = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
FloatMode = Literal["mxfp4", "nvfp4", "mxfp8"]
MODES = ("affine", *FLOAT_MODES)
_BITS = r"([0-9]{1,3})(?:[ -]?bits?)?"
# Defaults of mlx_lm.convert for each mode: mlx-lm utils.py, defaults_for_mode.
DEFAULTS = {"affine": (4, 64), **FLOAT_MODES}


class Quantization(Struct, frozen=True):
    """Bits, group size and mode of one matrix.

    Raises:
        InputError: for a combination MLX does not have.
    """

    bits: Positive
    group_size: Positive
    mode: Annotated[str, one_of(*MODES)] = "affine"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InputError(f"quantisation mode {self.mode!r}: MLX has {', '.join(MODES)}")
        if self.mode == "affine":
            known = self.bits in AFFINE_BITS and self.group_size in AFFINE_GROUPS
        else:
            known = (self.bits, self.group_size) == FLOAT_MODES[self.mode]
        if not known:
            raise InputError(
                f"quantisation {self.mode} with {self.bits} bits in groups of {self.group_size}:"
                " MLX has no such format"
            )

    def tensors(self, elements: int, scale_bytes: int) -> tuple[int, ...]:
        """Return the bytes of packed weights, scales and (affine only) biases.

        ``elements`` is a multiple of the group size; affine scales and biases have the
        width ``scale_bytes`` of the matrix's own type, the other modes one byte and no biases.
        Source: mlx ops.cpp, quantize.

        >>> Quantization(4, 64).tensors(2048 * 512, 2)
        (524288, 32768, 32768)
        """
        packed = elements * self.bits // 8
        groups = elements // self.group_size
        if self.mode == "affine":
            return packed, groups * scale_bytes, groups * scale_bytes
        return packed, groups


def converted(bits: int, group_size: int | None = None, mode: str = "affine") -> Quantization:
    """Return what mlx_lm.convert makes of a model, with the group size of the mode by default.

    Raises:
        InputError: for a combination MLX does not have.
    """
    default = DEFAULTS[mode][1] if mode in DEFAULTS else 0
    return Quantization(bits, default if group_size is None else group_size, mode)


def parse_format(text: str) -> tuple[int, str]:
    """Return the bits and the mode of a text such as ``4``, ``4bit`` or ``mxfp4``.

    Raises:
        InputError: when it is neither bits nor a mode.

    >>> parse_format("4bit"), parse_format("mxfp4")
    ((4, 'affine'), (4, 'mxfp4'))
    """
    wanted = text.strip().lower()
    if wanted in FLOAT_MODES:
        return FLOAT_MODES[wanted][0], wanted
    if match := re.fullmatch(_BITS, wanted):
        return int(match[1]), "affine"
    raise InputError(
        f"{text[:40]!r} is not a weight format; write bits ({', '.join(map(str, AFFINE_BITS))}),"
        f" or {', '.join(FLOAT_MODES)}"
    )
