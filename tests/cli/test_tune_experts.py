"""``memfit tune experts``: a real model through the whole command, and every error."""

import json
import shutil
from pathlib import Path

import pytest

from tests.checkpoints import SENTENCES, Checkpoints
from tests.cli.running import Memfit
from tests.cli.test_bad_input import assert_one_line

pytest.importorskip("mlx_lm", reason="the models that run are mlx-lm's")
pytestmark = pytest.mark.usefixtures("home")
PROMPTS = ("--prompts", SENTENCES[0])
SHORT = ("--max-tokens", "2", "--timeout", "60")


@pytest.mark.exhaustive
def test_one_capacity_is_measured_and_its_profile_planned_with(
    memfit: Memfit, checkpoints: Checkpoints, tmp_path: Path, home: Path
) -> None:
    path, profile = checkpoints("moe"), tmp_path / "profile.json"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(SENTENCES))
    ran = memfit(
        *("tune", "experts", path, "--prompts", prompts, "--held-out", SENTENCES[1], *SHORT),
        *("--capacity", "3", "--slowdown", "99", "--save-profile", profile, "--json"),
    )
    assert ran.code in (0, 1), ran.err
    result = ran.json
    [point] = result["points"]
    assert (point["capacity"], point["status"]) == (3, "measured")
    assert point["weights"]["planned_bytes"] == point["weights"]["measured_bytes"]
    assert point["agreement"]["identical"]
    assert point["decode"]["uses"] > 0
    saved = json.loads(profile.read_text())
    assert saved["num_prompts"] == len(SENTENCES)
    assert saved["num_tokens"] == result["profiled_tokens"]
    planned = memfit("plan", "experts", path, "--profile", profile, "--capacity", "3", "--json")
    assert planned.json["rows"][0]["misses"]["basis"] == "derived"
    assert "counts-prompts" not in {note["code"] for note in planned.json["notes"]}
    assert planned.json["measured"][0]["capacity"] == 3
    stored = memfit("plan", "experts", path, "--capacity", "3")
    assert "the profile is of memfit tune experts" in stored.out.replace("\n  ", " ")
    assert "3 experts, load: start-up" in stored.out
    [measurement] = (home / "measurements").glob("*.json")
    assert json.loads(measurement.read_text())["experts"]["capacity"] == 3
    listed = memfit("measurements", "list")
    assert "3 experts, load" in listed.out
    # A run with a part of the experts says nothing about the whole model.
    assert "measured" not in memfit("estimate", path, "--context", "20", "--device", "host").out


