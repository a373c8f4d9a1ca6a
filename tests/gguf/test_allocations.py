"""Caches, states and compute buffers, compared with llama.cpp's own log."""

from math import prod
from typing import Any

import pytest
from msgspec.structs import replace

from memfit.estimators.arch.gguf.model import build_gguf_model
from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.arch.specs import Attention, DenseMLP
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.gguf.ggml_types import BY_NAME
from memfit.estimators.runtimes.llama_cpp import compute
from memfit.estimators.runtimes.llama_cpp.builder import Context
from memfit.estimators.runtimes.llama_cpp.caches import (
    CACHE_TYPES,
    Buffer,
    CacheTypes,
    Cells,
    buffers,
    caches,
    recurrent_bytes,
    state_elements,
)
from memfit.estimators.runtimes.llama_cpp.compute import compute_buffers
from memfit.estimators.runtimes.llama_cpp.ggml import Place
from memfit.estimators.runtimes.llama_cpp.overrides import parse_overrides
from memfit.estimators.runtimes.llama_cpp.placement import Placement, Weights, file_weights
from memfit.estimators.runtimes.llama_cpp.settings import LLAMA_CPP, LlamaCppRuntime, cells
from tests.gguf.writing import Allocation, Recorded, recorded, tensor

MIB = 2**20
# Its log rounds each figure to hundredths of a MiB.
ROUNDING = MIB // 200 + 1
MODELS = recorded()
RUNTIME = LLAMA_CPP
F16 = CacheTypes("f16", "f16")


def model_of(entry: Recorded) -> Model:
    return build_gguf_model(entry.metadata, entry.tensors, "model.gguf").model


def workload_of(run: Allocation) -> Workload:
    return Workload(
        prompt_tokens=run.context // run.sequences, batch=run.sequences, prefill_step=run.microbatch
    )


def runtime_of(run: Allocation) -> LlamaCppRuntime:
    return replace(LLAMA_CPP, batch=run.batch, unified=run.unified, swa_full=run.swa_full)


def logged(allocation: list[tuple[int, int, float, float]]) -> dict[int, tuple[int, float, float]]:
    """Layers and MiB of keys and values by cells: llama.cpp logs one line per kind of cache."""
    totals: dict[int, tuple[int, float, float]] = {}
    for count, layers, keys, values in allocation:
        before = totals.get(count, (0, 0.0, 0.0))
        totals[count] = (before[0] + layers, before[1] + keys, before[2] + values)
    return totals


def counted(found: list[Buffer], types: CacheTypes, room: Cells) -> dict[int, tuple[int, int, int]]:
    totals: dict[int, tuple[int, int, int]] = {}
    keys, values = (BY_NAME[name.upper()] for name in types)
    for buffer in found:
        layers, key_bytes, value_bytes = totals.get(buffer.cells, (0, 0, 0))
        slots = buffer.cells * room.streams
        totals[buffer.cells] = (
            layers + 1,
            key_bytes + keys.nbytes(buffer.key_width) * slots,
            value_bytes + values.nbytes(buffer.value_width) * slots,
        )
    return totals


@pytest.mark.parametrize("name", MODELS)
def test_caches_equal_llama_cpps_allocations(name: str) -> None:
    entry = MODELS[name]
    model = model_of(entry)
    for run in entry.runs:
        room = cells(workload_of(run), runtime_of(run))
        types = CacheTypes(run.cache, run.cache)
        tokens = run.context // run.sequences
        expected = logged(run.kv)
        found = counted(list(buffers(model, room, tokens, flash=run.flash)), types, room)
        assert {c: v[0] for c, v in found.items()} == {c: v[0] for c, v in expected.items() if v[0]}
        for count, (layers, keys, values) in found.items():
            assert abs(keys - expected[count][1] * MIB) <= 2 * ROUNDING, (run, layers)
            assert abs(values - expected[count][2] * MIB) <= 2 * ROUNDING, (run, layers)
        total = sum(keys + values for _, keys, values in found.values())
        assert caches(model, room, types, tokens, flash=run.flash).nbytes == total


