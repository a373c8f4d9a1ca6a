"""A notebook shows every answer as HTML."""

from pathlib import Path

import pytest
from msgspec import convert
from msgspec.structs import replace

import memfit
from memfit.cli.render.view import as_html, registered
from memfit.estimators.results.error import error_report
from tests.cli.running import Memfit
from tests.cli.test_pages import COMMANDS
from tests.selection import quick
from tests.test_schemas import documents, texts

SAMPLE = Path(__file__).parents[2] / "sample_configs" / "qwen3-4b-4bit.yaml"
CODE = f"""
import memfit
memfit.estimate({str(SAMPLE)!r}, device="m4-max-64")
"""


def test_an_estimate_is_html_with_its_verdict() -> None:
    html = memfit.estimate(SAMPLE, device="m4-max-64")._repr_html_()
    assert html
    assert "Qwen3-4B-4bit, m4-max-64: fits" in html
    assert "<script" not in html


def test_a_hostile_name_stays_text() -> None:
    answer = memfit.estimate(SAMPLE, device="m4-max-64")
    name = "<img src=x onerror=alert(1)>"
    html = replace(answer, model=replace(answer.model, id=name))._repr_html_()
    assert html
    assert "<img" not in html
    assert "&lt;img src=x" in html


@pytest.mark.parametrize(
    "command",
    quick(
        ["compare", "context", "server", "wired", "growth", "experts"],
        ("compare", "context", "wired"),
    ),
)
def test_the_result_of_a_command_is_html(memfit: Memfit, command: str) -> None:
    facts = memfit(*COMMANDS[command].split(), "--json").json
    kind = next(each for each in documents() if each.__struct_config__.tag == facts["schema"])
    html = convert(facts, kind)._repr_html_()
    assert html
    assert html.count("<table>") >= 1
    assert "<svg" in html or command == "context"  # its curve is of another computation


def test_every_answer_has_a_view() -> None:
    texts()  # imports the types
    kinds = [kind for kind in documents() if kind.__module__.startswith("memfit.")]
    without = {kind.__name__ for kind in kinds if registered(kind) is None}
    assert without == {"Baseline", "ErrorReport", "Manifest", "Measurements"}
    assert as_html(error_report("bad-input", "no such file", 2)) is None


@pytest.mark.exhaustive
def test_a_notebook_shows_the_html(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ipykernel", reason="ipykernel needs Python 3.11")
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("HOME", str(tmp_path))  # where a kernel writes its files
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CODE)])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    (shown,) = notebook.cells[0].outputs
    answer = memfit.estimate(SAMPLE, device="m4-max-64")
    assert shown.data["text/html"] == answer._repr_html_()
