"""Keys of GGUF metadata: matched completely, checked, and read as in llama.cpp."""

import re
from typing import Any

import pytest

from memfit.estimators.arch.gguf.model import build_gguf_model
from memfit.estimators.arch.gguf.rules import NOT_DESCRIBED, RULES
from memfit.estimators.arch.model import Model
from memfit.estimators.arch.registry import build_model
from memfit.estimators.base.errors import ConfigError, UnsupportedError
from memfit.estimators.runtimes.llama_cpp.caches import Cells, buffers
from tests.gguf.test_allocations import EMBEDDING, built, generic
from tests.gguf.writing import recorded, tensor

HEADS: dict[str, Any] = {"attention__head_count": 4, "attention__head_count_kv": 2}
ROOM = Cells(4096, 512, 1, 256)


def windows(model: Model) -> list[int | None]:
    return [layer.mixers[0].window for layer in model.layers if layer.mixers]


def test_a_key_with_the_same_ending_is_another_key() -> None:
    metadata = {
        **generic("llama", **HEADS),
        "llama.attention.key_length_mla": 999,
        "other.attention.key_length": 888,
        "xllama.attention.key_length": 777,
        "llama.x.attention.key_length": 666,
    }
    assert next(buffers(built(metadata), ROOM, 1)).key_width == 2 * 16


def test_heads_may_differ_by_layer_and_a_layer_may_have_none() -> None:
    keys = {**HEADS, "attention__head_count": [4, 4, 8], "attention__head_count_kv": [4, 0, 1]}
    model = built(generic("deci", **{**keys, "block_count": 3, "attention__key_length": 16}))
    found = [b.key_width for b in buffers(model, ROOM, 1)]
    assert found == [64, 16]
    assert [len(layer.mixers) for layer in model.layers] == [1, 0, 1]


def test_missing_kv_heads_default_to_the_number_of_heads() -> None:
    model = built(generic("llama", attention__head_count=4))
    assert next(buffers(model, ROOM, 1)).key_width == 64


@pytest.mark.parametrize(
    ("architecture", "keys", "expected"),
    [
        ("gemma3", {"attention.sliding_window": 512}, [512] * 5 + [None] + [512] * 2),
        ("gemma3", {}, [None] * 8),
        ("gemma3", {"attention.sliding_window": 0}, [None] * 8),
        ("gemma2", {}, [4096, None] * 4),
        ("gpt-oss", {"attention.sliding_window": 128}, [128, None] * 4),
        ("cohere2moe", {"attention.sliding_window": 9}, [None, 9, 9, 9] * 2),
        ("llama4", {}, [8192, 8192, 8192, None] * 2),
        ("llama4", {"attention.sliding_window": 0}, [None] * 8),
        ("llama4", {"attention.sliding_window": 5}, [8192, 8192, 8192, None] * 2),
        ("smallthinker", {"attention.sliding_window": 7}, [None, 4096, 4096, 4096] * 2),
        ("phi3", {"attention.sliding_window": 2047}, [None] * 8),
        ("exaone4", {"attention.sliding_window": 4096}, [None] * 8),
        (
            "gemma3",
            {"attention.sliding_window": 512, "attention.sliding_window_pattern": 2},
            [512, None] * 4,
        ),
        (
            "mimo2",
            {
                "attention.sliding_window": 128,
                "attention.sliding_window_pattern": [True] * 3 + [False] * 5,
            },
            [128] * 3 + [None] * 5,
        ),
    ],
)
def test_windows_follow_the_architecture(
    architecture: str, keys: dict[str, Any], expected: list[int | None]
) -> None:
    metadata = generic(architecture, block_count=8, **HEADS)
    metadata.update({f"{architecture}.{key}": item for key, item in keys.items()})
    assert windows(built(metadata)) == expected


def test_only_exaone_with_64_layers_has_windows() -> None:
    found = windows(built(generic("exaone4", block_count=64, **HEADS)))
    assert found == [4096, 4096, 4096, None] * 16