@pytest.mark.parametrize("name", MODELS)
def test_states_equal_llama_cpps_allocations(name: str) -> None:
    entry = MODELS[name]
    model = model_of(entry)
    for run in entry.runs:
        expected = sum(run.states) * MIB
        assert abs(recurrent_bytes(model, run.sequences) - expected) <= 2 * ROUNDING, run


def placement_of(run: Allocation, blocks: int) -> Placement:
    """Where llama.cpp has what a run loads."""
    return Placement(
        "cpu" if run.gpu_layers is None else "cuda",
        blocks,
        run.gpu_layers or 0,
        run.host_experts,
        parse_overrides(f"{run.overrides}=CPU") if run.overrides else (),
        run.kv_offload,
    )


def percent_off(name: str, run: Allocation) -> float:
    """How far the compute buffer is off, in percent: the GPU's if there is one."""
    entry = MODELS[name]
    model = model_of(entry)
    room = cells(workload_of(run), runtime_of(run))
    types = CacheTypes(run.cache, run.cache)
    context = Context(room, types, run.flash, run.outputs or room.microbatch)
    weights = file_weights(entry.tensors, len(model.layers))
    placement = placement_of(run, weights.blocks)
    sizes = compute_buffers(model, context, weights, placement)
    found, logged = (sizes.gpu, run.gpu) if run.gpu else (sizes.host, run.compute)
    return 100 * (found / MIB / logged - 1)


@pytest.mark.parametrize("name", MODELS)
def test_compute_buffers_are_llama_cpps(name: str) -> None:
    blocks = MODELS[name].metadata[f"{name}.block_count"]
    placed = [run for run in MODELS[name].runs if not (run.host_experts or run.outputs)]
    whole = [run for run in placed if run.gpu_layers in (None, blocks + 1)]
    assert len(whole) >= 18
    for run in whole:
        assert abs(percent_off(name, run)) < 6, run


# MiB on the GPU of 16384 cells for 8 sequences, in micro-batches of 64 tokens: the copies of
# recurrent states are as large as what is computed. Of latent attention 4 sequences without flash
# attention, which copies the values of the whole cache.
SMALL_BATCHES = {
    "falcon-h1": 52.22,
    "granitehybrid": 28.81,
    "kimi-linear": 41.75,
    "mamba2": 46.95,
    "nemotron_h": 95.88,
    "qwen35": 41.25,
    "qwen3next": 40.75,
    "deepseek2": 40.0,
    "deepseek32": 180.56,
    "glm-dsa": 180.56,
}


@pytest.mark.parametrize("name", SMALL_BATCHES)
def test_copies_of_states_and_values_are_in_the_compute_buffer(name: str) -> None:
    entry = MODELS[name]
    is_latent = "attention.kv_lora_rank" in str(entry.metadata) and name != "kimi-linear"
    sequences = 4 if is_latent else 8
    run = Allocation(
        context=16_384,
        sequences=sequences,
        microbatch=64,
        cache="f16",
        kv=[],
        states=[],
        compute=0.0,
        output=0.0,
        flash=not is_latent,
        outputs=sequences,
        gpu_layers=entry.metadata[f"{name}.block_count"] + 1,
        gpu=SMALL_BATCHES[name],
    )
    assert -10 <= percent_off(name, run) <= 10


@pytest.mark.parametrize("name", MODELS)
def test_compute_buffers_of_llama_server_are_llama_cpps(name: str) -> None:
    """With the logits of one token of each sequence, which hide no other operation."""
    runs = [run for run in MODELS[name].runs if run.outputs]
    assert len(runs) == 4
    assert all(abs(percent_off(name, run)) < 5 for run in runs if run.gpu_layers != 0)


def test_most_compute_buffers_are_llama_cpps_to_the_hundredth_of_a_mebibyte() -> None:
    off = [percent_off(name, run) for name in MODELS for run in MODELS[name].runs]
    assert (len(off), sum(abs(percent) < 0.02 for percent in off)) == (833, 755)


