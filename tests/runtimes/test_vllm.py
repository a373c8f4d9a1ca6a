"""vLLM: packed weights, the pool that they leave, and the requests in it."""

from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.arch.model import Part
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint, Tensor
from memfit.estimators.machine.device import DEFAULT_REGIME
from memfit.estimators.machine.devices import find_device
from memfit.estimators.runtimes.facets import pool
from memfit.estimators.runtimes.registry import get_runtime
from memfit.estimators.runtimes.token_cost import TokenCost
from memfit.estimators.runtimes.vllm.pool import block_layout
from memfit.estimators.sizing.estimate import estimate
from memfit.estimators.sizing.opening import size
from memfit.estimators.sizing.sized_model import SizedModel, with_runtime
from tests.models import QWEN3_4B, QWEN3_NEXT_80B

SAMPLES = Path(__file__).parents[2] / "sample_configs"
# Qwen/Qwen2.5-7B-Instruct, config.json.
QWEN_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
    "torch_dtype": "float16",
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
# Of a layer: q and o, k and v, gate, up and down.
MATRICES = 28 * (2 * 3584**2 + 2 * 512 * 3584 + 3 * 18944 * 3584)
NORMS_AND_BIASES = 2 * (28 * (2 * 3584 + 3584 + 2 * 512) + 3584)
EMBEDDINGS = 2 * 2 * 152064 * 3584


def on_vllm(
    config: dict[str, Any], device: str | None = None, *, tensors: tuple[Tensor, ...] | None = None
) -> SizedModel:
    found = find_device(device, os_regime=DEFAULT_REGIME) if device else None
    checkpoint = Checkpoint("m", "local", config, "config.json", tensors)
    return with_runtime(size(checkpoint, device=found), get_runtime("vllm"))


def quantised(**block: Any) -> dict[str, Any]:
    return {**QWEN_7B, "quantization_config": block}


@pytest.mark.parametrize(
    ("block", "matrices"),
    [
        # 4 bits and a 16-bit scale for 128 weights; zero points are dropped at load.
        (GPTQ, MATRICES // 2 + MATRICES // 128 * 2),
        # AWQ keeps its zero points of 4 bits.
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, MATRICES * 133 // 256),
        # A float32 scale for each block of 128 x 128.
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, MATRICES + MATRICES // 4096),
        # A float32 scale for each of the seven matrices.
        ({"quant_method": "fp8"}, MATRICES + 28 * 7 * 4),
        (
            {
                "quant_method": "compressed-tensors",
                "ignore": ["lm_head"],
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 4, "group_size": 128, "type": "int"}}
                },
            },
            MATRICES // 2 + MATRICES // 128 * 2,
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, MATRICES // 2 + MATRICES // 16),
    ],
)
def test_packed_weights_stay_packed(block: dict[str, Any], matrices: int) -> None:
    sized = on_vllm(quantised(**block))
    assert sized.resident_bytes == matrices + NORMS_AND_BIASES + EMBEDDINGS
    assert sized.footprint.basis == "derived"


def test_a_gptq_7b_fits_12_gb_with_a_pool_of_many_tokens() -> None:
    result = estimate(on_vllm(quantised(**GPTQ), "rtx-3060"), Workload(prompt_tokens=8192))
    pool = result.pool
    assert pool
    assert result.verdict == "fits"
    assert pool.budget_bytes == 12288 * 2**20 * 92 // 100
    # 2 x 4 heads x 128 in 16 bits, 28 layers.
    assert pool.block_bytes == 16 * 28 * 2048
    assert pool.request_bytes == 512 * pool.block_bytes
    taken = pool.weights_bytes + pool.activation_bytes + pool.graph_bytes
    assert pool.pool_bytes == pool.budget_bytes - taken
    assert pool.tokens == pool.pool_bytes // pool.block_bytes * 16
    assert pool.requests == pool.tokens // 8192 > 1


def test_what_kernels_do_not_get_is_not_counted() -> None:
    prefix = "model.layers.0.self_attn.q_proj"
    kept = (
        Tensor("model.embed_tokens.weight", "F16", (152064, 3584), 2 * 152064 * 3584),
        Tensor(f"{prefix}.qweight", "I32", (448, 3584), 4 * 448 * 3584),
        Tensor(f"{prefix}.scales", "F16", (28, 3584), 2 * 28 * 3584),
    )
    left = (
        Tensor(f"{prefix}.qzeros", "I32", (28, 448), 4 * 28 * 448),
        Tensor(f"{prefix}.g_idx", "I32", (3584,), 4 * 3584),
        Tensor("model.layers.0.self_attn.rotary_emb.inv_freq", "F32", (64,), 256),
        Tensor("model.layers.28.mlp.gate_proj.weight", "F16", (8, 8), 128),
        Tensor("mtp.fc.weight", "F16", (8, 8), 128),
    )
    sized = on_vllm(quantised(**GPTQ), tensors=(*kept, *left))
    assert sized.resident_bytes == sum(tensor.nbytes for tensor in kept)
    assert sized.footprint.unloaded_bytes == sum(tensor.nbytes for tensor in left)
    assert sized.footprint.kept(Part.MLP) == 0


