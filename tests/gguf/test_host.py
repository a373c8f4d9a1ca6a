"""llama.cpp between a GPU and its host: both memories decide, and both speeds."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.machine.host import Gpu, Memory, linux_from
from tests.cli.running import Memfit
from tests.gguf.writing import recorded, write

MODELS = recorded()
SAMPLES = Path(__file__).parents[2] / "sample_configs"
MIXTURE = ("estimate", SAMPLES / "gpt-oss-120b.yaml", "--runtime", "llama.cpp")
CARD = (*MIXTURE, "--device", "rtx-4090")
ON_HOST = (*CARD, "--n-cpu-moe", "99")
GIB = 2**30


def host_of(answer: dict[str, Any]) -> dict[str, Any]:
    """What is on the host."""
    found: dict[str, Any] = answer["memories"][1]
    assert found["name"] == "host"
    return found


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """A GGUF file of Qwen3-30B-A3B's widths and three layers."""
    entry = MODELS["qwen3moe"]
    return write(tmp_path / "model.gguf", entry.metadata, entry.tensors)


@pytest.mark.parametrize(
    ("options", "verdict", "exceeded", "code"),
    [
        ((), "unknown", [], 3),
        pytest.param(("--host-memory", "64GiB"), "tight", [], 0, marks=pytest.mark.exhaustive),
        pytest.param(("--host-memory", "96"), "fits", [], 0, marks=pytest.mark.exhaustive),
        (("--host-memory", "32GB"), "exceeds", ["host_memory"], 1),
    ],
)
def test_the_verdict_is_of_both_memories(
    memfit: Memfit, options: tuple[str, ...], verdict: str, exceeded: list[str], code: int
) -> None:
    run = memfit(*ON_HOST, *options, "--json")
    assert (run.code, run.json["verdict"], run.json["exceeded"]) == (code, verdict, exceeded)
    held = host_of(run.json)["total_bytes"]
    assert 62e9 < held < 63e9
    first = " ".join(memfit(*ON_HOST, *options).out.split("\n\n")[0].split())
    assert f"{-(-held // 10**8) / 10} GB" in first
    assert ("Nothing to change" in first) == (verdict == "fits")
    # A page tries other settings, which takes seconds.
    for form in ("markdown", "html") if verdict == "fits" else ("markdown",):
        text = memfit(*ON_HOST, *options, "--format", form).out
        assert f"{-(-held // 10**8) / 10} GB" in text
        assert ("Nothing to change" in text) == (verdict == "fits")


@pytest.mark.exhaustive(daily=True)
def test_a_host_of_unknown_size_leaves_nothing_decided(memfit: Memfit) -> None:
    run = memfit(*ON_HOST, "--json")
    assert run.json["actions"] == []
    assert {row["context_tokens"] for row in run.json["grid"]["rows"]} == {0}
    assert run.json["recommendation"]["context_tokens"]["value"] is None
    assert "--host-memory" in run.json["recommendation"]["context_tokens"]["reason"]
    assert "give --host-memory SIZE" in " ".join(memfit(*ON_HOST).out.split())
    plan = memfit("plan", "context", *ON_HOST[1:])
    assert (plan.code, plan.err.count("\n"), "give --host-memory" in plan.err) == (3, 1, True)
    given = memfit("plan", "context", *ON_HOST[1:], "--host-memory", "96GB", "--json")
    assert (given.code, given.json["verdict"]) == (0, "fits")
    # Everything that can be on the GPU is there: the size of the host is no question.
    whole = memfit("estimate", SAMPLES / "qwen3-8b-4bit.yaml", *CARD[2:], "--json").json
    assert (whole["verdict"], host_of(whole)["memory_bytes"]) == ("fits", None)


def test_each_tensor_is_placed_with_its_own_bits(memfit: Memfit) -> None:
    answer = memfit(*ON_HOST, "--json").json
    parts, gpu = answer["components"]["weights"]["by_part"], answer["memories"][0]
    on_gpu = sum(parts[name] for name in ("attention", "head", "router", "norm"))
    assert gpu["weights_bytes"] == on_gpu == 3_096_849_024
    assert host_of(answer)["weights_bytes"] == parts["experts"] + parts["embedding"]
    assert gpu["weights_bytes"] == answer["components"]["weights"]["resident_bytes"]


def test_what_is_on_the_host_is_read_at_its_bandwidth(memfit: Memfit) -> None:
    def speed(*options: str) -> dict[str, Any]:
        found: dict[str, Any] = memfit(*CARD, "--json", *options).json["decode_speed"]
        return found

    whole, none = speed(), speed("--gpu-layers", "0")
    some = speed("--gpu-layers", "18")
    most = [each["most_tokens_per_second"] for each in (whole, some, none)]
    assert most == sorted(most, reverse=True)
    assert most[0] > 5 * most[2]
    assert "host_bytes_per_step" not in whole
    # All that a token reads, at two channels of DDR5-5600.
    assert none["host_bytes_per_step"] == none["bytes_per_step"]
    assert none["bandwidth_bytes_per_second"] == 89_600_000_000
    slower = speed("-ngl", "0", "--host-bandwidth", "44.8GB/s")
    assert slower["most_tokens_per_second"] == pytest.approx(most[2] / 2, abs=0.1)
    # Of the experts a token reads those that are chosen.
    experts = speed("--n-cpu-moe", "all")["host_bytes_per_step"]
    by_part = memfit(*CARD, "--json").json["components"]["weights"]["by_part"]
    assert experts == by_part["experts"] * 4 // 128
    assert "with a host of 89.6 GB/s" in " ".join(memfit(*ON_HOST).out.split())