@pytest.mark.parametrize(
    ("name", "key", "count"),
    [
        ("qwen3moe", "expert_used_count", 2**31 - 1),
        ("lfm2", "shortconv.l_cache", 1),
        ("llama", "attention.head_count_kv", 2**20),
        ("mamba", "ssm.conv_kernel", 1),
    ],
)
def test_any_count_of_a_file_gives_buffers(name: str, key: str, count: int) -> None:
    entry = MODELS[name]
    metadata = {**entry.metadata, f"{name}.{key}": count}
    model = build_gguf_model(metadata, entry.tensors, "model.gguf").model
    room = cells(workload_of(entry.runs[0]), RUNTIME)
    weights = file_weights(entry.tensors, len(model.layers))
    context = Context(room, F16, True, room.microbatch)
    assert compute_buffers(model, context, weights, Placement("metal", 4, 5)).gpu > 0


def test_a_gpu_copies_the_weights_that_the_host_keeps() -> None:
    (run,) = (run for run in MODELS["qwen3"].runs if run.gpu_layers == 0 and not run.outputs)
    # The head's matrix, which is the embedding's, and the logits.
    assert run.gpu > (151936 * 2560 * 2 + 151936 * 512 * 4) / MIB
    assert abs(percent_off("qwen3", run)) < 0.01


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("deepseek2", 0, 0),
        ("glm4moe", 0, 0),
        ("gpt-oss", 0, 1),
        ("llama4", -1, 0),
        ("qwen3moe", 0, 1),
        # A result that lies in the room of one matrix of experts: the next one does not fit.
        ("qwen3next", 0, 90),
    ],
)
def test_a_gpu_has_room_for_the_largest_experts_of_the_host(
    name: str, least: int, most: int
) -> None:
    (run,) = (run for run in MODELS[name].runs if run.host_experts)
    experts = max(t.nbytes for t in MODELS[name].tensors if "_exps.weight" in t.name)
    assert run.gpu * MIB > experts
    assert least <= round(percent_off(name, run)) <= most


# "model buffer size" in the log of build b11549 that loaded these files with layers on the
# GPU of benchmarks/llama_gpu.py; Gemma's head is its embedding, which is then in both.
@pytest.mark.parametrize(
    ("name", "gpu_layers", "host", "gpu"),
    [
        ("llama", 3, 357.03, 357.04),
        ("llama", 0, 589.07, 0.0),
        ("gemma3", 4, 2180.52, 1820.45),
        ("qwen3moe", 2, 2970.53, 1782.03),
        ("glm4moe", 3, 6114.56, 5650.05),
    ],
)
def test_weights_are_where_llama_cpp_loads_them(
    name: str, gpu_layers: int, host: float, gpu: float
) -> None:
    entry = MODELS[name]
    weights = file_weights(entry.tensors, len(model_of(entry).layers))
    found = weights.by_place(Placement("cuda", weights.blocks, gpu_layers))
    # This GPU aligns each tensor to 128 bytes.
    aligned = 96 * len(entry.tensors)
    assert abs(found[Place.HOST] - host * MIB) <= ROUNDING
    assert -ROUNDING <= gpu * MIB - found[Place.GPU] <= ROUNDING + aligned


