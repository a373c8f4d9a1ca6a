"""Runtimes on the command line: estimates under each, side by side, and the table of runtimes."""

from pathlib import Path

import pytest

from tests.cli.running import Memfit

SAMPLES = Path(__file__).parents[2] / "sample_configs"
DENSE = SAMPLES / "qwen3-8b-4bit.yaml"
HYBRID = SAMPLES / "qwen3-next-80b-a3b-4bit.yaml"
TOKEN = 147_456  # Qwen3-8B, 16 bits: 36 layers x 8 heads x 2 x 128 x 2 bytes
NAMES = [
    "mlx-lm",
    "mlx-swift-lm",
    "mlx-vlm",
    "lm-studio",
    "mlx-moe",
    "agent-memory",
    "zinc",
    "foundry",
    "llama.cpp",
    "ollama",
    "vllm",
]


@pytest.mark.parametrize(
    ("runtime", "tokens", "token_bytes", "kv_bytes"),
    [
        ("mlx-lm", 3072, TOKEN, 3072 * TOKEN),
        ("mlx-swift-lm", 3072, TOKEN, 3072 * TOKEN),
        # 4 bits with a scale and bias for 64: 9/32 of 16 bits.
        ("agent-memory", 3072, TOKEN * 9 // 32, 3072 * TOKEN * 9 // 32),
        # float32 and a page table of 4 bytes a token, exactly as long as the context.
        ("zinc", 3000, 2 * TOKEN + 4, 3000 * (2 * TOKEN + 4)),
        ("foundry", 4096, TOKEN, 4096 * TOKEN),
        ("llama.cpp", 3072, TOKEN, 3072 * TOKEN),
        ("vllm", 3008, TOKEN, 3008 * TOKEN),
    ],
)
def test_each_runtime_allocates_by_its_own_rule(
    memfit: Memfit, runtime: str, tokens: int, token_bytes: int, kv_bytes: int
) -> None:
    run = memfit("estimate", DENSE, "--context", "3000", "--runtime", runtime, "--json")
    kv = run.json["components"]["kv"]
    assert run.json["runtime"]["name"] == runtime
    assert kv["allocated_tokens"] == tokens
    assert kv["bytes_per_token"] == token_bytes
    assert kv["bytes"] == kv_bytes


def test_each_runtime_has_its_own_defaults(memfit: Memfit) -> None:
    work = memfit("estimate", DENSE, "--runtime", "agent-memory", "--json").json["workload"]
    assert (work["kv_bits"], work["quantized_kv_start"]) == (4, 0)
    work = memfit("estimate", DENSE, "--runtime", "mlx-swift-lm", "--json").json["workload"]
    assert (work["prefill_step"], work["quantized_kv_start"]) == (512, 0)


@pytest.mark.exhaustive
def test_parts_of_a_peak_add_up_under_every_runtime(memfit: Memfit) -> None:
    for name in NAMES:
        data = memfit("estimate", HYBRID, "--memory", "64GB", "--runtime", name, "--json").json
        parts = data["components"]
        total = parts["weights"]["resident_bytes"]
        total += sum(parts[part]["bytes"] for part in ("kv", "ssm", "workspace"))
        assert total == data["peak_bytes"], name


def test_zincs_reserve_and_the_correct_one_are_shown_together(memfit: Memfit) -> None:
    run = memfit("estimate", HYBRID, "--context", "32k", "--runtime", "zinc")
    text = " ".join(run.out.split())
    assert "zinc charges its cache to all 48 layers: 6.5 GB" in text
    assert "where those that attend need 1.7 GB" in text
    assert "zinc charges" not in memfit("estimate", DENSE, "--runtime", "zinc").out


def test_mlx_moe_keeps_208_experts_on_32_gb(memfit: Memfit) -> None:
    # mlx-moe's published runs: 208 of 512 on a 32 GB Mac.
    run = memfit("estimate", HYBRID, "--memory", "32GB", "--runtime", "mlx-moe", "--json")
    notes = {note["code"]: note["message"] for note in run.json["notes"]}
    assert notes["expert-capacity"] == "mlx-moe keeps 208 of 512 experts a layer: 17.7 GB"
    lookup = 48 * 512 * 8
    expected = 1_357_516_288 + 208 * 48 * 1_769_472 + lookup
    # Small tensors are rounded by the allocator, 32,768 bytes in all.
    assert run.json["components"]["weights"]["resident_bytes"] == expected + 32_768


def test_mlx_moes_own_capacity_is_shown_with_the_correct_one(memfit: Memfit) -> None:
    text = " ".join(
        memfit("estimate", HYBRID, "--memory", "64GB", "--runtime", "mlx-moe", "-v").out.split()
    )
    assert "mlx-moe keeps 448 of 512 experts a layer" in text
    assert "mlx-moe's own capacity is 456, 679.5 MB more than 71 %" in text


def test_the_swift_guide_is_compared_with_the_bytes(memfit: Memfit) -> None:
    run = memfit(
        "estimate", DENSE, "--context", "8k", "--kv-bits", "4", "--runtime", "mlx-swift-lm"
    )
    text = " ".join(run.out.split())
    assert "guide states 302.0 MB of cache at 4 bits; with scales and biases it is 339.8 MB" in text


def test_foundry_uses_its_environment_variables(
    memfit: Memfit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METALLIC_PREFILL_CHUNK_SIZE", "64")
    run = memfit("estimate", DENSE, "--runtime", "foundry", "--json")
    assert run.json["workload"]["prefill_step"] == 64
    monkeypatch.setenv("METALLIC_PREFILL_CHUNK_SIZE", "some")
    run = memfit("estimate", DENSE, "--runtime", "foundry")
    assert run.code == 2
    assert run.err == "memfit: METALLIC_PREFILL_CHUNK_SIZE: 'some' is not a whole number\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--runtime", "zinc", "--kv-bits", "8"), "zinc quantises its cache to these: none"),
        (("--runtime", "vllm", "--kv-bits", "4"), "vllm quantises its cache to these: 8"),
        (("--runtime", "mlx-moe"), "mlx-moe needs the same number of experts"),
        (("--runtime", "foundry", "--max-kv-size", "512"), "no rotating cache"),
    ],
)
def test_an_option_a_runtime_lacks_is_not_supported(
    memfit: Memfit, arguments: tuple[str, ...], message: str
) -> None:
    run = memfit("estimate", DENSE, *arguments)
    assert run.code == 3
    assert message in run.err
    assert run.err.count("\n") == 1


