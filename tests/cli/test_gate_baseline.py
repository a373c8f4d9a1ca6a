"""The baseline: stable bytes, rejected when damaged or newer, and never a silent pass."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.base.version import __version__
from tests.cli.gating import target, write_policy
from tests.cli.running import Memfit, validated
from tests.cli.test_bad_input import assert_one_line
from tests.models import QWEN3_4B, plain_tensors, write_config
from tests.selection import quick
from tests.sparse import write_safetensors

GROWTH = {"peak": "90%", "growth": {"peak": "0%"}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a config and a policy of two targets."""
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path / "model", QWEN3_4B)
    write_policy(tmp_path, chat=target(GROWTH), code=target(GROWTH, device="m4-max-64"))
    return tmp_path


@pytest.fixture
def locked(folder: Path, memfit: Memfit) -> Path:
    """The same directory with its baseline."""
    run = memfit("gate", "--update")
    assert (run.code, run.err) == (0, "memfit: wrote memfit.lock.json\n")
    return folder


def lock(folder: Path) -> Any:
    return json.loads((folder / "memfit.lock.json").read_text())


def test_a_baseline_has_stable_bytes_and_its_schema(memfit: Memfit, locked: Path) -> None:
    before = (locked / "memfit.lock.json").read_bytes()
    assert validated(json.loads(before))
    assert memfit("gate", "--update").code == 0
    assert (locked / "memfit.lock.json").read_bytes() == before
    write_policy(locked, code=target(GROWTH, device="m4-max-64"), chat=target(GROWTH))
    assert memfit("gate", "--update").code == 0
    assert (locked / "memfit.lock.json").read_bytes() == before


def test_a_baseline_has_the_mode_and_the_margin_that_the_policy_names(
    memfit: Memfit, folder: Path
) -> None:
    keys = {"quantize": "mxfp4", "margin": "2GB"}
    write_policy(folder, chat=target(GROWTH, **keys), code=target(GROWTH, quantize=4))
    assert memfit("gate", "--update").code == 0
    chat, code = (lock(folder)["targets"][name] for name in ("chat", "code"))
    assert (chat["quantize"], chat["asked"]["margin_bytes"]) == ("mxfp4", 2 * 10**9)
    assert code["quantize"] == 4
    assert "margin_bytes" not in code["asked"]
    # 4.25 bits against 4.5.
    assert chat["figures"]["weights_bytes"] < code["figures"]["weights_bytes"]
    for entry, margin in ((chat, 2 * 10**9), (code, 64 * 10**6)):
        figures = entry["figures"]
        assert figures["wired_limit_bytes"] == figures["peak_bytes"] + margin
    assert memfit("gate").code == 0
    write_policy(folder, chat=target(GROWTH, quantize="mxfp4"), code=target(GROWTH, quantize=4))
    run = memfit("gate")
    assert run.code == 2
    assert "margin_bytes 2000000000, now not named" in " ".join(run.out.split())


def test_spacing_in_a_config_does_not_change_the_checkpoint(memfit: Memfit, locked: Path) -> None:
    (locked / "model" / "config.json").write_text(json.dumps(QWEN3_4B, indent=4, sort_keys=True))
    before = lock(locked)
    assert memfit("gate", "--update").code == 0
    assert lock(locked) == before


def test_another_header_is_a_replaced_checkpoint(memfit: Memfit, folder: Path) -> None:
    write_policy(folder, it=target({"peak": "90%", "growth": {"kv_per_token": 0}}))
    file = folder / "model" / "model.safetensors"
    tensors = plain_tensors(QWEN3_4B)
    write_safetensors(file, tensors)
    assert memfit("gate", "--update", "--allow-bounds").code == 0
    write_safetensors(file, dict(reversed(list(tensors.items()))))
    (report,) = memfit("gate", "--allow-bounds", "--format", "json").json["targets"]
    assert report["notes"][0]["code"] == "checkpoint-changed"
    assert "the header of model.safetensors" in report["notes"][0]["message"]


def test_without_a_baseline_growth_does_not_pass(memfit: Memfit, folder: Path) -> None:
    run = memfit("gate", "--format", "json")
    assert (run.code, run.json["verdict"]) == (2, "invalid")
    assert "memfit gate --update" in run.json["targets"][0]["message"]


