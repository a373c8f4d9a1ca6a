"""``memfit tune cache``: a real model through the whole command, and every error.

``python -m tests.cli.test_tune_cache`` writes a fresh run of the example into its page.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from msgspec import convert

from memfit.cli.render.output import rendered
from memfit.cli.render.view import view_of
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import Units
from memfit.probes.disk import create_directory
from memfit.probes.prompt_caches.planned import COUNTED
from memfit.probes.prompt_caches.result import CacheTuneResult
from tests.checkpoints import Checkpoints
from tests.cli.running import Memfit
from tests.cli.test_bad_input import assert_one_line

pytest.importorskip("mlx_lm", reason="the models that run are mlx-lm's")
pytestmark = pytest.mark.usefixtures("home")
ROOT = Path(__file__).parents[2]
SHORT = ("--max-tokens", "2", "--timeout", "60", "--agreement", "0")


@pytest.mark.exhaustive
def test_caches_are_stored_restored_and_restored_again(
    memfit: Memfit, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "caches"
    # DeepSeek's class cannot use a quantised cache as it is.
    model = ("tune", "cache", checkpoints("mla"), "--prompt-tokens", "30", "--dir", folder)
    result = memfit(*model, *SHORT, "--stored-bits", "16,8", "--json").json
    [conversation] = result["conversations"]
    full, eight = conversation["stored"]
    [restore] = full["restores"]
    assert restore["agreement"]["identical"]
    assert (full["quantised_layers"], eight["exact_layers"]) == (0, 0)
    # Quantising is inside the clock of a store.
    assert full["quantise_ns"] == 0 < eight["quantise_ns"] < eight["write_ns"]
    status = {each["way"]: each["status"] for each in eight["restores"]}
    assert status.pop("as-stored") == "failed"
    assert "dequantised-first" in {note["code"] for note in result["notes"]}
    assert status == dict.fromkeys(("bulk", "freeing", "lazy"), "measured")
    assert result["answer"]["bits"] == 8
    assert min(result["answer"][f"{tier}_conversations"] for tier in ("hot", "warm")) > 0
    files = sorted(folder.iterdir())
    assert len(files) == 4
    stored = ("--stored-bits", "8", "--stored-group-size", str(eight["group_size"]))
    plan = ("plan", "offload", checkpoints("mla"), *stored, "--json", "--tokens")
    planned = memfit(*plan, "30").json
    bulk = next(each for each in eight["restores"] if each["way"] == "bulk")
    assert planned["restore"]["basis"] == "measured"
    assert planned["restore"]["bulk_bytes"] == bulk["peak_bytes"]
    assert planned["measured"]["measurement_id"] == conversation["measurement_id"]
    assert planned["times"]["times_faster"] is not None
    other = memfit(*plan, "31", "--read", "1GB/s").json
    assert (other["restore"]["basis"], other["speeds"]["read"]) == ("derived", 10**9)
    assert other["speeds"]["write"] == planned["speeds"]["write"]
    shown = memfit("measurements", "show", conversation["measurement_id"])
    assert "cache stored in 16, 8 bits" in " ".join(shown.out.split())
    assert "freeing" in shown.out
    again = memfit(*model, *SHORT, "--stored-bits", "16")
    assert again.code == 0, again.err
    for text in ("Stored", "Restored", "as-stored", "2 of 2", "files stay in"):
        assert text in again.out
    assert sorted(folder.iterdir()) == files
    file = next(each for each in files if each.name.endswith("8bit.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    damaged = memfit(*model, *SHORT)
    assert_one_line(damaged, 2, f"{file.name}: is cut short or was changed")


PAGE = ROOT / "docs" / "tune-cache.md"
EXAMPLE = re.compile(
    r"(?<=```text\n)\$ memfit (tune cache [^\n]*)\n(.*?)(?=^```)", re.DOTALL | re.M
)
MODEL = "path/to/model"


def example() -> tuple[list[str], str]:
    """Return the words of the page's command, and what it shows."""
    found = EXAMPLE.search(PAGE.read_text(encoding="utf-8"))
    assert found
    return shlex.split(found[1]), found[2]


def table(text: str, title: str) -> list[str]:
    """Return the rows of a table that are the same in each run: without times and peaks."""
    rows = text[text.index(f"\n{title}\n") :].split("\n\n")[0].splitlines()
    untimed = (re.sub(r"\d[\d.]* m?s\b", "time", row) for row in rows if "─" not in row)
    return [" ".join(row.split()) for row in untimed if not row.startswith("Peak ")]


@pytest.mark.exhaustive
@pytest.mark.parametrize("eviction", ["proactive", "hybrid"])
def test_every_policy_of_eviction_is_served_as_planned(
    memfit: Memfit, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, eviction: str
) -> None:
    monkeypatch.chdir(ROOT)
    words, _ = example()
    changed = {MODEL: str(checkpoints("sliding")), "256,1024": "256"}
    command = [changed.get(word, word) for word in words]
    result = memfit(*command, "--eviction", eviction, "--json").json
    served, planned = result["replay"], result["replay"]["planned"]
    assert (served["policy"], served["differences"]) == (eviction, [])
    assert served["measured"]["hot"] == planned["hot"]
    assert (served["threshold_tokens"] is None) == (eviction == "proactive")
    if eviction == "proactive":
        assert served["measured"]["hot"] == 0 < served["measured"]["warm"]


