"""Configs of well-known models, from their published figures, and checkpoints made of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memfit.estimators.checkpoint.local.sample import read_sample
from tests.sparse import Shapes, write_safetensors

# https://huggingface.co/Qwen/Qwen3-4B, config.json; the vocabulary of a fine-tune with sizes
# published by mlx-swift-lm (documentation of wired memory, "Observed deltas").
QWEN3_4B = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151669,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
QWEN3_4B_4BIT = {**QWEN3_4B, "quantization": {"group_size": 64, "bits": 4}}

# https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct, config.json.
QWEN3_NEXT_80B = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "intermediate_size": 5120,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 151936,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 512,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000000,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 262144,
    "full_attention_interval": 4,
    "torch_dtype": "bfloat16",
}

SAMPLES = Path(__file__).parents[1] / "sample_configs"

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "uint32": "U32", "uint8": "U8"}


def sample_config(name: str) -> dict[str, Any]:
    """Return the config of a sample, without its quantisation."""
    config = read_sample(SAMPLES / f"{name}.yaml").config
    return {key: value for key, value in config.items() if key != "quantization"}


def published_config(name: str) -> dict[str, Any]:
    """Return a config of the runs with published peaks."""
    path = Path(__file__).parent / "published" / "configs" / f"{name}.json"
    config: dict[str, Any] = json.loads(path.read_text())
    return config


def quantised_tensors(config: Mapping[str, Any], bits: int, group_size: int = 64) -> Shapes:
    """Return the tensors mlx-lm saves after converting a model of this config."""
    from tests.oracle import Oracle

    tensors = Oracle(config).quantize(bits, group_size).tensors()
    return {n: (_DTYPES[str(v.dtype).split(".")[-1]], v.shape) for n, v in tensors.items()}


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
