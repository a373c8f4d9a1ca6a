"""The names that people type: of models, sizes and options, as other programs have them."""

from pathlib import Path

import pytest

from tests.cli.running import Memfit, Run
from tests.models import QWEN3_4B, write_config
from tests.selection import quick

SAMPLE = "qwen3-4b-4bit"
FAST = ("--method", "formula", "--json")


def answer(run: Run) -> object:
    """What is answered, without how it was asked."""
    assert run.code in (0, 1), run.err
    return {name: value for name, value in run.json.items() if name != "model"}


@pytest.mark.parametrize("name", [SAMPLE, "Qwen3-4B-4bit"])
def test_a_model_needs_no_command_and_a_sample_no_path(memfit: Memfit, name: str) -> None:
    asked = memfit("estimate", SAMPLE, "--memory", "8GB", *FAST)
    assert asked.json["model"]["source"] == "sample"
    for words in ([name, "--memory", "8GB"], ["--memory", "8GB", "--model", name]):
        assert memfit(*words, *FAST).out == asked.out


def test_the_name_of_a_command_is_the_command(memfit: Memfit, tmp_path: Path) -> None:
    write_config(Path("devices"), QWEN3_4B)
    assert "m4-max-64" in memfit("devices").out
    assert memfit("./devices", *FAST).json["model"]["id"] == "devices"


def test_a_folder_takes_precedence_over_a_sample(memfit: Memfit) -> None:
    write_config(Path(SAMPLE), QWEN3_4B)
    assert memfit(SAMPLE, *FAST).json["model"]["source"] == "local"


@pytest.mark.parametrize("option", ["-V", "--version"])
def test_the_version_has_a_short_option(memfit: Memfit, option: str) -> None:
    assert memfit(option).out.startswith("memfit ")


@pytest.mark.parametrize("words", [(), ("estimate",), ("plan",), ("plan", "server"), ("gate",)])
def test_the_short_option_for_help_works_at_every_level(
    memfit: Memfit, words: tuple[str, ...]
) -> None:
    assert memfit(*words, "-h").out == memfit(*words, "--help").out != ""


@pytest.mark.parametrize("size", ["32", "32G", "32g", "32GB", "32 GB", "32GiB", "34359738368"])
def test_memory_is_the_mac_that_is_sold_with_it(memfit: Memfit, size: str) -> None:
    device = memfit(SAMPLE, "--memory", size, *FAST).json["device"]
    assert (device["name"], device["memory_bytes"]) == ("Mac with 32 GiB", 32 * 2**30)


@pytest.mark.parametrize("size", ["32", "32G", "32GB"])
def test_memory_means_the_same_in_a_matrix(memfit: Memfit, size: str) -> None:
    matrix = memfit("compare", SAMPLE, "--matrix", f"memory=16GB,{size}", "--json").json["matrix"]
    estimate = memfit(SAMPLE, "--memory", "32GB", *FAST).json
    assert matrix["cells"][1]["working_set_bytes"] == estimate["device"]["working_set_bytes"]


@pytest.mark.parametrize(
    ("given", "same"),
    [
        (["--quantize", "4bit"], ["--quantize", "4"]),
        (["--quantize", "4-bit"], ["--quantize", "4"]),
        (["-q"], ["--quantize", "4"]),
        (["--q-bits", "4"], ["--quantize", "4"]),
        (["-q", "--q-bits", "8"], ["--quantize", "8"]),
        (["--q-bits", "4", "--q-group-size", "32"], ["--quantize", "4", "--group-size", "32"]),
        (["--quantize", "mxfp4"], ["--quantize", "4", "--quant-mode", "mxfp4"]),
        (["--quantize", "nvfp4"], ["--quantize", "4", "--quant-mode", "nvfp4"]),
        (["-q", "--q-mode", "mxfp8"], ["--quantize", "8", "--quant-mode", "mxfp8"]),
    ],
)
def test_a_conversion_is_named_as_mlx_lm_names_it(
    memfit: Memfit, given: list[str], same: list[str]
) -> None:
    model = ("qwen3-0.6b", "--memory", "8GB")
    assert memfit(*model, *given, *FAST).out == memfit(*model, *same, *FAST).out


