"""Every command shown in the README and the docs prints what stands below it.

``python -m tests.test_docs`` rewrites the outputs after a change that was meant.
"""

import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```console\n\$ (memfit [^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Yield each command of a page with the output it shows."""
    for match in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        yield match[1], match[2]


def output_of(command: str) -> str:
    """Return what a command prints, run from the project's root at a fixed width."""
    from memfit.cli.app import main

    # The console asks its file for the encoding; a StringIO has none.
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    # On a runner of GitHub, its own summary is not for these reports.
    environment = {"COLUMNS": "100", "GITHUB_STEP_SUMMARY": "", "GITHUB_WORKSPACE": ""}
    here = Path.cwd()
    os.chdir(ROOT)
    try:
        with (
            mock.patch.object(sys, "argv", shlex.split(command)),
            mock.patch.dict(os.environ, environment),
            redirect_stdout(out),
            redirect_stderr(out),
            pytest.raises(SystemExit),
        ):
            main()
    finally:
        os.chdir(here)
    out.seek(0)
    return "".join(f"{line.rstrip()}\n" for line in out)


@pytest.mark.parametrize(
    ("command", "shown"),
    [block for page in PAGES for block in blocks(page)],
    ids=lambda text: text if text.startswith("memfit ") else "",
)
def test_a_documented_command_prints_the_shown_output(command: str, shown: str) -> None:
    assert output_of(command) == shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_are_valid(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_files_that_contributing_names_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for path in re.findall(r"`((?:cli|estimators|probes|tests|docs)/[^`…]*)`", text):
        assert (ROOT / path).exists(), path
    for name, path in re.findall(r"`([A-Z_]+)`(?: of\s`([^`]*)`)?", text):
        if path:
            assert f"\n{name}: dict" in (ROOT / path).read_text(encoding="utf-8")
    decorator = re.search(r"`(@record\([^`]*)`", text)
    assert decorator
    assert decorator[1] in (ROOT / "estimators/arch/specs.py").read_text(encoding="utf-8")


def test_every_path_in_the_glossary_exists() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    places = re.findall(r"`([a-z_]+/[a-z_./]*)(?:: (\w+))?`", text)
    assert len(places) > 30
    for path, name in places:
        file = ROOT / "estimators" / path
        assert file.exists(), path
        if name:
            code = file.read_text(encoding="utf-8")
            assert re.search(rf"^((class|def) )?{name}\b", code, re.M), name


def rewrite(page: Path) -> None:
    """Put the present outputs into a page."""
    text = page.read_text(encoding="utf-8")
    fresh = _BLOCK.sub(lambda m: f"```console\n$ {m[1]}\n{output_of(m[1])}```", text)
    if fresh != text:
        page.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    for each in PAGES:
        rewrite(each)