@pytest.mark.exhaustive
def test_requests_are_served_as_planned_and_as_the_page_shows(
    memfit: Memfit, checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    words, shown = example()
    model = checkpoints("sliding")
    # The shorter prompt is enough: the requests are the same.
    changed = {MODEL: str(model), "256,1024": "256"}
    command = [changed.get(word, word) for word in words]
    result = memfit(*command, "--dir", tmp_path, "--json").json
    typed = convert(result, CacheTuneResult)
    text = rendered(view_of(typed, units=Units.GB), "table", to_file=False)
    for title in ("Stored", "Served under a budget"):
        assert set(table(text, title)) <= set(table(shown, title))
    served, answer = result["replay"], result["answer"]
    assert (served["differences"], result["report"]) == ([], [])
    assert served["peak_bytes"] <= served["planned_peak_bytes"]
    assert (answer["conversations"], answer["hot_bytes"]) == (3, 900_000)
    assert answer["hot_threshold_tokens"] == 256
    for conversation in result["conversations"]:
        for file in conversation["stored"]:
            assert file["held_bytes"] == file["planned_held_bytes"]
            for restore in file["restores"]:
                assert restore["peak_bytes"] <= restore["planned_peak_bytes"]
    assert "two requests, restored" in text
    assert result["trials"]["saves"] > 0
    # Only the files of the prompts stay.
    assert len([path for path in tmp_path.iterdir() if path.name != "home"]) == 4
    room = command[command.index("--requests") :]
    plan = memfit("plan", "offload", model, "--stored-bits", "8", *room, "--json").json
    for name in COUNTED:
        assert plan["simulation"][name] == served["measured"][name]


BAD = {
    "no requests": (("--prompt-tokens", "9", "--requests", "none.csv"), "none.csv: no such file"),
    "requests in another format": (
        ("--prompt-tokens", "9", "--requests", "file"),
        "file: a request trace is a .csv or a .jsonl file",
    ),
    "requests without agents": (
        ("--prompt-tokens", "9", "--requests", "trace.csv"),
        "trace.csv:1: the header must name agent",
    ),
    "no conversations": (("--prompt-tokens", "9", "--conversations", "0"), "0 conversations"),
    "more conversations than there are": (
        ("--prompt-tokens", "9", "--conversations", "2", "--requests", "one.jsonl"),
        "2 conversations: the requests have 1",
    ),
    "no size": (("--prompt-tokens", "9", "--cache-budget", "much"), "--cache-budget: "),
    "no disk": (("--prompt-tokens", "9", "--disk", "4G/s"), "--disk: "),
    "no tokens": (("--prompt-tokens", "0"), "a prompt needs at least 1 token"),
    "a word": (("--prompt-tokens", "many"), "--prompt-tokens: 'many'"),
    "unknown bits": (("--prompt-tokens", "9", "--stored-bits", "7"), "stored bits 7: MLX stores"),
    "nothing to compare": (("--prompt-tokens", "9", "--max-tokens", "0"), "at least 1 token"),
    "no directory": (
        ("--prompt-tokens", "9", "--dir", "file/where"),
        "file/where: cannot be written",
    ),
    "a file": (("--prompt-tokens", "9", "--dir", "file"), "file: is not a directory"),
}


def test_a_folder_of_stored_caches_is_created(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "caches"
    for _ in range(2):
        create_directory(folder)
    assert folder.is_dir()
    with pytest.raises(InputError, match="cannot be written"):
        create_directory(Path("/proc/new"))


@pytest.mark.parametrize(("words", "text"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_before_anything_is_loaded(
    memfit: Memfit,
    checkpoints: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "trace.csv").write_text("prompt_tokens,completion_tokens\n1,1\n")
    request = '{"agent": "a", "prompt_tokens": 1, "completion_tokens": 1}'
    (tmp_path / "one.jsonl").write_text(request)
    ran = memfit("tune", "cache", checkpoints("no-tokenizer"), *words)
    assert_one_line(ran, 2, text)


def rewrite() -> None:
    """Run the page's command, and write what it prints into the page."""
    words, shown = example()
    with tempfile.TemporaryDirectory() as name:
        model = Checkpoints(Path(name))("sliding")
        command = [str(model) if word == MODEL else word for word in words]
        environment = {**os.environ, "MEMFIT_HOME": f"{name}/home", "COLUMNS": "100"}
        main = (sys.executable, "-m", "memfit")
        ran = subprocess.run((*main, *command), env=environment, stdout=subprocess.PIPE, check=True)
    fresh = "".join(f"{line.rstrip()}\n" for line in ran.stdout.decode().splitlines())
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text.replace(shown, fresh.replace(str(model), MODEL)), encoding="utf-8")


if __name__ == "__main__":
    rewrite()
