"""What mlx-lm's class says of a model, compared with what the families say and with a run."""

import json
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.arch.model import Model, Part
from memfit.estimators.arch.registry import build_model
from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.devices import find_device, working_set_device
from memfit.estimators.mlx.kv_cache import kv_cache, state_bytes
from memfit.estimators.mlx.versions import MlxVersions
from memfit.estimators.weights.derived import QuantizationPlan, derive

pytest.importorskip("mlx_lm")

from memfit.estimators.runtimes.by_class import TracedWorkspace
from memfit.estimators.runtimes.mlx_lm_trace import ClassTrace
from memfit.estimators.trace import recording
from memfit.estimators.trace.class_description import FirstCall, describe, mlx_lm_class
from memfit.estimators.trace.kernel_stubs import TraceTarget
from memfit.estimators.trace.traced_model import TracedModel
from tests.models import published_config
from tests.oracle import Oracle
from tests.selection import FEW_CONFIGS, quick
from tests.trace.test_shapes import NOT_BUILT, NOT_IN_BATCHES, UNDESCRIBED

CASES = sorted((Path(__file__).parents[1] / "arch" / "cases").glob("*.json"))
BY_TYPE = {case["model_type"]: case for case in UNDESCRIBED if case["model_type"] not in NOT_BUILT}
# A class for each way in which caches and experts differ.
QUICK_TYPES = ("afm7", "baichuan_m1", "dbrx", "glm4_moe_lite", "iquestloopcoder", "muse_spark")
VERSIONS = MlxVersions()
WORKLOADS = (
    Workload(prompt_tokens=40),
    Workload(prompt_tokens=150, max_tokens=3, prefill_step=64, batch=2),
    Workload(prompt_tokens=150, max_tokens=3, prefill_step=40, max_kv_size=32),
    Workload(prompt_tokens=5000, max_tokens=3),
)
# The size of GLM-4.7-Flash with four of its layers.
GLM: dict[str, Any] = {
    **BY_TYPE["glm4_moe_lite"],
    "vocab_size": 154_880,
    "hidden_size": 2048,
    "intermediate_size": 10_240,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "max_position_embeddings": 65_536,
}


def described(config: Mapping[str, Any], dtype: str = "BF16") -> Model:
    built = TracedModel(config, "metal", dtype=dtype)
    return built.describe(built.first_call())


@cache
def both(path: Path) -> tuple[Model, Model]:
    """Return a case as a family describes it and as the class does."""
    config = json.loads(path.read_text())
    written = build_model(config, "config.json")
    return written, described(config, written.dtype)


def states(model: Model) -> Counter[bool]:
    # A class may keep three arrays where a family writes one (kimi_linear).
    found: Counter[bool] = Counter()
    for state in model.states():
        found[state.float32] += state.elements
    return found


@pytest.mark.parametrize("path", quick(CASES, FEW_CONFIGS), ids=lambda path: path.stem)
def test_the_class_says_what_the_family_says(path: Path) -> None:
    written, derived = both(path)
    assert Counter(derived.kv_buffers()) == Counter(written.kv_buffers())
    assert states(derived) == states(written)
    for name in ("vocab_size", "hidden_size", "layers_path", "makes_own_cache", "tied_head"):
        assert getattr(derived, name) == getattr(written, name)
    assert len(derived.layers) == len(written.layers)
    assert _modules(derived) == _modules(written)


def _modules(model: Model) -> dict[str, Any]:
    return {
        path: (m.shape, m.bias, m.quantizable, m.predicate, m.float32)
        for path, m in model.all_modules()
        if m.loaded
    }


@pytest.mark.parametrize("path", quick(CASES, FEW_CONFIGS), ids=lambda path: path.stem)
def test_the_class_has_the_weights_of_the_family_to_the_byte(path: Path) -> None:
    written, derived = both(path)
    conversion = QuantizationPlan(Quantization(4, 32), converting=True)
    for plan in (None, conversion):
        ours, theirs = derive(derived, plan), derive(written, plan)
        assert ours.sizes == theirs.sizes
        assert ours.parameters == theirs.parameters - theirs.unloaded_parameters
    # By name these are a router and mixers; the families know better.
    if derived.model_type in ("gemma3n", "nemotron_h"):
        return
    parts = {path: m.part for path, m in written.all_modules() if m.loaded}
    assert {path: m.part for path, m in derived.all_modules()} == parts


@pytest.mark.parametrize("path", quick(CASES, FEW_CONFIGS), ids=lambda path: path.stem)
def test_the_class_has_the_experts_of_the_family(path: Path) -> None:
    written, derived = (
        {
            layer: (moe.experts, moe.top_k, moe.intermediate, moe.gated, moe.latent_dim)
            for layer, moe in model.experts().items()
        }
        for model in both(path)
    )
    assert derived == written


@pytest.mark.parametrize("name", quick(sorted(BY_TYPE), QUICK_TYPES))
def test_the_description_of_any_class_gives_the_bytes_of_a_run(name: str) -> None:
    built = TracedModel(BY_TYPE[name], "metal")
    model = built.describe(built.first_call())
    for workload in WORKLOADS:
        if workload.batch > 1 and name in NOT_IN_BATCHES:
            continue
        shapes, kv = built.shapes(workload), kv_cache(model, workload)
        if name == "deepseek_v41":  # its open groups have a bound
            assert shapes.kv_bytes <= kv.nbytes <= shapes.kv_bytes * 5 // 4
            continue
        assert (kv.nbytes, kv.held_bytes) == (shapes.kv_bytes, shapes.kv_held_bytes)
        assert state_bytes(model, workload.batch) == shapes.ssm_bytes
    if name not in ("bitnet", "prism_hadamard_qwen35"):  # they pack matrices themselves
        assert derive(model, None).loaded_bytes == sum(built.weights.values())


