"""A policy names a runtime, and the gate judges by its figures."""

import json
from pathlib import Path

import pytest

from tests.cli.gating import SAMPLES, target, write_policy
from tests.cli.running import Memfit
from tests.gguf.writing import recorded, write

SAMPLE = str(SAMPLES / "qwen3-4b-4bit.yaml")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_workload_beyond_the_share_that_vllm_takes_does_not_pass(
    memfit: Memfit, folder: Path
) -> None:
    model = str(SAMPLES / "qwen3-8b-4bit.yaml")
    keys = {
        "model": model,
        "device": "rtx-4090",
        "runtime": "vllm",
        "workload": {"context": "32k", "batch": 4},
    }
    limits = {"peak": "100%"}
    write_policy(
        folder,
        default=target(limits, **keys),
        # Its workspace is a bound; the two others need too much without it.
        more=target({**limits, "basis": "bound"}, **keys, gpu_memory_utilization=0.975),
        larger=target({"peak": "92%"}, **keys),
        mac=target(limits, **{**keys, "device": "m4-max-64"}),
    )
    run = memfit("gate", "--format", "json")
    default, more, larger, mac = run.json["targets"]
    assert "not-on-macs" in [note["code"] for note in mac["notes"]]
    assert [each["status"] for each in (default, more, larger)] == ["broken", "passed", "broken"]
    assert (default["budget"], default["working_set_bytes"]) == ("memory", 24_564 * 2**20)
    arguments = ("--runtime", "vllm", "--device", "rtx-4090", "--context", "32k", "--batch", "4")
    alone = memfit("estimate", model, *arguments, "--json").json
    (budget,) = [check for check in default["checks"] if check["limit"] == "runtime_budget"]
    assert (alone["exceeded"], alone["peak_bytes"]) == (["runtime_budget"], budget["figure"])
    # Nobody converts weights for vllm with mlx-lm.
    assert "quantize" not in str(larger["checks"][0]["remedies"])


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


@pytest.mark.parametrize(
    "settings",
    [
        {"cache_type": "q8_0,f16", "batch_size": 4096},
        {"cache_type_k": "q8_0", "cache_type_v": "q8_0", "gpu_layers": 2, "host_memory": "64GB"},
        {"flash_attn": False, "all_logits": True, "n_cpu_moe": 1, "host_memory": "64GB"},
        {"kv_unified": True, "swa_full": True, "gpu_layers": "all"},
    ],
)
def test_the_gate_takes_what_llama_cpp_is_started_with(
    memfit: Memfit, folder: Path, settings: dict[str, object]
) -> None:
    entry = recorded()["qwen3moe"]
    path = write(folder / "model.gguf", entry.metadata, entry.tensors)
    keys = {"path": str(path), "device": "rtx-4090", "workload": {"context": 8192, "batch": 2}}
    limits = {"peak": "1GB", "basis": "bound"}
    write_policy(folder, judged=target(limits, runtime="llama.cpp", **keys, **settings))
    options = [
        part
        for name, value in settings.items()
        for part in (
            [f"--no-{name.replace('_', '-')}"]
            if value is False
            else [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        )
    ]
    asked = ("--runtime", "llama.cpp", "--device", "rtx-4090", "--context", "8192", "--batch", "2")
    estimate = memfit(path, *asked, *options, "--json").json
    (judged,) = memfit("gate", "--format", "json").json["targets"]
    assert judged["checks"][0]["figure"] == estimate["peak_bytes"]


def test_a_runtimes_own_key_needs_its_runtime(memfit: Memfit, folder: Path) -> None:
    write_policy(
        folder,
        nobody=target({"peak": "1GB"}, model=SAMPLE, cache_type="q8_0"),
        other=target({"peak": "1GB"}, model=SAMPLE, runtime="mlx-lm", gpu_layers=2),
    )
    run = memfit("gate")
    assert run.code == 2
    assert "cache_type: name the runtime that it is of" in run.err
    assert "other.gpu_layers: mlx-lm has no such setting; give --runtime llama.cpp" in run.err