@pytest.mark.parametrize(
    ("given", "same"),
    quick(
        [
            ("--prefill-step-size 512", "--prefill-step 512"),
            ("--draft-model qwen3-0.6b", "--draft qwen3-0.6b"),
            ("-md qwen3-0.6b", "--draft qwen3-0.6b"),
            (
                "--draft-model qwen3-0.6b --draft-quantize 4bit",
                "--draft qwen3-0.6b --draft-quantize 4",
            ),
            ("-c 32768", "--context 32768"),
            ("--ctx-size 32768 -np 4", "--context 8192 --batch 4"),
            ("--ctx-size 32768 --parallel 4", "--context 8192 --batch 4"),
            ("-c 32768 --parallel=4", "--context 8192 --batch 4"),
            ("-c 1000 -np 3", "--context 334 --batch 3"),
            ("-ub 256 --runtime llama.cpp", "--prefill-step 256 --runtime llama.cpp"),
            ("-ctk q8_0 -ctv q8_0 --runtime llama.cpp", "--cache-type q8_0 --runtime llama.cpp"),
            ("-ngl 99 --runtime llama.cpp", "--gpu-layers 99 --runtime llama.cpp"),
            ("--n-gpu-layers all --runtime llama.cpp", "-ngl all --runtime llama.cpp"),
            ("--max-model-len 32768", "--context 32k"),
            ("--max-model-len 32K", "--context 32k"),
            ("--max-model-len 32k", "--context 32000"),
            ("--max-model-len 25.6k", "--context 25600"),
            ("--max-num-seqs 4", "--batch 4"),
            ("-c 0", "--context model"),
            ("--max-model-len auto", "--context auto"),
            ("--tensor-parallel-size 1", ""),
            ("--tensor-parallel-size 2", "--ranks 2 --parallel tensor"),
        ],
        {
            ("-md qwen3-0.6b", "--draft qwen3-0.6b"),
            ("-c 1000 -np 3", "--context 334 --batch 3"),
            ("--max-model-len 25.6k", "--context 25600"),
        },
    ),
)
def test_an_option_of_another_program_is_translated(memfit: Memfit, given: str, same: str) -> None:
    model = (SAMPLE, "--memory", "8GB")
    expected = answer(memfit(*model, *same.split(), *FAST))
    assert answer(memfit(*model, *given.split(), *FAST)) == expected


@pytest.mark.parametrize(
    ("given", "bits"), [("auto", None), ("fp8", 8), ("fp8_e4m3", 8), ("fp8_e5m2", 8)]
)
def test_the_type_of_vllms_cache_is_translated(
    memfit: Memfit, given: str, bits: int | None
) -> None:
    vllm = (SAMPLE, "--runtime", "vllm", "--device", "h100-80", "--max-model-len", "8192", *FAST)
    run = memfit(*vllm, "--kv-cache-dtype", given, "--gpu-memory-utilization", "0.9")
    assert run.json["workload"]["kv_bits"] == bits
    share = run.json["pool"]["budget_bytes"] / run.json["device"]["memory_bytes"]
    assert share == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--kv-cache-dtype fp8", "give --runtime vllm, which has it, or --kv-bits 8"),
        ("--kv-cache-dtype fp4 --runtime vllm", "give auto or fp8, fp8_e4m3, fp8_e5m2"),
        ("--gpu-memory-utilization 0.9", "give --runtime vllm"),
        ("-ctk q8_0", "give --runtime llama.cpp"),
        ("-ngl 99", "give --runtime llama.cpp"),
        ("-ngl -1 --runtime llama.cpp", "expected a number of layers up to 4096, auto or all"),
        ("--tensor-parallel-size 2 --ranks 2", "sets the ranks: leave out their options"),
        ("--parallel auto", "llama.cpp's number of sequences is -np"),
        ("--max-model-len all", "--max-model-len: 'all' is not a number of tokens; write"),
        ("--max-model-len 1.5K", "is not a number of tokens; write"),
        ("--max-model-len 1.0001k", "not a whole number of tokens"),
        ("-c 4k --context 4k", "--context and --ctx-size both set the context: give one"),
        ("-c 4k --max-tokens 8", "--ctx-size excludes --prompt-tokens and --max-tokens"),
        (
            "--quantize fp4",
            "'fp4' is not a weight format; write bits (2, 3, 4, 5, 6, 8), or mxfp4",
        ),
        ("--quantize mxfp4 --q-mode affine", "mxfp4 and --quant-mode affine: give one"),
        ("--memory 32X", "'32X' is not a size; write it as 32GB (10^9), 32GiB (2^30)"),
        ("--batch-size 8", "--batch-size: sequences at once are --batch"),
        ("-fa on", "-fa: flash attention is on; --no-flash-attn turns it off"),
        ("--port 8080", "--port: it changes no memory that memfit counts: leave it out"),
        ("--dtype bfloat16", "--dtype: the config says it: leave it out"),
        ("--prefil-step 8", "No such option: --prefil-step; nearest: --prefill-step"),
        ("--nothing", "No such option: --nothing; memfit estimate --help shows the options"),
        ("--runtime llamacpp", "nearest: llama.cpp, ollama, vllm (memfit runtimes)"),
        ("--device m4-pro-max-64", "nearest: m4-pro-64, m4-max-64"),
        ("--model other", "MODEL and --model both name the model: give one of them"),
    ],
)
def test_what_has_no_translation_is_refused_with_the_nearest_right_input(
    memfit: Memfit, given: str, words: str
) -> None:
    run = memfit(SAMPLE, *given.split())
    assert (run.code, run.out, run.err.count("\n")) == (2, "", 1), run
    assert words in run.err


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("gpt-oss-2b", "no such path, and no sample; nearest: gpt-oss-20b"),
        ("qwen", "no such path"),
        ("https://example.org/org/name", "not an address of the Hub"),
        ("https://huggingface.co/", "names no model; write org/name"),
        ("https://huggingface.co/gpt2", "names no model; write org/name"),
        ("https://huggingface.co/org/name/tree/main/sub", "in a folder of org/name"),
        ("https://[/org/name", "not an address; write org/name"),
    ],
)
def test_a_model_that_is_not_found_is_refused_with_the_nearest(
    memfit: Memfit, reference: str, words: str
) -> None:
    run = memfit(reference)
    assert (run.code, run.err.count("\n")) == (2, 1), run
    assert words in run.err