def test_a_target_missing_from_the_baseline_does_not_pass(memfit: Memfit, locked: Path) -> None:
    new = target(GROWTH, device="m3-ultra-512")
    write_policy(locked, chat=target(GROWTH), new=new)
    run = memfit("gate", "--format", "json")
    assert run.code == 2
    assert [report["status"] for report in run.json["targets"]] == ["passed", "invalid"]


def test_a_changed_workload_is_not_compared_with_the_old_one(memfit: Memfit, locked: Path) -> None:
    write_policy(locked, chat=target(GROWTH, workload={"prompt_tokens": 1024}))
    run = memfit("gate", "--format", "json")
    assert run.code == 2
    assert "prompt_tokens 4096, now 1024" in run.json["targets"][0]["message"]


def test_an_update_of_one_target_leaves_the_others(memfit: Memfit, locked: Path) -> None:
    before = lock(locked)["targets"]
    write_config(locked / "model", {**QWEN3_4B, "num_hidden_layers": 35})
    assert memfit("gate").code == 0
    assert memfit("gate", "--update", "--target", "chat").code == 0
    after = lock(locked)["targets"]
    assert after["code"] == before["code"]
    assert after["chat"]["figures"]["peak_bytes"] < before["chat"]["figures"]["peak_bytes"]


def test_an_update_drops_removed_targets(memfit: Memfit, locked: Path) -> None:
    write_policy(locked, chat=target(GROWTH))
    assert memfit("gate", "--update").code == 0
    assert list(lock(locked)["targets"]) == ["chat"]


def test_an_update_still_breaks_on_other_limits(memfit: Memfit, folder: Path) -> None:
    write_policy(folder, it=target({"peak": "1GB", "growth": {"peak": 0}}))
    assert memfit("gate", "--update").code == 1
    assert (folder / "memfit.lock.json").exists()


def test_an_update_writes_nothing_when_a_model_is_missing(memfit: Memfit, locked: Path) -> None:
    before = (locked / "memfit.lock.json").read_bytes()
    write_policy(locked, chat=target(GROWTH), gone=target(GROWTH, model="./gone"))
    assert_one_line(memfit("gate", "--update"), 2, "gone")
    assert (locked / "memfit.lock.json").read_bytes() == before


def damage(data: Any, path: tuple[str, ...], value: Any) -> Any:
    at = data
    for key in path[:-1]:
        at = at[key]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("targets",), ...),
        (("targets",), []),
        (("targets", "chat"), 3),
        (("targets", "chat", "figures"), {}),
        (("targets", "chat", "figures", "peak_bytes"), "4GB"),
        (("targets", "chat", "figures", "peak_bytes"), -1),
        (("targets", "chat", "figures", "peak_bytes"), None),
        (("targets", "chat", "figures", "basis"), "sure"),
        (("targets", "chat", "figures", "extra"), 1),
        (("targets", "chat", "asked"), ...),
        (("targets", "chat", "asked", "workload"), 7),
        (("targets", "chat", "checkpoint", "headers_sha256"), []),
        (("targets", "chat", "model"), 1),
        (("memfit_version",), None),
    ],
)
@pytest.mark.parametrize(
    "option", [(), pytest.param(("--update",), marks=pytest.mark.exhaustive)], ids=str
)
def test_a_damaged_baseline_gives_a_one_line_error(
    memfit: Memfit, locked: Path, path: tuple[str, ...], value: Any, option: tuple[str, ...]
) -> None:
    text = json.dumps(damage(lock(locked), path, value))
    (locked / "memfit.lock.json").write_text(text)
    assert_one_line(memfit("gate", *option), 2, "memfit.lock.json", "damaged", "--update")
    assert (locked / "memfit.lock.json").read_text() == text


@pytest.mark.parametrize("text", ["", "<<<<<<< HEAD\n", "[]", '{"schema": "memfit.lock/1"'])
def test_a_baseline_that_is_not_json_gives_a_one_line_error(
    memfit: Memfit, locked: Path, text: str
) -> None:
    (locked / "memfit.lock.json").write_text(text)
    assert_one_line(memfit("gate"), 2, "memfit.lock.json")