@pytest.mark.parametrize("name", ["phixtral", "plamo2", "gptj", "talkie", "Klear"])
def test_a_class_that_does_not_run_over_quantised_caches_is_known(name: str) -> None:
    built = TracedModel(BY_TYPE[name], "metal")
    model = built.describe(built.first_call())
    workload = Workload(
        prompt_tokens=150, prefill_step=64, kv_bits=8, kv_group_size=32, quantized_kv_start=0
    )
    if name in ("phixtral", "plamo2"):
        with pytest.raises(UnsupportedError, match="cannot attend over a quantised cache"):
            kv_cache(model, workload)
        with pytest.raises(UnsupportedError, match=r"AttributeError|TypeError"):
            built.record(workload, TraceTarget(backend="metal"))
    else:
        built.record(workload, TraceTarget(backend="metal"))
        assert kv_cache(model, workload).nbytes == built.shapes(workload).kv_bytes


@pytest.mark.exhaustive
def test_every_class_of_mlx_lm_that_runs_here_is_described() -> None:
    for config in BY_TYPE.values():
        assert described(config).layers


def test_the_caches_of_a_packed_model_are_described_too() -> None:
    config = {**GLM, "quantization": {"bits": 4, "group_size": 64}}
    plain, packed = TracedModel(GLM, "metal"), TracedModel(config, "metal")
    assert plain.describe(packed.first_call()) == plain.describe(plain.first_call())


def test_an_unknown_cache_is_rejected_by_its_name() -> None:
    import mlx.core as mx
    from mlx_lm.models.cache import ConcatenateKVCache

    filled = ConcatenateKVCache()
    filled.update_and_fetch(mx.zeros((1, 2, 8, 32)), mx.zeros((1, 2, 8, 32)))
    model = Oracle(BY_TYPE["gptj"]).model
    with pytest.raises(UnsupportedError, match=r"^mlx_lm\.models\.cache\.ConcatenateKVCache: "):
        describe(mlx_lm_class(model), FirstCall([filled], {}), model_type="gptj", dtype="F32")


def test_what_is_around_experts_is_no_expert() -> None:
    model = described(BY_TYPE["muse_spark"])
    assert {(moe.experts, moe.top_k) for moe in model.experts().values()} == {(8, 2)}
    parts = {path.rpartition(".")[2]: module.part for path, module in model.all_modules()}
    routed = {name for name, part in parts.items() if part is Part.EXPERTS}
    assert routed == {"gate_proj", "up_proj", "down_proj"}
    assert (parts["post_expert_norm"], parts["post_expert_proj"]) == (Part.NORM, Part.MLP)


def test_experts_of_an_unknown_number_a_token_are_rejected() -> None:
    built = TracedModel(BY_TYPE["glm4_moe_lite"], "metal")
    first = built.first_call()
    with pytest.raises(UnsupportedError, match=r"switch_mlp: how many experts a token takes"):
        built.describe(first._replace(top_k={}))


def trace_of(config: Mapping[str, Any]) -> ClassTrace:
    checkpoint = Checkpoint(id="it", source="config", config=config, config_name="it")
    return ClassTrace(checkpoint, None, "BF16")


@pytest.mark.parametrize("tokens", [3000, 9000, 40_000])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_workspace_between_traced_prompts_is_within_the_error_of_a_formula(
    tokens: int, batch: int
) -> None:
    trace, device = trace_of(GLM), working_set_device(10**12)
    workload = Workload(prompt_tokens=tokens, batch=batch)
    traced = trace.moment(workload, device, VERSIONS)
    between = TracedWorkspace(trace, 65_536).peak(workload, device, VERSIONS, 0)
    assert traced is not None
    assert traced.workspace_bytes * 9 // 10 <= between.workspace_bytes
    # Of a batch it is on two lines.
    most = (5, 4) if batch == 1 else (4, 3)
    assert between.workspace_bytes <= traced.workspace_bytes * most[0] // most[1] or tokens < 4096


@pytest.mark.exhaustive(daily=True)
def test_a_line_between_traced_prompts_ends_before_fewer_layers_run_at_once() -> None:
    packed = {"quantization": {"bits": 4, "group_size": 64}}
    trace = trace_of({**published_config("glm-4.7-flash"), **packed})
    device, workload = find_device("m4-max-64"), Workload(prompt_tokens=50_000)
    traced = trace.moment(workload, device, VERSIONS)
    between = TracedWorkspace(trace, 202_752).peak(workload, device, VERSIONS, 0)
    assert traced is not None
    assert traced.workspace_bytes <= between.workspace_bytes <= traced.workspace_bytes * 5 // 4


@pytest.mark.exhaustive(daily=True)
def test_the_workspace_of_a_loop_is_bounded_by_that_of_shorter_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, device = BY_TYPE["bailing_moe_linear"], working_set_device(10**12)
    workload = Workload(prompt_tokens=512, prefill_step=256)
    traced = trace_of(config).moment(workload, device, VERSIONS)
    assert traced is not None
    monkeypatch.setattr(recording, "MAX_NODES", 6_000)
    assert trace_of(config).moment(workload, device, VERSIONS) is None
    bound = TracedWorkspace(trace_of(config), 512).peak(workload, device, VERSIONS, 0)
    assert traced.workspace_bytes <= bound.workspace_bytes
    monkeypatch.setattr(recording, "MAX_NODES", 10)
    with pytest.raises(UnsupportedError, match="operations"):
        TracedWorkspace(trace_of(config), 512).peak(workload, device, VERSIONS, 0)