def test_what_does_not_fit_a_card_is_divided_by_the_printed_command(
    memfit: Memfit, mixture: Path
) -> None:
    asked = ("estimate", mixture, "--device", "rtx-3070", "--context", "96k", "-np", "8")
    for host, verdict in (("64GB", "fits"), (None, "unknown")):
        given = ("--host-memory", host) if host else ()
        answer = memfit(*asked, *given, "--json").json
        action = next(each for each in answer["actions"] if each.get("host_bytes"))
        assert (answer["verdict"], action["verdict"]) == ("exceeds", verdict)
        (command,) = action["commands"]
        program, *flags = shlex.split(command)
        assert program == "llama-server"
        # The command as it is printed, on a host with the memory that is printed.
        size = host or str(action["host_memory_bytes"])
        where = ("--device", "rtx-3070", "--host-memory", size, "--json")
        back = memfit("estimate", *flags, *where)
        assert (back.code, back.json["verdict"]) == (0, "fits")
        assert back.json["needed_bytes"] == action["needed_bytes"]
        assert host_of(back.json)["total_bytes"] == action["host_bytes"]


@pytest.mark.parametrize(
    ("model", "device", "name"),
    [
        pytest.param("gpt-oss-120b", "rtx-4090", "host_experts", marks=pytest.mark.exhaustive),
        ("qwen3-30b-a3b-4bit", "rtx-3070", "host_experts"),
        pytest.param("llama-3.1-70b", "rtx-4090", "gpu_layers", marks=pytest.mark.exhaustive),
    ],
)
def test_the_division_has_the_most_on_the_gpu(
    memfit: Memfit, model: str, device: str, name: str
) -> None:
    flags = {"host_experts": "--n-cpu-moe", "gpu_layers": "--gpu-layers"}
    asked = (
        *("estimate", SAMPLES / f"{model}.yaml", "--runtime", "llama.cpp", "--device", device),
        *("--host-memory", "256GB", "--json"),
    )
    (action,) = [each for each in memfit(*asked).json["actions"] if each.get("host_bytes")]
    assert list(action["settings"]) == [name]
    chosen = action["settings"][name]

    def verdict(layers: int) -> str:
        return str(memfit(*asked, flags[name], str(layers)).json["verdict"])

    assert (verdict(chosen), action["verdict"]) == ("fits", "fits")
    assert verdict(chosen + (1 if name == "gpu_layers" else -1)) != "fits"


def test_another_runtime_names_the_division_of_llama_cpp(memfit: Memfit) -> None:
    run = memfit("estimate", MIXTURE[1], "--device", "rtx-4090", "--json")
    (action,) = run.json["actions"]
    assert (action["runtime"], action["verdict"], action["commands"]) == (
        "llama.cpp",
        "unknown",
        [],
    )
    layers = str(action["settings"]["host_experts"])
    back = memfit(*CARD, "--n-cpu-moe", layers, "--json").json
    assert (back["needed_bytes"], host_of(back)["total_bytes"]) == (
        action["needed_bytes"],
        action["host_bytes"],
    )
    assert "llama.cpp fits with the experts of" in " ".join(
        memfit("estimate", MIXTURE[1], "--device", "rtx-4090").out.split()
    )


def test_a_host_that_is_too_small_too_has_no_command(memfit: Memfit, mixture: Path) -> None:
    asked = ("estimate", mixture, "--device", "rtx-3070", "--context", "800k", "--no-flash-attn")
    run = memfit(*asked, "--host-memory", "1GB", "--json")
    assert run.code == 1
    assert not [each for each in run.json["actions"] if each.get("host_bytes")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--device", "m4-max-64"), "--host-memory: m4-max-64 has one memory"),
        (("--device", "dgx-spark"), "--host-memory: dgx-spark has one memory"),
        ((), "--host-memory: no device is named"),
        (("--device", "rtx-4090", "--host-bandwidth", "fast"), "--host-bandwidth: 'fast'"),
    ],
)
def test_a_host_that_there_is_not_is_refused_in_one_line(
    memfit: Memfit, options: tuple[str, ...], message: str
) -> None:
    run = memfit(*MIXTURE, *options, "--host-memory", "64GB")
    assert (run.code, run.out, run.err.count("\n")) == (2, "", 1)
    assert message in run.err