def test_layers_that_share_a_cache_have_none_of_their_own() -> None:
    pattern = [True, False] * 3
    keys = {
        **HEADS,
        "block_count": 6,
        "attention__sliding_window": 512,
        "attention__sliding_window_pattern": pattern,
        "attention__shared_kv_layers": 2,
    }
    assert len(list(buffers(built(generic("gemma4", **keys)), ROOM, 1))) == 4


def test_glm_with_shared_indexers_must_list_them() -> None:
    latent = {
        "block_count": 2,
        "attention__head_count": 4,
        "attention__head_count_kv": 1,
        "attention__key_length": 576,
        "attention__value_length": 512,
        "attention__key_length_mla": 256,
        "attention__value_length_mla": 256,
        "attention__kv_lora_rank": 512,
        "attention__indexer__head_count": 32,
        "attention__indexer__key_length": 128,
        "attention__indexer__top_k": 2048,
    }
    listed = built(generic("glm-dsa", **latent, attention__indexer__types=[1, 0]))
    assert listed.layer_kinds() == {"sparse_attention": 1, "latent_attention": 1}
    assert [b.key_width for b in buffers(listed, ROOM, 1)] == [576, 128, 576]
    with pytest.raises(ConfigError, match=r"glm-dsa\.attention\.indexer\.types: missing"):
        built(generic("glm-dsa", **latent, context_length=2**20))


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"llama.block_count": 0}, "llama.block_count: expected 1 to 4096, got 0"),
        ({"llama.block_count": 10**6}, "llama.block_count: expected 1 to 4096"),
        ({"llama.block_count": None}, "llama.block_count: missing"),
        ({"llama.embedding_length": "x"}, "llama.embedding_length: expected an integer"),
        ({"llama.attention.head_count": [1, 2, 3]}, "expected 2 entries, one per layer, got 3"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count: expected at least 1"),
        ({"llama.nextn_predict_layers": 2}, "llama.nextn_predict_layers: expected 0 to 1"),
        ({"general.architecture": None}, "general.architecture: missing"),
        ({"general.architecture": 3}, "general.architecture: expected a string"),
    ],
)
def test_a_bad_key_is_reported(changed: dict[str, Any], fault: str) -> None:
    metadata = {**generic("llama", **HEADS), **changed}
    with pytest.raises(ConfigError) as caught:
        built(metadata)
    assert str(caught.value).startswith("model.gguf: ")
    assert fault in str(caught.value)


def test_mla_lengths_come_in_pairs() -> None:
    keys = {**HEADS, "attention__key_length_mla": 192}
    with pytest.raises(ConfigError, match=r"deepseek2\.attention\.value_length_mla: missing"):
        built(generic("deepseek2", **keys))


def test_an_unknown_architecture_is_rejected_without_a_guess_by_its_name() -> None:
    with pytest.raises(UnsupportedError, match=r"'qwen33' is not described$"):
        built(generic("qwen33", **HEADS))


def test_encoders_and_looped_models_are_rejected() -> None:
    for architecture in ("bert", "t5", "nanbeige", "deepseek4", "hrm_text", "graniteswitch"):
        assert architecture not in RULES


def test_the_vocabulary_size_comes_from_the_head_and_is_required() -> None:
    tensors = (*EMBEDDING, tensor("output.weight", (64, 120)))
    model = build_gguf_model(generic("llama", **HEADS), tensors, "model.gguf").model
    assert model.vocab_size == 120
    with pytest.raises(ConfigError, match="tells the vocabulary"):
        build_gguf_model(generic("llama", **HEADS), (), "model.gguf")