@pytest.mark.parametrize("name", ["gpt-oss", "gemma3", "qwen35"])
def test_repeated_layers_reach_a_fixed_point(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = MODELS[name].runs[0]
    found = percent_off(name, run)
    monkeypatch.setattr(compute, "_REPEATED", 1000)
    assert percent_off(name, run) == found


# https://github.com/JamePeng/llama-cpp-python/pull/1 and other logs of versions before batches
# mixed tokens with embeddings: width, feed-forward, heads, KV heads, head width, vocabulary;
# context, micro-batch, flash attention; MiB of the GPU's compute buffer.
@pytest.mark.parametrize(
    ("shape", "run", "mebibytes", "off"),
    [
        ((4096, 12288, 32, 8, 128, 151936), (2048, 512, True), 312.75, -2.6),  # Qwen3-8B
        ((2048, 8192, 32, 8, 64, 128256), (1024, 512, False), 254.5, 0),  # Llama-3.2-1B
        ((1024, 3072, 16, 8, 128, 151936), (1024, 512, False), 300.75, -0.7),  # Qwen3-0.6B
        ((3072, 8192, 32, 32, 96, 32064), (4096, 256, False), 157.0, -4.5),  # Phi-3-mini
        ((2048, 8192, 32, 32, 64, 49152), (1024, 512, False), 100.0, 0),  # SmolLM2-1.7B
        ((3584, 18944, 28, 4, 128, 152064), (2048, 512, False), 304.0, 0),  # Qwen2.5-7B
    ],
)
def test_published_compute_buffers_are_reproduced(
    shape: tuple[int, ...], run: tuple[int, int, bool], mebibytes: float, off: float
) -> None:
    hidden, inner, heads, kv_heads, width, vocabulary = shape
    tokens, microbatch, flash = run
    attention = Attention(heads=heads, kv_heads=kv_heads, key_dim=width, value_dim=width)
    layer = Layer((attention,), DenseMLP(intermediate=inner), ())
    model = Model(
        model_type="", hidden_size=hidden, vocab_size=vocabulary, layers=(layer,) * 8, modules=()
    )
    room = cells(Workload(prompt_tokens=tokens, prefill_step=microbatch), RUNTIME)
    context = Context(room, F16, flash, room.microbatch, mixed=False)
    weights = Weights(8, (), 0, {}, {False: (2, 1), True: (2, 1)})
    found = compute_buffers(model, context, weights, Placement("cuda", 8, 9)).gpu / MIB
    assert round(100 * (found / mebibytes - 1), 1) == off


def test_the_recorded_models_cover_every_layer_kind() -> None:
    kinds = {kind for entry in MODELS.values() for kind in model_of(entry).layer_kinds()}
    assert len(MODELS) >= 26
    assert kinds == {
        "chunked_attention",
        "full_attention",
        "gated_delta",
        "latent_attention",
        "mamba",
        "rwkv",
        "short_convolution",
        "sliding_attention",
        "sparse_attention",
    }


def generic(architecture: str, **keys: Any) -> dict[str, Any]:
    usual = {"block_count": 2, "embedding_length": 64, "context_length": 4096}
    named = {**usual, **{key.replace("__", "."): item for key, item in keys.items()}}
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": item for key, item in named.items()},
    }


EMBEDDING = (tensor("token_embd.weight", (64, 100)),)


def built(metadata: dict[str, Any]) -> Model:
    return build_gguf_model(metadata, EMBEDDING, "model.gguf").model


# https://github.com/ggml-org/llama.cpp/pull/23792, logs of Qwen3.6-27B by build 9421: without its
# prediction layer "size = 299.25 MiB (2 cells, 64 layers, 2 seqs 0 rs_seq), R (f32): 11.25 MiB, S
# (f32): 288.00 MiB"; with it "size = 448.88 MiB (3 cells, 65 layers, 3 seqs 0 rs_seq), R (f32):
# 16.88 MiB, S (f32): 432.00 MiB".
@pytest.mark.parametrize(
    ("blocks", "predicting", "sequences", "mebibytes"), [(64, 0, 2, 299.25), (65, 1, 3, 448.88)]
)
def test_published_states_of_qwen_27b_are_reproduced(
    blocks: int, predicting: int, sequences: int, mebibytes: float
) -> None:
    metadata = generic(
        "qwen35",
        block_count=blocks,
        nextn_predict_layers=predicting,
        embedding_length=5120,
        full_attention_interval=4,
        attention__head_count=24,
        attention__head_count_kv=4,
        attention__key_length=256,
        attention__value_length=256,
        ssm__conv_kernel=4,
        ssm__group_count=16,
        ssm__inner_size=6144,
        ssm__state_size=128,
        ssm__time_step_rank=48,
    )
    model = built(metadata)
    assert model.layer_kinds() == {"gated_delta": 48, "full_attention": 16}
    assert abs(recurrent_bytes(model, sequences) - mebibytes * MIB) <= 2 * ROUNDING


