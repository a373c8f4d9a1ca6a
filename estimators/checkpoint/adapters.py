"""Adapters: the low-rank weights that a fine-tuning adds to a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from memfit.estimators.base.errors import CheckpointError
from memfit.estimators.base.files import list_names, printable
from memfit.estimators.checkpoint.config import read_config
from memfit.estimators.checkpoint.manifest import Tensor
from memfit.estimators.checkpoint.safetensors import read_header

CONFIG = "adapter_config.json"
MLX_WEIGHTS = "adapters.safetensors"  # the one file that mlx_lm/tuner/utils.py loads
PEFT_WEIGHTS = "adapter_model.safetensors"


class Adapter(Struct, frozen=True):
    """An adapter's config and tensors; its sizes are bytes."""

    id: str
    config: Mapping[str, Any]
    weight_file: str
    tensors: tuple[Tensor, ...]
    file_bytes: int
    header_bytes: int
    warnings: tuple[str, ...] = ()


def read_adapter(directory: Path) -> Adapter:
    """Return the adapter of a directory, in MLX's layout or else in PEFT's.

    Raises:
        CheckpointError: when its config or weights are missing, unreadable or inconsistent.
        ConfigError: when adapter_config.json is not a config.
    """
    names = list_names(directory)
    weight_file = next((name for name in (MLX_WEIGHTS, PEFT_WEIGHTS) if name in names), None)
    if weight_file is None:
        raise CheckpointError(f"{printable(directory)}: no {MLX_WEIGHTS}, so it is not an adapter")
    if CONFIG not in names:
        raise CheckpointError(f"{printable(directory)}: no {CONFIG} next to {weight_file}")
    header = read_header(directory / weight_file)
    peft = (
        f"{printable(directory)}: {PEFT_WEIGHTS} is PEFT's layout; mlx-lm loads {MLX_WEIGHTS} only"
    )
    return Adapter(
        id=printable(directory),
        config=read_config(directory / CONFIG),
        weight_file=weight_file,
        tensors=header.tensors,
        file_bytes=header.file_bytes,
        header_bytes=header.header_bytes,
        warnings=(peft,) if weight_file == PEFT_WEIGHTS else (),
    )