@pytest.mark.exhaustive
def test_recorded_routing_is_replayed_as_it_was_measured(
    memfit: Memfit, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    path, record = checkpoints("moe"), tmp_path / "routing.json"
    ran = memfit(
        *("tune", "experts", path, *PROMPTS, "--max-tokens", "6", "--timeout", "60"),
        *("--capacity", "3,4", "--record", record, "--json"),
    )
    assert ran.code in (0, 1), ran.err
    plan = ("plan", "experts", path, "--capacity", "3,4", "--routing", record)
    result = memfit(*plan, "--bandwidth", "1GB/s", "--json").json
    replayed = {each["capacity"]: each for each in result["replayed"] if each["policy"] == "pinned"}
    assert set(replayed) == {2, 3, 4, 5, 6}
    for point in ran.json["points"]:
        decode, found = point["decode"], replayed[point["capacity"]]
        assert found["misses_per_token"] == round(decode["misses"] / decode["tokens"], 3)
        assert found["reads_per_token"] == round(decode["reads"] / decode["tokens"], 3)
    assert replayed[6]["misses_per_token"] == 0
    shown = memfit(*plan, "--bandwidth", "1GB/s", "--device", "m4-max-64", "--speed", "50")
    assert "for 50 tokens/s at least these experts by policy: static 2" in shown.out
    assert "Recorded routing, replayed, per token" in shown.out
    assert_one_line(memfit(*plan, "--speed", "50"), 2, "--speed needs --bandwidth")
    without = memfit("plan", "experts", path, "--speed", "50")
    assert_one_line(without, 2, "--speed needs --routing")


@pytest.mark.exhaustive
def test_swapping_as_mlx_moe_is_measured(memfit: Memfit, checkpoints: Checkpoints) -> None:
    ran = memfit(
        *("tune", "experts", checkpoints("moe"), *PROMPTS, "--max-tokens", "8"),
        *("--capacity", "2", "--policy", "swap", "--agreement", "0", "--json"),
    )
    assert ran.code in (0, 1), ran.err
    [point] = ran.json["points"]
    assert ran.json["policy"] == "swap"
    assert point["decode"]["misses"] > 0
    assert point["decode"]["read_bytes"] > 0
    assert point["agreement"]["tokens"] == 8


@pytest.mark.exhaustive
def test_every_part_of_the_answer_is_shown(
    memfit: Memfit, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    path, pack = shutil.copytree(checkpoints("moe"), tmp_path / "model"), tmp_path / "pack"
    words = ("tune", "experts", path, *PROMPTS, *SHORT, "--prepack", pack, "--capacity")
    ran = memfit(*words, "2,3", "--plot", "--agreement", "0", "--slowdown", "99", "--wired")
    assert ran.code in (0, 1), ran.err
    for text in ("Memory", "Agreement", "Offloading", "Prepacked", "identical"):
        assert text in ran.out
    notes = ran.out.replace("\n  ", " ")
    assert "2 experts of each layer are packed: the fewest that are fast enough" in notes
    backend = "Metal" if "2, wired" in ran.out else "the wired limit would be"
    assert backend == "Metal" or f"2 experts: {backend}" in notes
    again = memfit(*words, "2", "--json").json
    assert again["warm"]["directory"] == str(pack)
    assert again["warm"]["agreement"]["identical"]
    packed = [note["message"] for note in again["notes"] if note["code"] == "packed"]
    assert packed == ["2 experts of each layer are packed: those packed before"]
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    changed = memfit(*words, "2")
    assert_one_line(changed, 2, "model.safetensors: has changed since")


BAD = {
    "a missing file": (("--prompts", "@nowhere.txt"), "nowhere.txt: no such file"),
    "a word": (
        ("--prompts", "hi"),
        "--prompts: hi: no such file; a value without a space is a file",
    ),
    "an empty file": (("--prompts", "empty.txt"), "empty.txt has no prompt"),
    "a file of other bytes": (("--prompts", "binary.txt"), "binary.txt: not UTF-8 text, at byte 0"),
    "no tokens": ((*PROMPTS, "--max-tokens", "0"), "--max-tokens: generate at least 1 token"),
    "a word for a capacity": ((*PROMPTS, "--capacity", "many"), "--capacity: 'many'"),
    "no directory": ((*PROMPTS, "--prepack", "no/where/at"), "cannot be written"),
    "no folder": ((*PROMPTS, "--save-profile", "no/where/at"), "cannot be written"),
    "a full directory": ((*PROMPTS, "--prepack", "."), "exists; remove it"),
}


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
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    ran = memfit("tune", "experts", checkpoints("moe"), *words)
    assert_one_line(ran, 2, text)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["binary.txt", "empty.txt"]


@pytest.mark.parametrize(
    ("name", "words", "code", "text"),
    [
        ("moe", ("--capacity", "0"), 2, "capacity 0: this model routes a token to 2 of 6 experts"),
        ("moe", ("--capacity", "1"), 2, "give 2 to 6"),
        ("moe", ("--capacity", "7"), 2, "give 2 to 6"),
        ("dense", (), 2, "no layer has routed experts"),
    ],
)
def test_what_does_not_fit_the_model_is_one_line(
    memfit: Memfit,
    checkpoints: Checkpoints,
    name: str,
    words: tuple[str, ...],
    code: int,
    text: str,
) -> None:
    ran = memfit("tune", "experts", checkpoints(name), *PROMPTS, *words)
    assert_one_line(ran, code, text)


@pytest.mark.exhaustive
def test_no_room_for_any_capacity_is_one_line(memfit: Memfit, checkpoints: Checkpoints) -> None:
    words = ("--capacity", "2,3", "--memory-limit", "1MB", *SHORT)
    ran = memfit("tune", "experts", checkpoints("moe"), *PROMPTS, *words)
    assert_one_line(ran, 5, "2 experts: estimated to need 65.4 MB, and 1.0 MB are free")


@pytest.mark.exhaustive
def test_a_run_that_ends_with_an_error_says_nothing_about_offloading(
    memfit: Memfit, checkpoints: Checkpoints
) -> None:
    words = ("--capacity", "2", "--policy", "fail", *SHORT, "--json")
    ran = memfit("tune", "experts", checkpoints("moe"), *PROMPTS, *words)
    assert (ran.code, ran.json["answer"]["pays"]) == (0, None)
    assert "which has no slot" in ran.json["points"][0]["reason"]


def test_a_folder_with_the_name_of_a_subcommand_is_given_as_a_path(
    memfit: Memfit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = memfit("tune", "./experts", "--prompt-tokens", "8")
    assert_one_line(ran, 2, "experts")
    assert "memfit tune experts" in memfit("tune", "experts", "--help").out
