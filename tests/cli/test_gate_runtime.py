"""A policy's runtime: the gate gives the figures that `memfit estimate --runtime` gives."""

import json
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.runtimes.registry import list_runtimes
from tests.cli.gating import SAMPLES, target, write_policy
from tests.cli.running import Memfit
from tests.gguf.writing import recorded, write

SAMPLE = str(SAMPLES / "qwen3-4b-4bit.yaml")
MOE_SAMPLE = str(SAMPLES / "qwen3-30b-a3b-4bit.yaml")
RUNTIMES = [runtime.name for runtime in list_runtimes()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def figures(run: Any) -> dict[str, Any]:
    """Return the figures of the only target."""
    (report,) = run.json["targets"]
    assert report["message"] is None
    found: dict[str, Any] = report["figures"]
    return found


def estimated(result: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of an estimate under the gate's names."""
    parts = result["components"]
    return {
        "weights_bytes": parts["weights"]["loaded_bytes"],
        "kv_bytes_per_token": parts["kv"]["bytes_per_token"],
        "kv_bytes": parts["kv"]["bytes"],
        "state_bytes": parts["ssm"]["bytes"],
        "workspace_bytes": parts["workspace"]["bytes"],
        "peak_bytes": result["peak_bytes"],
        "load_peak_bytes": parts["weights"]["resident_bytes"],
        "wired_limit_bytes": result["peak_bytes"] + parts["margin"]["bytes"],
        "context_tokens": result["recommendation"]["context_tokens"]["value"],
        "basis": parts["weights"]["basis"],
    }


def test_the_load_peak_of_mlx_moe_is_its_start_up(memfit: Memfit, folder: Path) -> None:
    model = SAMPLES / "qwen3-next-80b-a3b-4bit.yaml"
    keys = {"model": str(model), "memory": "32GB", "workload": {"context": 4096}}
    write_policy(
        folder,
        least=target({"load_peak": "23.1GB"}, runtime="mlx-moe", **keys),
        less=target({"load_peak": "23.0GB"}, runtime="mlx-moe", **keys),
    )
    run = memfit("gate", "--format", "json")
    assert [report["status"] for report in run.json["targets"]] == ["passed", "broken"]
    # mlx-moe's own measurement with 208 experts, which are 19.1 GB afterwards.
    figures = run.json["targets"][0]["figures"]
    assert round(figures["load_peak_bytes"] / 1e9, 2) == 23.05
    assert figures["load_peak_bytes"] == figures["peak_bytes"]


def test_a_runtime_that_needs_more_breaks_the_limit(memfit: Memfit, folder: Path) -> None:
    limits = {"peak": "90%"}
    work = {"context": "40k"}
    keys = {"model": SAMPLE, "memory": "16GB", "workload": work}
    write_policy(folder, mlx=target(limits, **keys), zinc=target(limits, runtime="zinc", **keys))
    run = memfit("gate", "--format", "json")
    mlx, zinc = run.json["targets"]
    # 14.3 of 12.7 GB: the cache of all 40960 tokens in float32.
    assert [report["status"] for report in (mlx, zinc)] == ["passed", "broken"]
    arguments = ("estimate", SAMPLE, "--memory", "16GB", "--context", "40k", "--json")
    alone = memfit(*arguments, "--runtime", "zinc")
    assert (run.code, alone.code) == (1, 1)
    assert zinc["figures"]["peak_bytes"] == alone.json["peak_bytes"] > 14_300_000_000


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_every_runtime_has_the_figures_of_the_estimate(
    memfit: Memfit, folder: Path, runtime: str
) -> None:
    work = {"prompt_tokens": 9000, "max_tokens": 128, "batch": 2}
    write_policy(
        folder,
        it=target({"peak": "99%"}, model=MOE_SAMPLE, memory="64GB", runtime=runtime, workload=work),
    )
    options = ("--prompt-tokens", "9000", "--max-tokens", "128", "--batch", "2")
    alone = memfit(
        "estimate", MOE_SAMPLE, "--memory", "64GB", "--runtime", runtime, *options, "--json"
    )
    found = figures(memfit("gate", "--format", "json"))
    expected = estimated(alone.json)
    assert {name: found[name] for name in expected} == expected


def test_the_baseline_keeps_the_runtime_and_its_defaults(memfit: Memfit, folder: Path) -> None:
    it = target({"growth": {"peak": "0%"}}, model=SAMPLE, runtime="agent-memory")
    write_policy(folder, it=it)
    assert memfit("gate", "--update").code == 0
    asked = json.loads((folder / "memfit.lock.json").read_text())["targets"]["it"]["asked"]
    assert asked["runtime"] == "agent-memory"
    # Its cache has 4 bits from the first token on: adapters/config/settings.py.
    assert (asked["workload"]["kv_bits"], asked["workload"]["quantized_kv_start"]) == (4, 0)
    assert memfit("gate").code == 0
    write_policy(folder, it={**it, "runtime": "mlx-lm"})
    run = memfit("gate")
    assert run.code == 2
    assert "runtime agent-memory, now mlx-lm" in run.out


def test_a_baseline_without_a_runtime_is_for_mlx_lm(memfit: Memfit, folder: Path) -> None:
    limits = {"growth": {"peak": "0%"}}
    write_policy(folder, it=target(limits, model=SAMPLE))
    memfit("gate", "--update")
    lock = folder / "memfit.lock.json"
    data = json.loads(lock.read_text())
    del data["targets"]["it"]["asked"]["runtime"]
    lock.write_text(json.dumps(data))
    assert memfit("gate").code == 0
    write_policy(folder, it=target(limits, model=SAMPLE, runtime="zinc"))
    run = memfit("gate")
    assert run.code == 2
    assert "runtime mlx-lm, now zinc" in run.out


def test_a_gguf_file_is_sized_for_llama_cpp(memfit: Memfit, folder: Path) -> None:
    entry = recorded()["qwen3"]
    path = write(folder / "qwen3.gguf", entry.metadata, entry.tensors)
    keys = {"model": path.name, "workload": {"context": "8k"}}
    write_policy(folder, it=target({"peak": "90%"}, **keys))
    alone = memfit("estimate", path, "--device", "m4-pro-24", "--context", "8k", "--json").json
    found = figures(memfit("gate", "--format", "json"))
    expected = estimated(alone)
    assert {name: found[name] for name in expected} == expected
    memfit("gate", "--update")
    asked = json.loads((folder / "memfit.lock.json").read_text())["targets"]["it"]["asked"]
    assert (asked["runtime"], asked["workload"]["prefill_step"]) == ("llama.cpp", 512)
    write_policy(folder, it=target({"peak": "90%"}, runtime="mlx-lm", **keys))
    run = memfit("gate")
    assert run.code == 3
    assert "loads no GGUF file" in run.out


def test_an_unknown_runtime_is_a_mistake_with_its_line(memfit: Memfit, folder: Path) -> None:
    path = write_policy(folder, it=target({"peak": "90%"}, model=SAMPLE, runtime="zync"))
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if "zync" in text)
    run = memfit("gate")
    assert run.code == 2
    assert run.err.startswith(f"memfit: memfit.yaml:{line}: targets.it.runtime: ")
    assert "zinc" in run.err


def test_a_prompt_of_millions_of_chunks_is_judged_as_estimate_judges_it(
    memfit: Memfit, folder: Path
) -> None:
    work = {"context": "100m"}
    keys = {"model": SAMPLE, "workload": work, "device": "m3-ultra-512"}
    write_policy(folder, it=target({"peak": "90%"}, runtime="foundry", **keys))
    run = memfit("gate", "--format", "json")
    alone = memfit(
        *("estimate", SAMPLE, "--runtime", "foundry", "--device", "m3-ultra-512"),
        *("--context", "100m", "--json"),
    )
    assert (run.code, alone.code) == (1, 1)
    assert figures(run)["peak_bytes"] == alone.json["peak_bytes"]


def test_a_small_prefill_step_limits_the_contexts_that_are_searched(
    memfit: Memfit, folder: Path
) -> None:
    sample = str(SAMPLES / "qwen3-next-80b-a3b-4bit.yaml")
    work = {"context": "4k", "prefill_step": 2}
    write_policy(folder, it=target({"context": "8k"}, model=sample, memory="512GB", workload=work))
    alone = memfit(
        *("estimate", sample, "--memory", "512GB", "--context", "4k"),
        *("--prefill-step", "2", "--json"),
    )
    run = memfit("gate", "--format", "json")
    assert (run.code, alone.code) == (0, 0)
    assert figures(run)["context_tokens"] == alone.json["recommendation"]["context_tokens"]["value"]