def test_a_gpu_that_shares_its_memory_has_to_hold_both(memfit: Memfit) -> None:
    shared = memfit(*MIXTURE, "--device", "jetson-orin-64", "--n-cpu-moe", "all", "--json")
    assert (shared.code, shared.json["verdict"]) == (1, "exceeds")
    assert shared.json["exceeded"] == ["memory"]
    run = memfit(*MIXTURE, "--device", "dgx-spark", "--n-cpu-moe", "all")
    assert "with the host 66.1 GB of 128.0 GB" in " ".join(run.out.split())


def test_the_host_of_this_machine_has_the_memory_that_is_there() -> None:
    card = Gpu("NVIDIA GeForce RTX 4090", Memory(24 * GIB, 0))
    device = linux_from(Memory(64 * GIB, GIB), None, (card,))
    assert (device.has_host, device.host_memory_bytes) == (True, 64 * GIB)
    contained = linux_from(Memory(64 * GIB, GIB), 32 * GIB, (card,))
    assert contained.host_memory_bytes == 32 * GIB
    spark = linux_from(Memory(128 * GIB, GIB), None, (Gpu("NVIDIA GB10", None),))
    assert (spark.has_host, spark.host_memory_bytes) == (False, None)


def test_the_gate_and_compare_judge_as_the_estimate(
    memfit: Memfit, mixture: Path, tmp_path: Path
) -> None:
    answer = memfit("estimate", mixture, "--device", "rtx-3090", "--json").json
    compared = memfit("compare", mixture, mixture, "--device", "rtx-3090", "--json").json
    assert {each["verdict"] for each in compared["models"]} == {answer["verdict"]} == {"fits"}
    policy = {
        "schema": "memfit.policy/1",
        "targets": {
            "card": {
                "model": str(mixture),
                "device": "rtx-3090",
                "workload": {"context": 4096},
                "limits": {"peak": "90%"},
            }
        },
    }
    path = tmp_path / "memfit.yaml"
    path.write_text(json.dumps(policy))
    report = memfit("gate", "--policy", path, "--format", "json")
    assert (report.code, report.json["targets"][0]["status"]) == (0, "passed")


def test_tensors_are_on_the_host_whose_names_match(memfit: Memfit, tmp_path: Path) -> None:
    entry = MODELS["qwen3moe"]
    path = write(tmp_path / "model.gguf", entry.metadata, entry.tensors)
    where = ("estimate", path, "-c", "4k", "--device", "rtx-3090", "--json")
    gpu, host = memfit(*where, "-ot", r"blk\.1\.ffn_.*_exps=CPU").json["memories"]
    all_gpu, all_host = memfit(*where).json["memories"]
    moved = sum(t.nbytes for t in entry.tensors if "blk.1." in t.name and "_exps." in t.name)
    assert moved > 0
    assert all_gpu["weights_bytes"] - gpu["weights_bytes"] == moved
    assert host["weights_bytes"] - all_host["weights_bytes"] == moved
    assert (
        memfit(*where, "--cpu-moe").json["memories"]
        == memfit(*where, "--n-cpu-moe", "all").json["memories"]
    )
    # The first pattern that is found decides.
    kept = memfit(*where, "-ot", r"_exps=CUDA0,blk\.1\.ffn_.*_exps=CPU").json["memories"]
    assert kept[0]["weights_bytes"] == all_gpu["weights_bytes"]


def test_caches_can_be_on_the_host(memfit: Memfit, tmp_path: Path) -> None:
    entry = MODELS["qwen35"]
    path = write(tmp_path / "model.gguf", entry.metadata, entry.tensors)
    where = ("estimate", path, "-c", "8k", "--device", "rtx-3090", "--json")
    all_gpu, all_host = memfit(*where).json["memories"]
    data = memfit(*where, "--no-kv-offload").json
    gpu, host = data["memories"]
    assert (gpu["cache_bytes"], gpu["state_bytes"]) == (0, 0)
    assert host["cache_bytes"] == all_gpu["cache_bytes"] > all_host["cache_bytes"] == 0
    assert host["state_bytes"] == all_gpu["state_bytes"] > 0
    assert gpu["weights_bytes"] == all_gpu["weights_bytes"]
    line = f"llama-server -m {path} -c 8192 -np 1 -ngl 99 -fa on -nkvo"
    pasted = memfit("estimate", "--from", line, "--device", "rtx-3090", "--json").json
    assert [each["cache_bytes"] for each in pasted["memories"]] == [0, host["cache_bytes"]]


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("(a+)+=CPU", 2, "a group that is repeated is not read"),
        ("(a=CPU", 2, "not a pattern"),
        ("ffn", 2, "expected PATTERN=CPU"),
        ("=CPU", 2, "expected PATTERN=CPU"),
        ("ffn=CUDA1", 3, "on the first GPU"),
        (",".join(["a=CPU"] * 65), 2, "at most 64 patterns"),
    ],
)
def test_a_wrong_override_is_refused_in_one_line(
    memfit: Memfit, mixture: Path, text: str, code: int, message: str
) -> None:
    run = memfit("estimate", mixture, "-ot", text)
    assert run.code == code
    assert message in run.err
    assert "--override-tensor" in run.err
    assert run.err.count("\n") == 1
