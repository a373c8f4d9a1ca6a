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


TRACE = """agent,prompt_tokens,completion_tokens
planner,60,4
coder,90,3
planner,80,2
reviewer,30,1
coder,100,0
planner,40,3
"""


@pytest.mark.exhaustive
def test_requests_are_served_and_compared_with_the_plan(
    memfit: Memfit, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    trace, folder = tmp_path / "trace.csv", tmp_path / "caches"
    trace.write_text(TRACE)
    folder.mkdir()
    model = checkpoints("sliding")
    room = ("--cache-budget", "300kB", "--disk", "1MB", "--requests", trace)
    stored = ("--stored-bits", "8", "--prompt-tokens", "40", "--dir", folder)
    result = memfit("tune", "cache", model, *SHORT, *stored, *room, "--json").json
    served, answer = result["replay"], result["answer"]
    assert (served["differences"], result["report"]) == ([], [])
    assert served["peak_bytes"] <= served["planned_peak_bytes"]
    assert (answer["conversations"], answer["hot_bytes"]) == (3, 300_000)
    assert answer["hot_threshold_tokens"] % 256 in (0, 40)
    [file] = result["conversations"][0]["stored"]
    assert file["held_bytes"] == file["planned_held_bytes"]
    for restore in file["restores"]:
        assert restore["peak_bytes"] <= restore["planned_peak_bytes"]
    # Only the files of the prompt stay.
    assert len(list(folder.iterdir())) == 2
    plan = memfit("plan", "offload", model, "--stored-bits", "8", *room, "--json").json
    untimed = ("read_bytes", "written_bytes", "read_ms", "write_ms", "prefill_ms")
    for name in set(plan["simulation"]) - {*untimed, "uncached_prefill_ms"}:
        assert plan["simulation"][name] == served["measured"][name]
    first = ("--conversations", "1")
    shown = memfit("tune", "cache", model, *SHORT, *stored, *room, *first)
    assert "Served under a budget" in shown.out, shown.err
    assert "3, 1" in shown.out


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
    (tmp_path / "trace.csv").write_text("prompt_tokens,completion_tokens\n1,1\n")
    request = '{"agent": "a", "prompt_tokens": 1, "completion_tokens": 1}'
    (tmp_path / "one.jsonl").write_text(request)
    ran = memfit("tune", "cache", checkpoints("no-tokenizer"), *words)
    assert_one_line(ran, 2, text)