@pytest.mark.parametrize(
    ("key", "value"), [("schema", "memfit.lock/2"), ("memfit_version", "999.0.0")]
)
def test_a_baseline_of_a_newer_memfit_is_rejected(
    memfit: Memfit, locked: Path, key: str, value: str
) -> None:
    data = {**lock(locked), key: value}
    (locked / "memfit.lock.json").write_text(json.dumps(data))
    for option in ((), ("--update",)):
        assert_one_line(memfit("gate", *option), 2, "newer memfit", __version__, "update memfit")
    assert lock(locked) == data


def test_a_baseline_of_an_older_memfit_names_its_version(memfit: Memfit, locked: Path) -> None:
    data = {**lock(locked), "memfit_version": "0.0.1"}
    (locked / "memfit.lock.json").write_text(json.dumps(data))
    run = memfit("gate")
    assert run.code == 0
    assert "written by memfit 0.0.1" in run.out


def test_a_baseline_that_is_a_broken_link_is_an_error(memfit: Memfit, locked: Path) -> None:
    (locked / "memfit.lock.json").unlink()
    (locked / "memfit.lock.json").symlink_to("nowhere")
    assert_one_line(memfit("gate"), 2, "memfit.lock.json", "broken link")


HOSTILE = "\x1b[31mred\n::stop-commands::x\n##[stop-commands]x\u202e <b>"
PLACES = [
    ("memfit_version",),
    ("targets", "chat", "model"),
    ("targets", "chat", "asked", "device"),
    ("targets", "chat", "asked", "runtime"),
    ("targets", "chat", "checkpoint", "revision"),
    ("targets", "chat", "figures", "basis"),
]


@pytest.mark.parametrize(
    "form", quick(["table", "github", "junit", "markdown", "json"], ("github", "markdown"))
)
@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_no_text_of_a_baseline_is_printed_raw(
    memfit: Memfit, locked: Path, place: tuple[str, ...], form: str
) -> None:
    _change(locked, place, HOSTILE)
    run = memfit("gate", "--format", form)
    text = run.out + run.err
    assert run.code in (0, 1, 2)
    assert not re.search(r"[\x00-\x09\x0b-\x1f]|^::stop|##\[", text, re.MULTILINE)
    assert "\u202e" not in text or form == "json"
    if form == "markdown":
        assert not re.search(r"(?<!\\)<b>", run.out)


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_half_a_surrogate_pair_damages_a_baseline(
    memfit: Memfit, locked: Path, place: tuple[str, ...]
) -> None:
    _change(locked, place, "\ud800")
    assert_one_line(memfit("gate"), 2, "memfit.lock.json", "not valid Unicode")


def _change(folder: Path, place: tuple[str, ...], text: str) -> None:
    data = lock(folder)
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = text
    (folder / "memfit.lock.json").write_text(json.dumps(data))


@pytest.mark.skipif(sys.platform == "darwin", reason="its file systems take UTF-8 only")
def test_a_shard_with_a_name_that_is_not_utf_8_is_kept_escaped(
    memfit: Memfit, folder: Path
) -> None:
    name = os.fsdecode(b"model-00001-of-00001-\xff.safetensors")
    write_safetensors(folder / "model" / name, plain_tensors(QWEN3_4B))
    assert memfit("gate", "--update", "--allow-bounds").code in (0, 1)
    headers = lock(folder)["targets"]["chat"]["checkpoint"]["headers_sha256"]
    assert list(headers) == [r"model-00001-of-00001-\udcff.safetensors"]
    run = memfit("gate", "--allow-bounds")
    assert (run.code in (0, 1), run.err) == (True, "")


@pytest.mark.parametrize("model", ["org/" + "x" * 256, "x" * 97 + "/name", "org/name@" + "r" * 256])
def test_a_name_that_is_too_long_does_not_hide_the_other_targets(
    memfit: Memfit, folder: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_policy(folder, good=target({"peak": "90%"}), long=target({"peak": "90%"}, hub=model))
    run = memfit("gate", "--format", "json")
    assert next(each["status"] for each in run.json["targets"]) == "passed"
    assert run.code in (2, 4)