def test_all_runtimes_are_shown_side_by_side(memfit: Memfit) -> None:
    run = memfit("compare", HYBRID, "--runtimes", "all", "--memory", "64GB", "--json")
    assert run.code == 0
    assert [model["label"] for model in run.json["models"]] == NAMES
    assert [model["runtime"]["name"] for model in run.json["models"]] == NAMES
    (kv,) = (figure for figure in run.json["figures"] if figure["name"] == "kv_per_token")
    assert (
        kv["values"][NAMES.index("zinc")]["value"] == 8 * 24_576 + 4
    )  # twice as wide, in four times the layers


def test_a_runtime_that_does_not_support_the_model_states_why(memfit: Memfit) -> None:
    run = memfit("compare", DENSE, "--runtimes", "all")
    assert run.code == 0
    assert "5: Qwen3-8B-4bit: mlx-moe needs the same number of experts" in run.out
    assert memfit("compare", DENSE, "--runtimes", "mlx-lm,mlx-moe").code == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((DENSE, HYBRID, "--runtimes", "all"), "give one model"),
        ((DENSE, "--runtimes", "other"), "no runtime is called 'other'"),
        ((DENSE, "--runtimes", "vllm,vllm"), "a runtime is given twice"),
    ],
)
def test_runtimes_are_selected_by_name(
    memfit: Memfit, arguments: tuple[str | Path, ...], message: str
) -> None:
    run = memfit("compare", *arguments)
    assert run.code == 2
    assert message in run.err


def test_a_matrix_can_be_combined_with_runtimes(memfit: Memfit) -> None:
    run = memfit("compare", DENSE, "--runtimes", "zinc,vllm", "--matrix", "context=4k,8k", "--json")
    cells = run.json["matrix"]["cells"]
    assert [(cell["model"], cell["settings"]["context"]) for cell in cells] == [
        ("zinc", 4096),
        ("vllm", 4096),
        ("zinc", 8192),
        ("vllm", 8192),
    ]


def test_every_runtime_has_a_row_with_a_source(memfit: Memfit) -> None:
    data = memfit("runtimes", "--json").json
    assert [row["name"] for row in data["runtimes"]] == NAMES
    out = memfit("runtimes").out
    assert out.count("  source: ") == len(NAMES)
    assert "known to be wrong: its automatic context is never below 4096 tokens" in out


def test_no_context_above_the_runtimes_own_limit_is_recommended(
    memfit: Memfit, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("estimate", DENSE, "--runtime", "foundry", "--memory", "64GB", "--json")
    unlimited = memfit(*arguments).json["recommendation"]
    monkeypatch.setenv("METALLIC_MAX_CONTEXT_LEN", "3000")
    limited = memfit(*arguments).json["recommendation"]
    limited, unlimited = limited["context_tokens"], unlimited["context_tokens"]
    assert limited["value"] == 3000 // 256 * 256 < unlimited["value"]
    assert limited["reason"] == "2816 tokens fit; foundry is set to at most 3000"
    plot = memfit(*arguments, "--plot").json["curve"]
    assert plot[-1]["context_tokens"] == 3000


def test_a_context_beyond_the_runtimes_own_limit_ends_with_exit_code_1(
    memfit: Memfit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METALLIC_MAX_CONTEXT_LEN", "1024")
    arguments = (DENSE, "--runtime", "foundry", "--memory", "64GB")
    assert memfit("estimate", *arguments, "--context", "1024").code == 0
    beyond = memfit("estimate", *arguments, "--context", "4k")
    assert (beyond.code, "foundry stops before 4096 tokens" in beyond.out) == (1, True)
    assert memfit("plan", "context", *arguments).code == 1
    growth = memfit("plan", "growth", *arguments[:1], "--runtimes", "foundry", "--tokens", "4k")
    assert "foundry stops at 1024 tokens" in growth.out


def test_a_runtimes_limit_above_the_models_changes_nothing(
    memfit: Memfit, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("estimate", DENSE, "--runtime", "foundry", "--memory", "64GB", "--json")
    unlimited = memfit(*arguments).json["recommendation"]
    monkeypatch.setenv("METALLIC_MAX_CONTEXT_LEN", "999999999")
    assert memfit(*arguments).json["recommendation"] == unlimited


def test_models_are_compared_under_one_runtime(
    memfit: Memfit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METALLIC_MAX_CONTEXT_LEN", "3000")
    run = memfit("compare", DENSE, HYBRID, "--runtime", "foundry", "--context", "2500", "--json")
    assert run.json["runtime"]["name"] == "foundry"
    assert [model["runtime"] for model in run.json["models"]] == [None, None]
    (kv,) = (figure for figure in run.json["figures"] if figure["name"] == "kv")
    assert kv["values"][0]["value"] == 3072 * TOKEN  # doubled, but no more than the longest
