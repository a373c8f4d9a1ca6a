"""The first screen of an estimate at four widths, and no line wider than the terminal anywhere.

`python -m tests.cli.test_first_screen` writes the screens again; look at the difference.
"""

from pathlib import Path

import pytest

from memfit.estimators.checkpoint.local.samples import read_sample
from memfit.estimators.machine.host import detect_host
from tests.gguf.writing import recorded, write
from tests.models import write_config
from tests.selection import quick
from tests.test_docs import run

SAMPLES = Path(__file__).parents[2] / "sample_configs"
SCREENS = Path(__file__).parent / "screens"
WIDTHS = (60, 80, 100, 140)
LINES = 24  # of a screen with 80 columns
# A model and options.
CASES = {
    "fits": "qwen3-4b-4bit.yaml --device m4-max-64",
    "no-device": "qwen3.5-35b-a3b.yaml",
    "does-not-fit": "qwen3.5-35b-a3b.yaml --memory 32GB",
    "smaller-step": "qwen3.5-35b-a3b.yaml --memory 32GB --quantize 4 --context 64k",
    "tight-as-it-is": "qwen3-30b-a3b-4bit.yaml --memory 24GB",
    "tight-with-kv-bits": "qwen3-8b-4bit.yaml --memory 8GB --context 8k",
    "tight": "qwen3.5-35b-a3b.yaml --memory 32GB --quantize 5",
    "larger-mac": "qwen3-next-80b-a3b-4bit.yaml --memory 32GB",
    "kv-bits": "qwen3-4b-4bit.yaml --memory 8GB --context 32k",
    "hybrid": "falcon-h1-7b.yaml --memory 16GB",
    "no-mac": "kimi-k2-4bit.yaml --memory 512GB --context 128k",
    "gguf": "qwen3.gguf --memory 8GB",
    "cuda": "llama-3.2-3b.yaml --device rtx-4090 --max-tokens 500 --batch 2",
    **{
        f"under-{name}": f"qwen3-30b-a3b-4bit.yaml --memory 24GB --context 32k --runtime {name}"
        for name in ("mlx-swift-lm", "mlx-vlm", "mlx-moe", "agent-memory", "zinc", "llama.cpp")
    },
}
# One of each verdict, without a machine, with a conversion, with two memories, of a file.
QUICK_CASES = ("fits", "no-device", "does-not-fit", "tight-with-kv-bits", "gguf", "cuda")
COMMANDS = (
    "estimate sample_configs/gpt-oss-20b.yaml --memory 16GB -v --explain --plot",
    "compare sample_configs/qwen3-4b-4bit.yaml --runtimes all --memory 32GB",
    "compare sample_configs/qwen3-4b-4bit.yaml sample_configs/qwen3-8b-4bit.yaml --memory 8GB"
    " --matrix context=4k,32k --matrix kv-bits=none,8,4 --plot",
    "plan growth sample_configs/qwen3-4b-4bit.yaml --memory 32GB --turns 3 --turn-tokens 2k --plot",
    "plan context sample_configs/qwen3-4b-4bit.yaml --memory 32GB --contexts 8k,64k",
    "plan experts sample_configs/qwen3-next-80b-a3b-4bit.yaml --memory 32GB",
    "plan offload sample_configs/qwen3-4b-4bit.yaml --memory 32GB",
    "plan request --used 5000 --requested 5000 --capacity 8k",
    "plan wired sample_configs/plans/wired-server.yaml --plot",
    "fits --device m4-max-64 --context 32k",
    "fits --memory 8GB",
    "devices",
    "runtimes",
)


def gguf_file(folder: Path) -> Path:
    """Write a GGUF file of a real model's metadata and tensors, without their data."""
    entry = recorded()["qwen3"]
    return write(folder / "qwen3.gguf", entry.metadata, entry.tensors)


def screen(case: str, gguf: Path, width: int) -> str:
    folder = gguf.parent if CASES[case].startswith(gguf.name) else SAMPLES
    out, code = run(f"memfit estimate {CASES[case]}", columns=width, folder=folder)
    assert code in (0, 1), out
    return out


def titled(case: str, gguf: Path, width: int) -> str:
    """Return a screen as it is saved."""
    return f"== {width} columns ==\n{screen(case, gguf, width)}"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return gguf_file(tmp_path)


@pytest.mark.parametrize("width", quick(WIDTHS, (80,)))
@pytest.mark.parametrize("case", quick(CASES, QUICK_CASES))
def test_the_first_screen_is_as_saved(case: str, width: int, gguf: Path) -> None:
    host = detect_host()
    if "--" not in CASES[case] and host and host.backend != "cpu":
        pytest.skip("this machine is found")
    saved = (SCREENS / f"{case}.txt").read_text(encoding="utf-8")
    title, *lines = (shown := titled(case, gguf, width)).splitlines()
    assert f"\n{shown}\n" in f"\n{saved}\n"
    assert title == f"== {width} columns =="
    assert [line for line in lines if len(line) > width] == []
    if width == 80:
        assert len(lines) <= LINES
        words = ("fits", "tight", "does not fit", "needs")
        assert any(word in " ".join(lines[:2]) for word in words)


@pytest.mark.parametrize("width", quick(WIDTHS, (80,)))
def test_a_doubt_about_the_weights_is_on_the_first_screen(tmp_path: Path, width: int) -> None:
    config = read_sample(SAMPLES / "llama-3.1-8b.yaml").config
    write_config(tmp_path / "Llama-3.1-8B-NVFP4", config)
    command = "memfit estimate ./Llama-3.1-8B-NVFP4 --memory 16GB"
    out, code = run(command, columns=width, folder=tmp_path)
    lines = out.splitlines()
    assert code == 1
    assert "the name says NVFP4, and the config declares no" in " ".join(
        " ".join(lines[:8]).split()
    )
    assert out.count("NVFP4, and") == 1
    if width == 80:
        assert len(lines) <= LINES


@pytest.mark.parametrize(
    "command",
    # The fits commands take seconds.
    [
        pytest.param(command, marks=pytest.mark.exhaustive if command.startswith("fits") else ())
        for command in COMMANDS
    ],
)
@pytest.mark.parametrize("width", quick(WIDTHS, (60,)))
def test_no_line_is_wider_than_the_terminal(command: str, width: int) -> None:
    out, code = run(f"memfit {command}", columns=width)
    assert code in (0, 1, None), out
    assert [line for line in out.splitlines() if len(line) > width] == []


def test_no_line_of_a_gate_is_wider_than_the_terminal(tmp_path: Path) -> None:
    limits = "limits: {peak: 50%, context: 128k}"
    target = (
        f"model: {SAMPLES}/qwen3-4b-4bit.yaml, memory: 8GB, workload: {{context: 4k}}, {limits}"
    )
    policy = f"schema: memfit.policy/1\ntargets:\n  one: {{{target}}}\n"
    (tmp_path / "memfit.yaml").write_text(policy, encoding="utf-8")
    for width in WIDTHS:
        out, code = run("memfit gate", columns=width, folder=tmp_path)
        assert code == 1, out
        assert all(len(line) <= width for line in out.splitlines())


if __name__ == "__main__":
    import tempfile

    SCREENS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            text = "\n".join(titled(name, gguf_file(Path(folder)), width) for width in WIDTHS)
            (SCREENS / f"{name}.txt").write_text(text, encoding="utf-8")