# https://github.com/ggml-org/llama.cpp/issues/10981: a DeepSeek-V3 file made before the latent
# cache has "n_embd_k_gqa = 24576, n_embd_v_gqa = 16384".
def test_a_latent_model_without_the_mla_lengths_keeps_every_head() -> None:
    keys: dict[str, Any] = dict(
        attention__head_count=128,
        attention__head_count_kv=128,
        attention__key_length=192,
        attention__value_length=128,
        attention__kv_lora_rank=512,
    )
    room = Cells(256, 256, 1, 256)
    first = next(buffers(built(generic("deepseek2", **keys)), room, 10))
    assert (first.key_width, first.value_width) == (24576, 16384)


def test_cells_are_padded_and_windows_include_a_microbatch() -> None:
    room = cells(Workload(prompt_tokens=1000, prefill_step=512), RUNTIME)
    assert room == Cells(full=1024, microbatch=512, sequences=1, padding=256)
    assert (room.of(128), room.of(4096)) == (768, 1024)
    short = cells(Workload(prompt_tokens=300, prefill_step=512), RUNTIME)
    assert (short.microbatch, short.of(10)) == (300, 512)
    three = cells(Workload(prompt_tokens=1025, batch=3, prefill_step=4096), RUNTIME)
    assert (three.full, three.microbatch) == (1280, 2048)


@pytest.mark.parametrize("name", CACHE_TYPES)
def test_every_cache_type_counts_its_blocks(name: str) -> None:
    room = Cells(256, 256, 1, 256)
    found = caches(model_of(MODELS["qwen3"]), room, CacheTypes(name, "f16"), 256)
    kind = BY_NAME[name.upper()]
    assert found.nbytes == 4 * 256 * (1024 // kind.block * kind.block_bytes + 1024 * 2)


def test_state_sizes_are_positive() -> None:
    for entry in MODELS.values():
        for layer in model_of(entry).layers:
            for mixer in layer.mixers:
                assert all(size > 0 for size in state_elements(mixer))


def test_feed_forward_kinds_come_from_the_tensors() -> None:
    entry = MODELS["qwen3moe"]
    block = model_of(entry).layers[0].feed_forward
    assert block is not None
    assert (block.intermediate, block.experts, block.top_k) == (768, 128, 8)  # type: ignore[union-attr]
    routed = sum(prod(t.shape) for t in entry.tensors if "blk.0." in t.name and "_exps" in t.name)
    assert routed == 3 * 128 * 768 * 2048


def test_replacing_the_microbatch_changes_only_windows_and_workspace() -> None:
    model = model_of(MODELS["gpt-oss"])
    room = Cells(4096, 512, 1, 256)
    small = replace(room, microbatch=128)
    less = caches(model, room, F16, 4096).nbytes - caches(model, small, F16, 4096).nbytes
    assert less == 3 * (768 - 256) * 2 * 512 * 2


# MiB on the GPU that build b11549 logged for 8192 cells in micro-batches of 512 with llama-server's
# logits: with --no-kv-offload, or with tensors that --override-tensor places on the host.
@pytest.mark.parametrize(
    ("name", "placed", "mebibytes"),
    [
        ("qwen3", {"kv_offload": False}, 90.01),
        ("qwen3", {"kv_offload": False, "flash": False}, 596.01),
        ("gemma4", {"kv_offload": False}, 86.01),
        ("qwen35", {"kv_offload": False}, 103.0),
        ("qwen3moe", {"overrides": r"\.ffn_.*_exps\."}, 452.01),
        ("qwen3moe", {"overrides": r"blk\.[01]\.ffn_"}, 452.01),
        ("llama", {"overrides": "attn_output"}, 72.01),
    ],
)
def test_what_is_placed_otherwise_than_its_layer_has_llama_cpps_buffers(
    name: str, placed: dict[str, Any], mebibytes: float
) -> None:
    run = Allocation(
        context=8192,
        sequences=1,
        microbatch=512,
        cache="f16",
        kv=[],
        states=[],
        compute=0.0,
        output=0.0,
        outputs=1,
        gpu_layers=MODELS[name].metadata[f"{name}.block_count"] + 1,
        gpu=mebibytes,
        **placed,
    )
    assert abs(percent_off(name, run)) < 0.02
