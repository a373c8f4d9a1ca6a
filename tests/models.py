"""Configs of well-known models, from their published figures, and checkpoints made of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memfit.estimators.arch.registry import build_model
from memfit.estimators.checkpoint.local.samples import read_sample
from tests.sparse import Shapes, write_safetensors


def published_config(name: str) -> dict[str, Any]:
    """Return a config of the runs with published peaks."""
    path = Path(__file__).parent / "published" / "configs" / f"{name}.json"
    config: dict[str, Any] = json.loads(path.read_text())
    return config


# The vocabulary of a fine-tune with sizes published by mlx-swift-lm (documentation of wired memory,
# "Observed deltas").
QWEN3_4B = {**published_config("qwen3-4b"), "vocab_size": 151669}
QWEN3_4B_4BIT = {**QWEN3_4B, "quantization": {"group_size": 64, "bits": 4}}
QWEN3_NEXT_80B = published_config("qwen3-next")
SAMPLES = Path(__file__).parents[1] / "sample_configs"

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "uint32": "U32", "uint8": "U8"}


def sample_config(name: str) -> dict[str, Any]:
    """Return the config of a sample, without its quantisation."""
    config = read_sample(SAMPLES / f"{name}.yaml").config
    return {key: value for key, value in config.items() if key != "quantization"}


def quantised_tensors(config: Mapping[str, Any], bits: int, group_size: int = 64) -> Shapes:
    """Return the tensors mlx-lm saves after converting a model of this config."""
    from tests.oracle import Oracle

    tensors = Oracle(config).quantize(bits, group_size).tensors()
    return {n: (_DTYPES[str(v.dtype).split(".")[-1]], v.shape) for n, v in tensors.items()}


def plain_tensors(config: Mapping[str, Any]) -> Shapes:
    """Return the tensors of an unquantised model, by the modules that memfit describes."""
    modules = build_model(config, "config.json").all_modules()
    return {f"{path}.weight": ("BF16", module.shape) for path, module in modules}


def write_config(directory: Path, config: Mapping[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_checkpoint(
    directory: Path, config: Mapping[str, Any], tensors: Shapes, shards: int = 1
) -> Path:
    """Write a checkpoint of real length that takes no disk space: config, shards and index."""
    write_config(directory, config)
    names = list(tensors)
    size = -(-len(names) // shards)
    weight_map = {}
    for index in range(shards):
        part = names[index * size : (index + 1) * size]
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        file = file if shards > 1 else "model.safetensors"
        write_safetensors(directory / file, {n: tensors[n] for n in part}, {"format": "mlx"})
        weight_map.update(dict.fromkeys(part, file))
    index_text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(index_text)
    return directory
