"""One budget for each runtime: every command uses it for the verdict, to the byte."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.machine.device import DEFAULT_REGIME, Device
from memfit.estimators.machine.devices import find_device
from memfit.estimators.runtimes.registry import get_runtime
from memfit.estimators.runtimes.runtime import Budget, Need, judge
from memfit.estimators.sizing.estimate import estimate
from memfit.estimators.sizing.explain import explain
from memfit.estimators.sizing.opening import size
from memfit.estimators.sizing.sized_model import SizedModel, with_runtime
from tests.cli.running import Memfit

SAMPLES = Path(__file__).parents[2] / "sample_configs"
LLAMA = SAMPLES / "llama-3.1-8b.yaml"
OWN_LIMIT = 50_928  # tokens that vLLM chooses on an RTX 4090, from `memfit plan context`
MAC = Device("a Mac", "metal", 32 * 2**30, 24 * 2**30, None, "flag")


@pytest.fixture(scope="module")
def on_vllm() -> SizedModel:
    device = find_device("rtx-4090", os_regime=DEFAULT_REGIME)
    return with_runtime(size(open_checkpoint(str(LLAMA)), device=device), get_runtime("vllm"))


@pytest.mark.parametrize(
    ("tokens", "verdict", "exceeded"),
    [
        (OWN_LIMIT, "fits", ()),
        (OWN_LIMIT + 16, "exceeds", ("runtime_budget",)),
        (56 * 1024, "exceeds", ("runtime_budget",)),
    ],
)
def test_vllm_exceeds_its_share_of_the_memory_after_its_own_limit(
    on_vllm: SizedModel, tokens: int, verdict: str, exceeded: tuple[str, ...]
) -> None:
    result = estimate(on_vllm, Workload(prompt_tokens=tokens))
    assert (result.verdict, result.exceeded) == (verdict, exceeded)


def test_estimate_compare_and_plan_agree_on_vllms_limit(memfit: Memfit) -> None:
    where = ("--device", "rtx-4090", "--context", "56k", "--json")
    alone = memfit("estimate", LLAMA, "--runtime", "vllm", *where)
    plan = memfit("plan", "context", LLAMA, "--runtime", "vllm", *where)
    compared = memfit("compare", LLAMA, "--runtimes", "vllm,llama.cpp", *where).json["models"][0]
    assert (alone.code, plan.code) == (1, 1)
    assert alone.json["verdict"] == plan.json["verdict"] == compared["verdict"] == "exceeds"
    assert alone.json["exceeded"] == compared["exceeded"] == ["runtime_budget"]
    assert plan.json["automatic"]["tokens"] == OWN_LIMIT


def test_an_exceeded_budget_is_shown_with_its_figures(memfit: Memfit) -> None:
    out = memfit(
        *("estimate", LLAMA, "--runtime", "vllm", "--device", "rtx-4090", "--context", "56k", "-v")
    ).out
    text = " ".join(out.split())
    assert "does not fit (24.7 GB of 25.7 GB; more than vllm gives itself)." in text
    assert "vllm gives itself 23.6 GB, this workload needs 24.6 GB" in text


def test_the_budget_is_one_of_the_explained_lines(on_vllm: SizedModel) -> None:
    lines = explain(on_vllm, Workload(prompt_tokens=OWN_LIMIT))
    assert any("23696252928 bytes <= the budget of vllm, 23696643194 bytes" in s for s in lines)


def test_on_a_mac_the_working_set_is_the_smaller_limit(on_vllm: SizedModel) -> None:
    sized = on_vllm.on(MAC)
    workload = Workload(prompt_tokens=72 * 1024)
    assert judge(sized.requirement(workload), MAC)[1] == ("working_set",)


@pytest.mark.parametrize(
    ("runtime", "batch", "budget_mb"), [("foundry", 1, 1000), ("agent-memory", 4, 8192)]
)
def test_a_cache_budget_covers_only_the_cache(
    memfit: Memfit, monkeypatch: pytest.MonkeyPatch, runtime: str, batch: int, budget_mb: int
) -> None:
    monkeypatch.setenv("METALLIC_KV_MEMORY_BUDGET_MB", "1000")
    arguments = (LLAMA, "--runtime", runtime, "--memory", "128GB", "--batch", str(batch), "--json")
    token = memfit("estimate", *arguments).json["components"]["kv"]["bytes_per_token"]
    most = budget_mb * 2**20 // (batch * token) // 256 * 256
    within = memfit("estimate", *arguments, "--context", str(most)).json
    beyond = memfit("estimate", *arguments, "--context", str(most + 256)).json
    assert within["verdict"] == "fits"
    assert (beyond["verdict"], beyond["exceeded"]) == ("exceeds", ["cache_budget"])
    context = beyond["recommendation"]["context_tokens"]
    assert context["value"] == most
    assert f"what {runtime} gives its cache" in context["reason"]


@pytest.mark.parametrize("name", ["mlx-lm", "mlx-swift-lm", "mlx-moe", "zinc", "llama.cpp"])
def test_a_share_of_the_working_set_is_not_a_limit(name: str) -> None:
    budget = get_runtime(name).budget
    need = Need(MAC.working_set_bytes, 0, MAC.working_set_bytes, budget)
    assert judge(need, MAC) == ("tight", ())
    assert judge(replace(need, peak_bytes=need.peak_bytes + 1), MAC)[1] == ("working_set",)


def test_exactly_the_budget_is_within_it() -> None:
    budget = Budget("cache", bytes=1000)
    assert judge(Need(2000, 0, 1000, budget), MAC) == ("fits", ())
    assert judge(Need(2000, 0, 1001, budget), MAC) == ("exceeds", ("cache_budget",))


def test_what_its_error_takes_above_the_limit_is_tight(memfit: Memfit) -> None:
    budget = get_runtime("mlx-lm").budget
    room = MAC.working_set_bytes // 5
    need = Need(MAC.working_set_bytes - room, 0, 0, budget, error_bytes=room)
    assert judge(need, MAC) == ("fits", ())
    assert judge(replace(need, error_bytes=room + 1), MAC) == ("tight", ())
    # Attention over a quantised cache holds its scores: a workspace of two thirds of the peak.
    model = ("qwen3-4b-4bit", "--context", "24k", "--kv-bits", "8", "--memory", "16GB")
    assert "tight (11.2 GB of 12.7 GB); with its stated error" in memfit("estimate", *model).out


def test_python_and_the_command_line_keep_the_same_margin_free(memfit: Memfit) -> None:
    device = find_device("m4-max-64", os_regime=DEFAULT_REGIME)
    sized = size(open_checkpoint(str(LLAMA)), device=device)
    by_library = estimate(sized, Workload(prompt_tokens=4096))
    run = memfit("estimate", LLAMA, "--device", "m4-max-64", "--context", "4096", "--json")
    assert run.json["components"]["margin"]["bytes"] == by_library.components.margin.bytes > 0
    context = by_library.recommendation.context_tokens
    assert run.json["recommendation"]["context_tokens"]["value"] == context.value
