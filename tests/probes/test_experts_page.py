"""The worked example of docs/tune-experts.md: its commands run, and print what the page shows.

``python -m tests.probes.test_experts_page`` runs them again and rewrites the page. Times differ
from run to run, so the test leaves out every part of an output that has one.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import (
    SENTENCES,
    VOCABULARY,
    config_of,
    plant_routers,
    save_tokenizer,
    save_weights,
)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tune-experts.md"
COMMAND = (sys.executable, "-c", "from memfit.cli.__main__ import main; main()")
SIZES = {"n_routed_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 5}
_BLOCK = re.compile(r"^```text\n\$ memfit ([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TIME = re.compile(r"/s\b| m?s\b|slower|mlx-lm \d|[0-9a-f]{8}-[0-9a-f]{8}")
_PROGRESS = re.compile(r"^memfit: .* so far\n", re.MULTILINE)  # on a slow machine
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)( [kM]?B\b)?")
_UNITS = {"": 1, " B": 1, " kB": 10**3, " MB": 10**6}


def save(folder: Path) -> None:
    """Create the model and the prompts of the page."""
    import mlx.core as mx
    from mlx_lm.utils import quantize_model, save_config

    from tests.oracle import Oracle

    config = config_of("glm4_moe_lite") | SIZES | {"hidden_size": 128, "vocab_size": VOCABULARY}
    config |= {"torch_dtype": "bfloat16", "eos_token_id": 1}
    mx.random.seed(0)
    oracle = Oracle(config)
    plant_routers(oracle)
    oracle.model, config = quantize_model(oracle.model, config, 32, 4)
    save_weights(folder / "moe", oracle.tensors())
    save_config(config, folder / "moe" / "config.json")
    save_tokenizer(folder / "moe", has_chat_template=False)
    (folder / "prompts.txt").write_text("\n".join(SENTENCES[:2]))
    (folder / "held-out.txt").write_text(SENTENCES[2])


def outputs(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield each command of the page, what the page shows, and what it prints now."""
    save(folder)
    environment = {**os.environ, "MEMFIT_HOME": str(folder / "home"), "COLUMNS": "100"}
    for words, shown in _BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        ran = subprocess.run(
            [*COMMAND, *shlex.split(words)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        yield words, shown, _PROGRESS.sub("", re.sub(r" +$", "", ran.stdout, flags=re.MULTILINE))
        (folder / "moe" / "model.safetensors").touch()  # the next command sees a changed source


def without_times(text: str) -> tuple[list[str], list[float]]:
    """Return the words and the numbers of what has no time."""
    kept = "\n".join(part for part in text.split("\n\n") if not _TIME.search(part))
    values = [float(number) * _UNITS[unit] for number, unit in _NUMBER.findall(kept)]
    return _NUMBER.sub("#", kept).split(), values


@pytest.mark.exhaustive
def test_the_page_shows_what_its_commands_print(tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm", reason="the model that runs is mlx-lm's")
    ran = list(outputs(tmp_path))
    assert len(ran) == 3
    compared = 0
    for words, shown, printed in ran:
        (expected, figures), (found, now) = without_times(shown), without_times(printed)
        assert found == expected, words
        assert now == pytest.approx(figures, rel=0.1), words
        compared += len(figures)
    assert compared > 70


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        fresh = {words: printed for words, _, printed in outputs(Path(directory))}
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(
        _BLOCK.sub(lambda m: f"```text\n$ memfit {m[1]}\n{fresh[m[1]]}```", text), encoding="utf-8"
    )
