"""A pasted line of another program has the answer of its settings."""

import json
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memfit.estimators.base.errors import MemfitError
from memfit.estimators.questions.programs.reading import programs, read_line
from tests.cli.running import Memfit
from tests.gguf.writing import recorded, write
from tests.selection import examples, quick

QWEN = "qwen3-4b-4bit"
SERVER = f"mlx_lm.server --model {QWEN}"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    entry = recorded()["qwen3moe"]
    return write(tmp_path / "model.gguf", entry.metadata, entry.tensors)


@pytest.mark.parametrize(
    ("line", "options"),
    [
        (
            "llama-server -m {} -c 32768 -ngl 99 -fa on -b 4096 -ub 4096 -ctk q8_0 --n-cpu-moe 2",
            "--ctx-size 32768 -np 4 --kv-unified -ngl 99 -b 4096 -ub 4096 -ctk q8_0 -ncmoe 2",
        ),
        (
            "$ llama-server -m {} -np 2 -c 8192 -ngl all > log 2>&1 &",
            "--ctx-size 8192 -np 2 -ngl all",
        ),
        ("llama-server -m {} -np 1 -fit off", "--context model"),
        ("llama-server -m {} -np 1 -c 0", "--context model --gpu-layers auto"),
        ("llama-server -m {} -np 1", "--context auto --gpu-layers auto"),
        ("llama-server -m {} -no-kvu -c 8k -cmoe", None),
        (
            "LLAMA_ARG_CTX_SIZE=8192 ./build/bin/llama-cli --model {} -fa off",
            "-c 8192 --no-flash-attn --gpu-layers auto",
        ),
        (
            "llama-cli -m {} -c 4096 --swa_full --cpu-moe -ctv f16 -p hi",
            "-c 4096 --swa-full -ncmoe all -ctv f16",
        ),
    ],
)
def test_a_line_of_llama_cpp_has_the_answer_of_its_settings(
    memfit: Memfit, gguf: Path, line: str, options: str | None
) -> None:
    where = ("--device", "rtx-4090", "--host-memory", "64GB", "--json")
    pasted = memfit("--from", line.format(gguf), *where)
    if options is None:
        assert (pasted.code, "-c '8k': expected a whole number" in pasted.err) == (2, True)
        return
    asked = memfit(gguf, "--runtime", "llama.cpp", *shlex.split(options), *where)
    assert without_line(pasted.json) == asked.json


LINES = [
    (
        f"{SERVER} --prompt-concurrency 2 --temp 0.7",
        f"plan server {QWEN} --prompt-concurrency 2",
    ),
    (
        f"python -m mlx_lm.server --model={QWEN} --prefill-step 512 --max-tokens 9 --kv-bits 8",
        f"plan server {QWEN} --prefill-step-size 512 --max-tokens 9 --kv-bits 8",
    ),
    (
        f"mlx_lm.generate --model {QWEN} --kv-bits 4 --kv-group-size 32 -p 'a long prompt'",
        f"{QWEN} --prompt-tokens 4096 --max-tokens 100 --kv-bits 4 --kv-group-size 32",
    ),
    (
        f"python -m mlx_lm generate --model {QWEN} -m 7 --draft-model qwen3-0.6b",
        f"{QWEN} --prompt-tokens 4096 --max-tokens 7 --draft qwen3-0.6b",
    ),
    (
        "mlx_vlm.generate --model gemma-3-4b --image 640x480 320x200 --temperature 0.0",
        "gemma-3-4b --runtime mlx-vlm --prompt-tokens 4096 --max-tokens 2048"
        " --image 640x480 --image 320x200",
    ),
    (
        f"vllm serve {QWEN} --max-model-len 32K --gpu_memory_utilization 0.8 --port 80",
        f"{QWEN} --runtime vllm --context 32768 --gpu-memory-utilization 0.8",
    ),
    (
        f"vllm serve --model {QWEN} --max-num-seqs 64 --max-num-batched-tokens 8k",
        f"{QWEN} --runtime vllm --context model --max-requests 64 --prefill-step 8000",
    ),
]


# Of each program one line in `make test`.
@pytest.mark.parametrize(("line", "command"), quick(LINES, LINES[::2]))
def test_a_line_has_the_answer_of_its_settings(memfit: Memfit, line: str, command: str) -> None:
    machine = ("--device", "rtx-4090") if "vllm" in line else ("--memory", "16")
    asked = memfit(*shlex.split(command), *machine, "--json").json
    assert without_line(memfit("--from", line, *machine, "--json").json) == asked
    # The same without quotes, after what is memfit's own.
    assert without_line(memfit(*machine, "--json", "--", *shlex.split(line)).json) == asked