# src/llama-arch.cpp of build b11549, LLM_ARCH_NAMES.
ARCHITECTURES = """
    clip llama llama4 deci falcon grok gpt2 gptj gptneox mpt baichuan starcoder refact bert
    modern-bert nomic-bert nomic-bert-moe neo-bert jina-bert-v2 jina-bert-v3 eurobert bloom
    stablelm qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3next qwen3vl qwen3vlmoe qwen35
    qwen35moe clef qwen4exp phi2 phi3 phimoe plamo plamo2 plamo3 codeshell orion internlm2
    minicpm minicpm3 gemma gemma2 gemma3 gemma3n gemma4 gemma4-assistant gemma-embedding
    gemma-embedding2 starcoder2 mamba mamba2 maple jamba falcon-h1 xverse command-r cohere2
    cohere2moe dbrx olmo olmo2 olmoe muse-glimmer openelm arctic deepseek deepseek2
    deepseek2-ocr deepseek32 deepseek4 chatglm glm4 glm4moe glm-dsa bitnet t5 t5encoder jais
    jais2 nemotron nemotron_h nemotron_h_moe exaone exaone4 exaone-moe rwkv6 rwkv6qwen2
    rwkv7 arwkv7 granite granitemoe granitehybrid graniteswitch granite_swa chameleon
    wavtokenizer-dec plm bailingmoe bailingmoe2 bailingmoe3 dots1 dots3note arcee afmoe
    laguna ernie4_5 ernie4_5-moe hunyuan-moe hunyuan-dense hunyuan_vl hy_v3 hy_v4 smollm3
    gpt-oss lfm2 lfm2moe dream smallthinker llada llada-moe seed_oss grovemoe apertus
    minimax-01 hrm_text minimax-m2 minimax-m3 cogvlm rnd1 pangu-embedded mistral3 eagle3
    dflash mistral4 paddleocr mimo2 step35 spark2_5 llama-embed maincoder kimi-linear
    kimi-k3 glm5-next talkie mellum nanbeige qwen3tts pockettts k2-horizon
""".split()


def test_every_architecture_of_llama_cpp_is_described_or_refused_with_its_reason() -> None:
    assert len(ARCHITECTURES) == 156
    assert set(ARCHITECTURES) - RULES.keys() - NOT_DESCRIBED.keys() == set()
    assert NOT_DESCRIBED.keys() & RULES.keys() == set()
    assert NOT_DESCRIBED.keys() <= set(ARCHITECTURES)


@pytest.mark.parametrize("name", sorted(NOT_DESCRIBED))
def test_a_refused_architecture_says_why(name: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(NOT_DESCRIBED[name])):
        build_gguf_model({"general.architecture": name}, (), "model.gguf")


def test_an_encoder_of_a_generators_architecture_is_not_sized_as_a_generator() -> None:
    entry = recorded()["qwen3"]
    metadata = {**entry.metadata, "qwen3.attention.causal": False}
    with pytest.raises(UnsupportedError, match=r"qwen3\.attention\.causal: false: an encoder"):
        build_gguf_model(metadata, entry.tensors, "model.gguf")


def test_a_gguf_file_that_pools_is_an_embedding_model_or_a_reranker() -> None:
    entry = recorded()["qwen3"]
    pooled = {**entry.metadata, "qwen3.pooling_type": 3}
    with pytest.raises(UnsupportedError, match=r"qwen3\.pooling_type: an embedding model"):
        build_gguf_model(pooled, entry.tensors, "model.gguf")
    unpooled = {**entry.metadata, "qwen3.pooling_type": 0}
    assert build_gguf_model(unpooled, entry.tensors, "model.gguf").trunk


@pytest.mark.parametrize(("value", "is_encoder"), [(True, True), ("all", True), ("vision", False)])
def test_a_config_that_attends_in_both_directions_is_not_sized_as_a_generator(
    value: object, is_encoder: bool
) -> None:
    config = {"model_type": "gemma3_text", "hidden_size": 256, "num_hidden_layers": 6}
    config["use_bidirectional_attention"] = value
    if is_encoder:
        with pytest.raises(UnsupportedError, match="use_bidirectional_attention: an encoder"):
            build_model(config, "config.json")
    else:
        assert build_model(config, "config.json").layers