def test_weights_are_those_vllm_has_logged() -> None:
    # vllm-project/vllm issue 10517: Llama-3.1-8B, "Loading model weights took 14.9888 GB" (GiB).
    run = with_runtime(size(open_sample("llama-3.1-8b.yaml"), device=None), get_runtime("vllm"))
    assert 0.995 < run.resident_bytes / (14.9888 * 2**30) <= 1


@pytest.mark.parametrize(
    ("sample", "workload", "pool_gib", "concurrency"),
    [
        # vllm-project/vllm issue 10517 and pull request 57047, noonghunna/club-3090 issue 612:
        # "Available KV cache memory" and "Maximum concurrency" for requests of a length.
        ("llama-3.1-8b.yaml", Workload(prompt_tokens=20_000), 3.81, 1.56),
        ("qwen3-4b-4bit.yaml", Workload(prompt_tokens=2048), 36.88, 131.13),
        ("qwen3.6-35b-a3b.yaml", Workload(prompt_tokens=131_072, kv_bits=8), 5.98, 4.33),
    ],
)
def test_a_pool_holds_the_requests_vllm_has_logged(
    sample: str, workload: Workload, pool_gib: float, concurrency: float
) -> None:
    device = find_device("h100-80", os_regime=DEFAULT_REGIME)
    sized = with_runtime(size(open_sample(sample), device=device), get_runtime("vllm"))
    found = pool(sized.runtime_model, workload)
    assert found
    assert pool_gib * 2**30 / found.request_bytes == pytest.approx(concurrency, rel=0.003)


def open_sample(name: str) -> Checkpoint:
    from memfit.estimators.checkpoint.opening import open_checkpoint

    return open_checkpoint(str(SAMPLES / name))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"quant_method": "aqlm"}, "quantization_config.quant_method: 'aqlm': vllm reads gptq"),
        ({**GPTQ, "bits": 3}, "quantization_config.bits: '3'"),
        ({**GPTQ, "sym": False}, "quantization_config.sym: 'False'"),
        ({"quant_method": "awq", "bits": 8}, "quantization_config.bits: '8'"),
        ({"quant_method": "compressed-tensors"}, "config_groups: 'None'"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8}}},
                "ignore": ["re:(a+)+$"],
            },
            "'re:(a+)+$' is not understood",
        ),
        ({"quant_method": "modelopt", "quant_algo": "MIXED"}, "quant_algo: 'MIXED'"),
    ],
)
def test_what_vllm_cannot_load_is_named(block: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        on_vllm(quantised(**block))
    assert message in str(caught.value)


def test_ignored_layers_keep_their_type() -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    block = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": weights}}}
    names = ["lm_head", "re:.*self_attn.*", r"re:.*mlp\.(gate|up)_proj.*"]
    sized = on_vllm(quantised(**block, ignore=names))
    down = 28 * (18944 * 3584 + 4 * 3584)
    rest = 2 * (MATRICES - 28 * 18944 * 3584)
    assert sized.resident_bytes == down + rest + NORMS_AND_BIASES + EMBEDDINGS


def test_the_vocabulary_is_padded_to_64_rows() -> None:
    odd = on_vllm({**QWEN3_4B, "vocab_size": 151_937}).resident_bytes
    assert odd == on_vllm({**QWEN3_4B, "vocab_size": 152_000}).resident_bytes


def test_a_linear_layers_state_sets_the_block_of_a_hybrid() -> None:
    # Of Qwen3-Next: a state of 32 x 128 x 128 and a convolution of 3 x 8192 in 16 bits; a token of
    # 2 x 2 x 256. The tokens are vLLM's rule in interface.py, _align_hybrid_block_size.
    state, token = 2 * (32 * 128 * 128 + 3 * 8192), 2 * 2 * 2 * 256
    block = 16 * -(-state // (16 * token))
    assert block == 544
    result = estimate(on_vllm(QWEN3_NEXT_80B, "b200"), Workload(prompt_tokens=10_000))
    assert result.pool
    # 12 layers attend, 36 are recurrent: three groups of as many layers, with two states each.
    assert result.pool.block_bytes == 12 * block * token
    assert result.components.kv.bytes == -(-10_000 // block) * result.pool.block_bytes
    assert result.components.ssm.bytes == 3 * 2 * result.pool.block_bytes


def test_a_window_keeps_what_is_in_flight() -> None:
    costs = [TokenCost(10, 64), TokenCost(50, 64, 1024, 1024)]
    layout = block_layout(costs, (), in_flight=4096)
    # Ten layers share a block: one group attends to all tokens, five to a window.
    assert layout.block_bytes == 10 * 16 * 64
    window = -(-(1023 + 4096) // 16) + 1
    assert layout.request_bytes(32_768) == layout.block_bytes * (2048 + 5 * window)
    assert layout.request_bytes(160) == layout.block_bytes * (10 + 5 * 11)


def test_the_longest_request_is_the_last_that_fits() -> None:
    layout = block_layout([TokenCost(32, 4096)], (), in_flight=0)
    tokens = layout.longest(layout.request_bytes(5000) - 1, 10_000)
    assert tokens == 4992
    assert layout.longest(layout.request_bytes(5008), 10_000) == 5008
    assert layout.longest(layout.block_bytes - 1, 10_000) == 0
