"""``memfit plan experts``, ``offload`` and ``static`` as commands, and bad input to all plans."""

from pathlib import Path

import pytest

from tests.cli.running import Memfit
from tests.cli.test_bad_input import assert_one_line

ROOT = Path(__file__).parents[2]
SAMPLES, EXAMPLES = ROOT / "sample_configs", ROOT / "docs" / "examples"
NEXT = SAMPLES / "qwen3-next-80b-a3b-4bit.yaml"
LITE = SAMPLES / "deepseek-v2-lite.yaml"
DENSE = SAMPLES / "qwen3-8b-4bit.yaml"
LLAMA = SAMPLES / "llama-3.1-8b.yaml"
PROFILE = SAMPLES / "plans" / "experts-deepseek-v2-lite.json"
AGENTS = SAMPLES / "plans" / "agents.csv"
TINY, TRACE = EXAMPLES / "tiny-qwen3.json", EXAMPLES / "tiny-qwen3.trace.json"
LITE_4BIT = (LITE, "--quantize", "4")


def test_experts_are_planned_as_json(memfit: Memfit) -> None:
    run = memfit("plan", "experts", NEXT, "--memory", "32GB", "--capacity", "160", "--json")
    assert (run.code, run.json["capacity"]) == (0, 208)
    assert [row["capacity"] for row in run.json["rows"]] == [160, 208]
    assert run.json["rows"][1]["weight_bytes"] == 19_023_924_736


def test_a_profile_gives_coverage_and_capacities_by_layer(memfit: Memfit) -> None:
    options = ("--memory", "8GB", "--profile", PROFILE, "--bandwidth", "3.5GB/s")
    data = memfit("plan", "experts", *LITE_4BIT, *options, "--json").json
    chosen = next(row for row in data["rows"] if row["capacity"] == data["capacity"])
    assert chosen["misses"]["basis"] == "derived"
    assert len(data["adaptive"]["capacities"]) == 26
    assert data["adaptive"]["expert_bytes"] <= chosen["expert_bytes"]
    assert data["adaptive"]["misses"]["coverage_percent"] > chosen["misses"]["coverage_percent"]
    assert chosen["misses"]["disk_microseconds_per_token"] > 0


@pytest.mark.parametrize("form", ["table", "markdown"])
def test_an_expert_plan_is_a_readable_table(memfit: Memfit, form: str) -> None:
    options = ("--memory", "32GB", "--plot", "--format", form)
    run = memfit("plan", "experts", NEXT, *options)
    assert run.code == 0
    assert "Keep 208 of 512 experts" in run.out
    assert "Memory and coverage by experts" in run.out
    plot = run.out[run.out.index("Memory and coverage") :]
    assert plot.count("│") >= 9
    assert "working set 26.8 GB" in plot


@pytest.mark.parametrize(
    ("model", "is_said"), [("deepseek-v3-4bit", True), ("qwen3-8b-4bit", False)]
)
def test_a_latent_cache_in_4_bits_is_said_to_be_dequantised_first(
    memfit: Memfit, model: str, is_said: bool
) -> None:
    for bits in ("4", "16"):
        plan = memfit("plan", "offload", model, "--stored-bits", bits, "--json").json
        codes = {note["code"] for note in plan["notes"]}
        assert ("dequantised-first" in codes) == (is_said and bits == "4")


def test_without_a_device_there_is_a_table_and_no_verdict(memfit: Memfit) -> None:
    run = memfit("plan", "experts", NEXT, "--json")
    if run.json["device"] is None:
        assert (run.code, run.json["capacity"], run.json["regimes"]) == (0, None, [])
    assert len(run.json["rows"]) >= 8


def test_a_capacity_that_does_not_start_exits_with_1(memfit: Memfit) -> None:
    run = memfit("plan", "experts", *LITE_4BIT, "--memory", "8GB")
    assert run.code == 1
    assert "during start-up; does not fit" in " ".join(run.out.split())