@pytest.mark.parametrize("kind", ["datasets", "spaces", "collections", "papers"])
def test_a_page_of_the_hub_that_is_no_model_is_named(memfit: Memfit, kind: str) -> None:
    run = memfit(f"https://huggingface.co/{kind}/org/name")
    assert (run.code, "not a model; give a model's page" in run.err) == (3, True)


def test_a_first_policy_may_be_of_a_sample(memfit: Memfit) -> None:
    assert memfit("gate", "init", SAMPLE, "--device", "m4-max-64").code == 0
    assert f'model: "{SAMPLE}"' in Path("memfit.yaml").read_text(encoding="utf-8")
    assert memfit("gate", "--update").code == 0


def test_a_mistyped_option_is_one_error_in_json(memfit: Memfit) -> None:
    run = memfit(SAMPLE, "--json", "--contxt", "4k")
    assert (run.code, run.json["slug"]) == (2, "bad-input")
    assert run.json["fix"].startswith("nearest: --context")


@pytest.mark.parametrize("command", ["plan server", "plan context", "plan growth", "tune"])
def test_a_command_with_one_model_takes_it_as_an_option(memfit: Memfit, command: str) -> None:
    missing = memfit(*command.split(), *(["--prompt-tokens", "8"] if command == "tune" else []))
    assert (missing.code, "MODEL is missing; name" in missing.err) == (2, True)
    given = [*command.split(), "--model", "./gone"]
    run = memfit(*given, *(["--prompt-tokens", "8"] if command == "tune" else []))
    assert (run.code, "./gone" in run.err) == (2, True)


def test_the_help_has_every_name_of_an_option_unbroken(
    memfit: Memfit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = memfit("estimate", "--help-all").out
    for name in (
        *("--prefill-step-size", "--draft-model", "--adapter-path", "--model", "--q-bits"),
        *("--q-group-size", "--q-mode", "-c", "--ctx-size", "-ub", "-np", "-ctk", "-ctv", "-ngl"),
        *("--max-model-len", "--kv-cache-dtype", "--gpu-memory-utilization", "--max-num-seqs"),
        *("--tensor-parallel-size", "-h"),
    ):
        assert f" {name}" in text, name
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("name", ["qwen3:8b", "Qwen 3 8B", "qwen3-8b"])
def test_a_published_model_is_found_as_people_write_it(memfit: Memfit, name: str) -> None:
    run = memfit(name, "--memory", "32GB", *FAST)
    assert (run.json["model"]["id"], run.json["model"]["source"]) == ("Qwen/Qwen3-8B", "index")
    assert f"{name}: Qwen/Qwen3-8B by its published config" in memfit(name, *FAST[:2]).out


def test_a_name_of_several_sizes_lists_them_with_their_sizes(memfit: Memfit) -> None:
    run = memfit("qwen3")
    assert (run.code, run.err.count("\n")) == (2, 1)
    assert "Qwen/Qwen3-8B (8.2 B), Qwen/Qwen3-14B (14.8 B)" in run.err


def test_a_model_of_the_index_is_estimated_where_the_hub_cannot_be_reached(
    memfit: Memfit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    run = memfit("Qwen/Qwen3-8B", "--memory", "32GB", *FAST)
    assert run.json["model"]["source"] == "index"
    [note] = [note for note in run.json["notes"] if note["code"] == "checkpoint"]
    assert note["level"] == "warning"
    assert "published config" in note["message"]


def test_without_arguments_it_says_how_to_name_a_machine_and_shows_a_sample_on_each_mac(
    memfit: Memfit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memfit.estimators.machine.host.detect_host", lambda: None)
    out = memfit().out
    assert out.splitlines()[:2] == [
        "Here is no Mac and no NVIDIA GPU. Name a machine: memfit fits --device m4-max-64",
        "(memfit devices lists them), or its memory: memfit fits --memory 32GB. A sample:",
    ]
    assert "The smallest Mac that fits has 8 GB." in out


def test_without_arguments_it_lists_on_one_screen_what_fits_this_machine(
    memfit: Memfit, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memfit.estimators.machine.devices import find_device

    monkeypatch.setattr(
        "memfit.estimators.machine.host.detect_host", lambda: find_device("m1-max-32")
    )
    monkeypatch.setenv("COLUMNS", "80")
    out = memfit().out
    assert "m1-max-32: 6 models fit" in out
    assert "memfit qwen3.5-35b-a3b: what it needs, and how to run it" in out
    assert len(out.splitlines()) <= 24


def test_fits_with_a_model_is_the_estimate_of_it(memfit: Memfit) -> None:
    machine = ("--memory", "16GB", *FAST)
    assert memfit("fits", "qwen3:8b", *machine).out == memfit("qwen3:8b", *machine).out
