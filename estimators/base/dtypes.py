"""Element types of tensors: their names in files and configs, and their widths in bits."""

from memfit.estimators.base.errors import ConfigError

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