def test_conversations_are_planned_as_json(memfit: Memfit) -> None:
    options = ("--memory", "32GB", "--tokens", "18000", "--disk", "100GB", "--read", "3.5GB/s")
    data = memfit("plan", "offload", *LITE_4BIT, *options, "--json").json
    asked = next(row for row in data["sizes"] if row["tokens"] == 18_000)
    assert asked["plain_bytes"] == 18_000 * 276_480
    assert asked["four_bit_bytes"] == 18_000 * 77_760
    assert data["restore"]["streaming_bytes"] < data["restore"]["bulk_bytes"]
    assert data["times"]["save_ms"] is None
    assert data["times"]["load_ms"] == 404


def test_requests_are_simulated(memfit: Memfit) -> None:
    options = ("--cache-budget", "1GB", "--disk", "1GB", "--requests", AGENTS)
    run = memfit("plan", "offload", LLAMA, "--quantize", "4", "--tokens", "8k", *options, "--json")
    found = run.json["simulation"]
    assert found["requests"] == 48
    assert found["agents"] == 6
    assert min(found["hot"], found["warm"], found["cold"]) > 0
    assert found["largest_hot_bytes"] <= 10**9
    policies = {each["policy"]: each for each in run.json["policies"]}
    assert policies["reactive"]["simulation"] == found
    assert policies["proactive"]["simulation"]["hot"] == 0
    assert policies["hybrid"]["threshold_tokens"] == run.json["threshold"]["tokens"]
    assert policies["hybrid"]["simulation"]["hot"] <= found["hot"]
    assert found["largest_disk_bytes"] * 6 <= 5 * 10**9


@pytest.mark.parametrize("form", ["table", "markdown"])
def test_a_conversation_plan_is_a_readable_table(memfit: Memfit, form: str) -> None:
    options = ("--memory", "16GB", "--tokens", "8k", "--plot", "--format", form)
    run = memfit("plan", "offload", LLAMA, "--quantize", "4", "--requests", AGENTS, *options)
    assert run.code == 0
    for text in ("stay in memory", "hot threshold", "Found in memory", "conversations by tokens"):
        assert text in run.out


def test_conversations_that_never_fit_exit_with_1(memfit: Memfit) -> None:
    run = memfit("plan", "offload", LLAMA, "--cache-budget", "1MB")
    assert run.code == 1
    assert "0 of 8 conversations" in run.out


def test_a_static_plan_can_use_a_recorded_trace(memfit: Memfit) -> None:
    run = memfit("plan", "static", TINY, "--trace", TRACE, "--context", "2k", "--json")
    assert (run.code, run.json["capacity_tokens"]) == (0, 2048)
    assert run.json["arena_bytes"] >= run.json["lower_bound_bytes"] > 0
    placed = run.json["placements"]
    assert max(each["offset"] + each["nbytes"] for each in placed) == run.json["arena_bytes"]


def test_a_static_plan_records_a_trace_where_mlx_is_installed(
    memfit: Memfit, tmp_path: Path
) -> None:
    pytest.importorskip("mlx_lm", reason="the graph is recorded by MLX")
    saved = tmp_path / "trace.json"
    options = ("--context", "2k", "--save-trace", saved)
    fresh = memfit("plan", "static", TINY, *options, "--json").json
    again = memfit("plan", "static", TINY, "--context", "2k", "--trace", saved, "--json").json
    assert fresh == again
    kept = memfit("plan", "static", TINY, "--context", "2k", "--trace", TRACE, "--json").json
    assert fresh["arena_bytes"] == kept["arena_bytes"]


