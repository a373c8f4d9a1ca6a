"""A model's config.json, and the quantisation file next to it."""

from pathlib import Path, PurePath
from typing import Any

from memfit.estimators.base.errors import ConfigError
from memfit.estimators.base.files import printable, read_whole
from memfit.estimators.base.reading.strict_json import parse_object, plain
from memfit.estimators.checkpoint.checkpoint_files import CheckpointFiles, Directory

CONFIG = "config.json"
MODELOPT = "hf_quant_config.json"
MAX_CONFIG_BYTES = 6_000_000  # quantisation matrix by matrix makes configs of a megabyte
MAX_CONFIG_VALUES = 200_000


def read_config(path: Path) -> dict[str, Any]:
    """Return the object of a config.json; infinite numbers are tagged as transformers does.

    Raises:
        CheckpointError: when the file is missing, unreadable or above ``MAX_CONFIG_BYTES``.
        ConfigError: when it is not a JSON object, or holds what no config can.
    """
    return _parse(read_whole(path, limit=MAX_CONFIG_BYTES), path)


def read_model_config(path: Path) -> dict[str, Any]:
    """Return a model's config, as `model_config` does, from its path.

    Raises:
        CheckpointError: as `read_config`, for either file.
        ConfigError: as `read_config`, for either file.
    """
    return model_config(Directory(path.parent), path.name)


def model_config(files: CheckpointFiles, name: str = CONFIG) -> dict[str, Any]:
    """Return a model's config, with the quantisation that NVIDIA ModelOpt writes next to it.

    As in mlx-lm, hf_quant_config.json counts only where neither the config nor its text_config
    has a ``quantization_config`` (mlx_lm/utils.py, load_model).

    Raises:
        CheckpointError: as `read_config`, for either file.
        ConfigError: as `read_config`, for either file.
    """
    config = _parse(files.read(name, limit=MAX_CONFIG_BYTES), files.label / name)
    text_config = config.get("text_config")
    holders = [config, text_config] if isinstance(text_config, dict) else [config]
    if any("quantization_config" in holder for holder in holders) or not files.exists(MODELOPT):
        return config
    modelopt = _parse(files.read(MODELOPT, limit=MAX_CONFIG_BYTES), files.label / MODELOPT)
    return {**config, "quantization_config": modelopt}


def _parse(text: bytes, path: PurePath) -> dict[str, Any]:
    value = parse_object(
        text, path, what="the file", error=ConfigError, max_values=MAX_CONFIG_VALUES
    )
    config: dict[str, Any] = plain(value, printable(path), error=ConfigError)
    return config