@pytest.mark.parametrize("line", [SERVER, f"python3 -m mlx_lm generate --model {QWEN}"])
def test_a_line_needs_no_quotes_and_no_command(memfit: Memfit, line: str) -> None:
    assert memfit(*shlex.split(line)).out == memfit("--from", line).out


def test_a_command_that_does_not_answer_for_a_line_names_the_one_that_does(memfit: Memfit) -> None:
    run = memfit("server", "--from", "llama-server -m x.gguf -np 2")
    assert run.code == 2
    assert "memfit server takes no --batch, --no-flash-attn" in run.err
    assert "; memfit estimate --from LINE answers for it" in run.err


def without_line(document: dict[str, Any]) -> dict[str, Any]:
    assert document.pop("program")["line"]
    return document


def test_what_is_given_beside_a_line_changes_it(memfit: Memfit, gguf: Path) -> None:
    line = f"llama-server -m {gguf} -np 1 -c 8192"
    changed = memfit("estimate", "-c", "16384", "--from", line, "--json").json
    assert changed["workload"]["prompt_tokens"] == 16384


def test_a_result_shows_the_line_and_what_of_it_changes_no_memory(
    memfit: Memfit, tmp_path: Path, gguf: Path
) -> None:
    line = f"llama-server -m {gguf} -c 8192 \\\n  --jinja --port 8080"
    told = memfit("--from", line, "--json").json["program"]
    assert (told["line"], told["ignored"]) == (
        f"llama-server -m {gguf} -c 8192 --jinja --port 8080",
        ["--jinja", "--port"],
    )
    assert told["notes"][0] == "-np is not given: 4 slots, which share one cache"
    assert "Changes no memory: --jinja --port" in memfit("--from", line).out
    for name in ("x.md", "x.html"):
        assert memfit("--from", line, "-o", tmp_path / name).code == 0
        text = (tmp_path / name).read_text()
        assert f"llama-server -m {gguf} -c 8192 --jinja --port 8080" in text.replace("\\\n", "")
    served = memfit("--from", f"{SERVER} --temp 1", "-o", tmp_path / "y.md", "--memory", "16")
    assert (served.code, f"{SERVER} --temp 1" in (tmp_path / "y.md").read_text()) == (1, True)


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("vllm serve x --foo 3 --bar -tp 2", 2, "vllm serve has no --foo, --bar (vLLM 0.33.0)"),
        ("llama-server -m x stray --no-such-flag", 2, "has no argument 'stray', --no-such-flag"),
        (
            "llama-server -m x -ncffn 2 -sm row -sm layer",
            3,
            "llama-server: -ncffn: what it keeps on the host is not described;",
        ),
        ("llama-server -c 4096", 2, "the line names no model: -m FILE, or -hf org/name:Q4_K_M"),
        ("llama-server -m x -c", 2, "llama-server -c: a value is missing"),
        ("llama-server -m x -fa maybe", 2, "-fa 'maybe': expected on, off or auto"),
        ("llama-server -m 'x", 2, "a shell does not read it: No closing quotation"),
        ("rm -rf x", 2, "'rm -rf x': not a line of llama-cli, llama-server"),
        (f"{SERVER} --prompt-concurrency two", 2, "--prompt-concurrency 'two': expected a whole"),
        (f"{SERVER} --draft-model x", 3, "--draft-model: drafts are not described for it"),
        ("mlx_vlm.server --model gemma-3-4b", 2, "--image WxH says which images"),
        (f"vllm serve {QWEN} --quantization fp8", 3, "only what a config declares is described"),
        (f"vllm serve {QWEN} --speculative-config.method x", 3, "in a way that is not described"),
    ],
)
def test_what_cannot_be_taken_is_named_at_once(
    memfit: Memfit, line: str, code: int, said: str
) -> None:
    run = memfit("--from", line)
    assert (run.code, said in run.err, run.err.count("\n")) == (code, True, 1), run.err


WORDS = sorted({flag for each in programs().values() for flag in each.flags})


@settings(max_examples=examples(300), suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(sorted(programs())),
    st.lists(st.sampled_from(WORDS) | st.text(max_size=12) | st.integers().map(str), max_size=12),
)
def test_any_line_is_read_or_refused_with_an_error(program: str, words: list[str]) -> None:
    for text in (f"{program} {' '.join(words)}", f"{program} {shlex.join(words)}"):
        with suppress(MemfitError):
            json.dumps(read_line(text).settings)
