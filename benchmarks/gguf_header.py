"""The header of a GGUF file that a published run could have had: for tools that read such files.

Metadata is what llama.cpp's converter writes (llama.cpp, conversion/), and the weights have the
bytes of the checkpoint: tensors that tools look up by name have their shapes, one more tensor in
each layer has the rest of its bytes. There are no weights in the file.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES

# By model_type, what llama.cpp calls the class.
ARCHITECTURES = {
    **{
        name: name for name in ("gemma3", "gemma4", "llama", "nemotron_h", "phi3", "qwen2", "qwen3")
    },
    "glm4_moe_lite": "deepseek2",
    "gpt_oss": "gpt-oss",
    "granitemoehybrid": "granitehybrid",
    "mistral": "llama",
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
}
# Types with as many bytes per weight as mlx-lm's with groups of 64; Q6_K has 1 % more.
_PACKED = {4: "Q4_0", 5: "Q5_0", 6: "Q6_K", 8: "Q8_0"}


def write_header(
    path: Path, config: Mapping[str, Any], *, weights_bytes: int, bits: int | None, is_moe: bool
) -> None:
    text = {**config, **config.get("text_config", {})}
    writer = GGUFWriter(path, ARCHITECTURES[config["model_type"]])
    _add_metadata(writer, text)
    left = weights_bytes
    for name, shape, kind in _tensors(text, bits, is_moe):
        nbytes = prod(shape) * GGML_QUANT_SIZES[kind][1] // GGML_QUANT_SIZES[kind][0]
        writer.add_tensor_info(name, shape, np.dtype(np.int8), nbytes, kind)
        left -= nbytes
    layers = text["num_hidden_layers"]
    for layer in range(layers):
        share = left * (layer + 1) // layers - left * layer // layers
        writer.add_tensor_info(f"blk.{layer}.rest.weight", (share,), np.dtype(np.int8), share)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def _add_metadata(writer: GGUFWriter, text: Mapping[str, Any]) -> None:
    heads, width = text["num_attention_heads"], _width(text)
    writer.add_context_length(text.get("max_position_embeddings", 131072))
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_vocab_size(text["vocab_size"])
    writer.add_head_count(heads)
    if "kv_lora_rank" in text:
        rope = text["qk_rope_head_dim"]
        writer.add_head_count_kv(1)
        writer.add_key_length(text["kv_lora_rank"] + rope)
        writer.add_value_length(text["kv_lora_rank"])
        writer.add_key_length_mla(text["qk_nope_head_dim"] + rope)
        writer.add_value_length_mla(text["v_head_dim"])
    else:
        writer.add_head_count_kv(text.get("num_key_value_heads") or heads)
        writer.add_key_length(text.get("global_head_dim") or width)
        writer.add_value_length(text.get("global_head_dim") or width)
    if text.get("sliding_window"):
        writer.add_sliding_window(text["sliding_window"])
    if experts := text.get("num_experts") or text.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(text.get("num_experts_per_tok") or text["top_k_experts"])
    if "mamba_d_head" in text:
        writer.add_ssm_conv_kernel(text["mamba_d_conv"])
        writer.add_ssm_inner_size(text["mamba_n_heads"] * text["mamba_d_head"])
        writer.add_ssm_state_size(text["mamba_d_state"])
        writer.add_ssm_group_count(text["mamba_n_groups"])


def _tensors(
    text: Mapping[str, Any], bits: int | None, is_moe: bool
) -> list[tuple[str, tuple[int, ...], GGMLQuantizationType]]:
    hidden, vocabulary = text["hidden_size"], text["vocab_size"]
    packed = GGMLQuantizationType[_PACKED.get(bits or 16, "BF16")]
    last = f"blk.{text['num_hidden_layers'] - 1}"
    found: list[tuple[str, tuple[int, ...], GGMLQuantizationType]] = [
        (f"{name}.weight", (hidden,), GGMLQuantizationType.F32)
        for name in ("output_norm", f"{last}.attn_norm", f"{last}.ffn_norm")
    ]
    matrices = {
        "token_embd": vocabulary,
        f"{last}.attn_q": text["num_attention_heads"] * _width(text),
    }
    if not text.get("tie_word_embeddings"):
        matrices["output"] = vocabulary
    if not is_moe:
        matrices |= dict.fromkeys((f"{last}.ffn_gate", f"{last}.ffn_up"), text["intermediate_size"])
    return [
        *found,
        *((f"{name}.weight", (rows, hidden), packed) for name, rows in matrices.items()),
    ]


def _width(text: Mapping[str, Any]) -> int:
    width: int = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    return width