@pytest.mark.parametrize("form", ["table", "markdown"])
def test_a_static_plan_is_a_readable_table(memfit: Memfit, form: str) -> None:
    options = ("--trace", TRACE, "--plot", "--format", form)
    run = memfit("plan", "static", TINY, *options)
    assert run.code == 0
    assert "RoPE tables" in run.out
    assert "while loading" in run.out
    assert "The arena by call: " in run.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("experts", NEXT, "--bandwidth", "3Gb/s"), "--bandwidth"),
        (("experts", NEXT, "--bandwidth", "0GB/s"), "--bandwidth"),
        (("experts", NEXT, "--bandwidth", "fast"), "--bandwidth"),
        (("experts", NEXT, "--capacity", "many"), "--capacity"),
        (("experts", NEXT, "--capacity", "9"), "capacity 9"),
        (("experts", NEXT, "--capacity", ""), "--capacity"),
        (("experts", NEXT, "--context", "0"), "prompt tokens 0"),
        (("experts", NEXT, "--profile", "none.json"), "none.json: no such file"),
        (("experts", LITE, "--profile", AGENTS), "not JSON"),
        (("experts", "none/"), "no such path"),
        (("offload", LLAMA, "--tokens", "0"), "0 tokens"),
        (("offload", LLAMA, "--tokens", "1.5"), "--tokens"),
        (("offload", LLAMA, "--conversations", "0"), "0 conversations"),
        (("offload", LLAMA, "--stored-bits", "5"), "5 bits"),
        (("offload", LLAMA, "--stored-group-size", "63"), "group size 63"),
        (("offload", LLAMA, "--cache-budget", "4G"), "--cache-budget"),
        (("offload", LLAMA, "--disk", "much"), "--disk"),
        (("offload", LLAMA, "--read", "3.5gb"), "--read"),
        (("offload", LLAMA, "--prefill-speed", "0"), "prefill"),
        (("offload", LLAMA, "--prefill-speed", "-4"), "prefill"),
        (("offload", LLAMA, "--requests", PROFILE), "a request trace is a .csv"),
        (("context", DENSE, "--contexts", "4k,many"), "--contexts: 'many' is not a count"),
        (("context", DENSE, "--contexts", "0"), "must be at least 1"),
        (("context", DENSE, "--requests", "5000"), "at most 4096"),
        (("context", DENSE, "--traffic", "none.csv"), "none.csv"),
        (("context", DENSE, "--ceiling", "0"), "--ceiling"),
        (("context", DENSE, "--runtime", "other"), "no runtime is called 'other'"),
        (("growth", DENSE, "--tokens", "4k", "--turns", "2"), "give --tokens, or --turns with"),
        (("growth", DENSE, "--turns", "2"), "give --tokens, or --turns with --turn-tokens"),
        (("growth", DENSE, "--tokens", "4k", "--prefix", "4k"), "below the session's 4096 tokens"),
        (("growth", DENSE, "--sessions", "0"), "sessions 0: must be from 1"),
        (("growth", DENSE, "--tokens", "8k", "--context", "4k"), "exceed the context of 4096"),
        (("growth", DENSE, "--budget", "64G"), "is not a size"),
        (("growth", DENSE, "--runtimes", "vllm,other"), "no runtime is called 'other'"),
        (("server", DENSE, "--prompt-concurrency", "0"), "--prompt-concurrency 0"),
        (("server", DENSE, "--decode-concurrency", "2000"), "--decode-concurrency 2000"),
        (("server", DENSE, "--prompt-cache-size", "-1"), "--prompt-cache-size -1"),
        (("server", DENSE, "--prompt-cache-bytes", "lots"), "--prompt-cache-bytes"),
        (("server", DENSE, "--clients", "0"), "--clients 0"),
        (("server", DENSE, "--max-tokens", "many"), "--max-tokens"),
        (("server", DENSE, "--context", "100k"), "model's context"),
        (("server", DENSE, "--traffic", "none.csv"), "none.csv"),
        (("static", TINY, "--trace", TINY), "tiny-qwen3.json: schema: expected memfit.trace"),
        (("static", TINY, "--trace", "none.json"), "none.json: no such file"),
        (("static", LLAMA, "--trace", TRACE), "the trace is of qwen3"),
        (("static", TINY, "--trace", TRACE, "--context", "0"), "prompt tokens 0"),
    ],
)
def test_bad_input_gives_a_one_line_error(
    memfit: Memfit, arguments: tuple[str | Path, ...], message: str
) -> None:
    assert_one_line(memfit("plan", *arguments), 2, message)


def test_a_model_without_experts_exits_with_3(memfit: Memfit) -> None:
    assert_one_line(memfit("plan", "experts", LLAMA), 3, "no layer has routed experts")
