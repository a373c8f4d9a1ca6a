"""Where reviewers look: annotations, the job summary, JUnit, Markdown, and files of each."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.cli.gating import target, write_policy
from tests.cli.running import Memfit, validated
from tests.models import QWEN3_4B, write_config

FOUR_BIT = {**QWEN3_4B, "quantization": {"group_size": 64, "bits": 4}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository in which one target passes, one fails and one has no model."""
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path / "model", FOUR_BIT)
    write_policy(
        tmp_path,
        good=target({"peak": "90%"}),
        bad=target({"peak": "12.5%", "context": "4k"}),
        gone=target({"peak": "90%"}, model="./100%, gone:|`_"),
    )
    return tmp_path


def line_of(folder: Path, text: str, after: str) -> int:
    lines = (folder / "memfit.yaml").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if after in line)
    return next(i for i, line in enumerate(lines, 1) if i > first and text in line)


def test_annotations_are_on_the_line_of_their_limit(memfit: Memfit, folder: Path) -> None:
    run = memfit("gate", "--format", "github")
    errors = [line for line in run.out.splitlines() if line.startswith("::error ")]
    assert (run.code, len(errors)) == (1, 2)
    peak = line_of(folder, '"peak"', after='"bad"')
    assert errors[0].startswith(f"::error file=memfit.yaml,line={peak},title=memfit%3A bad::peak: ")
    assert "(12.5%25 of the working set)" in errors[0]
    assert "; nothing tried alone makes it pass (shorter prompts, KV bits, " in errors[0]
    gone = line_of(folder, '"gone"', after='"bad"')
    assert errors[1].startswith(f"::error file=memfit.yaml,line={gone},title=memfit%3A gone::")
    assert "100%25, gone:|`_" in errors[1]


def test_annotations_give_the_policy_path_from_the_repository_root(
    memfit: Memfit, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_WORKSPACE", str(folder.parent))
    out = memfit("gate", "--format", "github").out
    assert f"::error file={folder.name}/memfit.yaml,line=" in out


def test_the_job_summary_is_appended_to_existing_text(
    memfit: Memfit, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = folder / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    markdown = memfit("gate", "--format", "markdown").out
    assert summary.read_text() == "before\n"
    memfit("gate", "--format", "github")
    assert summary.read_text() == "before\n" + markdown


def test_mistakes_in_a_policy_are_annotations_too(memfit: Memfit, folder: Path) -> None:
    (folder / "memfit.yaml").write_text("schema: memfit.policy/1\ntargets:\n  a: 3\n")
    run = memfit("gate", "--format", "github")
    assert run.code == 2
    assert "::error file=memfit.yaml,line=3,title=memfit policy::targets.a: " in run.out
    assert memfit("gate").out == ""


def test_junit_counts_failures_and_errors(memfit: Memfit, folder: Path) -> None:
    run = memfit("gate", "--format", "junit")
    root = ElementTree.fromstring(run.out)
    counts = {name: root.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "4", "failures": "1", "errors": "1", "skipped": "0"}
    suites = {suite.get("name"): suite for suite in root}
    assert list(suites) == ["good", "bad", "gone"]
    (failure,) = suites["bad"].iter("failure")
    assert "allowed at most 2.384 GB (12.5% of the working set)" in str(failure.get("message"))
    assert suites["good"].find(".//failure") is None


def test_junit_is_valid_xml_for_any_path(memfit: Memfit, folder: Path) -> None:
    write_config(folder / 'a<b&"', {**QWEN3_4B, "model_type": "\x07"})
    write_policy(folder, it=target({"peak": "90%"}, model='a<b&"'))
    root = ElementTree.fromstring(memfit("gate", "--format", "junit").out)
    assert 'a<b&"' in str(next(root.iter("error")).get("message"))


MARKDOWN = """\
## ❌ Gate not passed: 1 beyond its limits of 1 target

### bad: beyond its limits

new on m4-pro-24, working set 19.070 GB; baseline model

| Limit | Figure | Allowed |  |
| --- | ---: | --- | --- |
| growth of KV per token | 163.8 kB | at most 147.5 kB (0% of the baseline) | ❌ |

- **growth of KV per token: 163.8 kB, allowed at most 147.5 kB (0% of the baseline),\
 16.4 kB too much**; passes with kv\\_bits 8 from the first token on; if the growth is meant,\
 raise the limit or make it the baseline

|  | Baseline | Now | Change |
| --- | ---: | ---: | ---: |
| weights | 2.263 GB | 2.490 GB | +227.1 MB, +10.1 % |
| KV per token | 147.5 kB | 163.8 kB | +16.4 kB, +11.2 % |
"""


def test_markdown_shows_the_difference_for_the_reviewer(memfit: Memfit, folder: Path) -> None:
    write_config(folder / "new", {**FOUR_BIT, "num_hidden_layers": 40})
    write_policy(folder, bad=target({"growth": {"kv_per_token": "0%"}}))
    run = memfit("gate", "model", "new", "--policy", "memfit.yaml", "--format", "markdown")
    assert run.code == 1
    assert run.out.startswith(MARKDOWN)


def test_markdown_states_when_nothing_changed(memfit: Memfit, folder: Path) -> None:
    out = memfit("gate", "model", "model", "--target", "good", "--format", "markdown").out
    assert "No figure differs from the baseline." in out


def test_any_name_stays_in_its_markdown_cell(memfit: Memfit, folder: Path) -> None:
    out = memfit("gate", "--format", "markdown").out
    assert r"gone:\|\`\_" in out


def test_json_is_the_whole_report(memfit: Memfit, folder: Path) -> None:
    data = memfit("gate", "--format", "json").json
    assert [report["name"] for report in data["targets"]] == ["good", "bad", "gone"]
    check = data["targets"][1]["checks"][0]
    assert check["excess"] == check["figure"] - check["allowed"]


def test_several_files_are_written_in_addition_to_the_output(memfit: Memfit, folder: Path) -> None:
    run = memfit("gate", "--output", "json=a.json", "--output", "junit=b.xml",
                 "--output", "markdown=c.md")  # fmt: skip
    assert run.code == 1
    assert run.out.splitlines()[0] == "good: passed"
    assert validated(json.loads((folder / "a.json").read_text()))
    assert ElementTree.parse(folder / "b.xml").getroot().get("failures") == "1"
    comment = (folder / "c.md").read_text()
    assert comment.startswith("## ❌ Gate not passed: 1 passed, 1 beyond its limits")


def test_a_narrow_terminal_cuts_no_number(
    memfit: Memfit, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    out = memfit("gate").out
    assert "2.384 GB" in out
    assert "BROKEN" in out
    assert "…" not in out
