"""``memfit tune cache``: a real model through the whole command, and every error."""

from pathlib import Path

import pytest

from tests.checkpoints import Checkpoints
from tests.cli.running import Memfit
from tests.cli.test_bad_input import assert_one_line

pytest.importorskip("mlx_lm", reason="the models that run are mlx-lm's")
SHORT = ("--max-tokens", "2", "--timeout", "60", "--agreement", "0")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_HOME", str(tmp_path / "home"))


@pytest.mark.exhaustive
def test_caches_are_stored_restored_and_restored_again(
    memfit: Memfit, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder = tmp_path / "caches"
    folder.mkdir()
    # DeepSeek's class cannot use a quantised cache as it is.
    model = ("tune", "cache", checkpoints("mla"), "--prompt-tokens", "30", "--dir", folder)
    result = memfit(*model, *SHORT, "--stored-bits", "16,8", "--json").json
    [conversation] = result["conversations"]
    full, eight = conversation["stored"]
    [restore] = full["restores"]
    assert restore["agreement"]["identical"]
    assert (full["quantised_layers"], eight["exact_layers"]) == (0, 0)
    status = {each["way"]: each["status"] for each in eight["restores"]}
    assert status.pop("as-stored") == "failed"
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


BAD = {
    "no tokens": (("--prompt-tokens", "0"), "a prompt needs at least 1 token"),
    "a word": (("--prompt-tokens", "many"), "--prompt-tokens: 'many'"),
    "unknown bits": (("--prompt-tokens", "9", "--stored-bits", "7"), "stored bits 7: MLX stores"),
    "nothing to compare": (("--prompt-tokens", "9", "--max-tokens", "0"), "at least 1 token"),
    "no directory": (("--prompt-tokens", "9", "--dir", "no/where"), "no/where: cannot be written"),
    "a file": (("--prompt-tokens", "9", "--dir", "file"), "file: is not a directory"),
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
    (tmp_path / "file").touch()
    ran = memfit("tune", "cache", checkpoints("no-tokenizer"), *words)
    assert_one_line(ran, 2, text)
