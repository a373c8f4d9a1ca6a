"""Commands and Python examples on the pages print the shown output; links and paths exist.

``python -m tests.test_docs`` rewrites the outputs after an intended change.
"""

import ast
import asyncio
import inspect
import io
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import yaml
from rich.console import Console
from rich.markdown import Markdown

from memfit.estimators.base import errors
from memfit.estimators.base.errors import MemfitError
from memfit.estimators.results.estimate import Limit
from tests.selection import quick

ROOT = Path(__file__).parents[1]
INDEX = ROOT / "docs" / "index.md"
AGENTS = ROOT / "docs" / "agents.md"
SKILL = ROOT / "docs" / "skills" / "memfit" / "SKILL.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MAX_WORDS = 30_000
GENERATED = {
    *("published-peaks.md", "published-image-peaks.md", "architectures.md", "trace-rules.md"),
}
"""Pages whose tables a program writes; on other pages such a table has a mark."""
QUICK_PAGES = {"README"}
"""Whose commands `make test` runs; `make check` runs those of all pages."""
EVERY_DAY = pytest.mark.exhaustive(daily=True)
LINKED = [
    *PAGES,
    SKILL,
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "sample_configs/README.md")),
]
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PRINT = re.compile(r"^(print\(.*\)  # ).*$", re.MULTILINE)
_PROGRESS = re.compile(r"memfit: .*, \d+ s so far\n")
_PATH = re.compile(r"(?<![\w/.-])(?:estimators|probes|cli|tests)/[\w./-]*")
_LINK = re.compile(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)")
_NAME = re.compile(r"\bmemfit\.(?:cli|estimators|probes)(?:\.\w+)*")
_MODULE = re.compile(r"python -m ((?:tests|benchmarks)[.\w]*)")
_BLOCK = re.compile(r"^```console\n\$ (memfit [^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IMAGES = {
    "estimate": "memfit estimate sample_configs/qwen3.5-35b-a3b.yaml --memory 32GB --format svg",
    "gate": "memfit gate sample_configs/qwen3-8b-4bit.yaml sample_configs/qwen3-14b-4bit.yaml"
    " --policy docs/examples/memfit.yaml --target assistant --format markdown",
}
_SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)

SHOWN_WITHOUT_OUTPUT = [
    line.partition(" #")[0].rstrip()
    for block in _SHELL.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    for line in block.splitlines()
    if line.startswith("memfit ")
]


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Yield each command of a page with the output it shows."""
    for match in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        yield match[1], match[2]


def output_of(command: str, shown: str) -> str:
    """Return what a command prints; of JSON only the keys that are shown."""
    output, _ = run(command)
    if not command.endswith(" --json"):
        return output
    whole, part = (json.loads(text[text.index("{") :]) for text in (output, shown))
    lines = (
        f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in _part(whole, part).items()
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _part(whole: Any, shown: Any) -> Any:
    """Return what a page shows of JSON: keys of objects, and the first items of arrays."""
    if isinstance(shown, dict):
        return {key: _part(whole[key], value) for key, value in shown.items()}
    if isinstance(shown, list):
        return [_part(*pair) for pair in zip(whole, shown, strict=False)]
    return whole


def run(command: str, *, columns: int = 100, folder: Path = ROOT) -> tuple[str, int | str | None]:
    """Run a command in a folder at a fixed width; return its output and exit code."""
    from memfit.cli.app import main

    # The console needs a file with an encoding; a StringIO has none.
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    # On GitHub, these reports must not go into the job's own summary.
    environment = {"COLUMNS": str(columns), "GITHUB_STEP_SUMMARY": "", "GITHUB_WORKSPACE": ""}
    environment["HOME"] = str(ROOT / "nowhere")  # no user's models
    here = Path.cwd()
    os.chdir(folder)
    try:
        with (
            mock.patch.object(sys, "argv", shlex.split(command)),
            mock.patch.dict(os.environ, environment),
            redirect_stdout(out),
            redirect_stderr(out),
            pytest.raises(SystemExit) as exit_,
        ):
            main()
    finally:
        os.chdir(here)
    out.seek(0)
    # A busy machine makes some commands say how long they have taken.
    lines = [line.rstrip() for line in out if not _PROGRESS.fullmatch(line)]
    return "".join(f"{line}\n" for line in lines), exit_.value.code


def test_totals_of_published_images_are_those_of_their_page() -> None:
    from benchmarks.published_images import totals

    table = (ROOT / "docs" / "published-image-peaks.md").read_text().splitlines()
    rows = [line for line in table if line.startswith("| ")][1:]
    accuracy = " ".join((ROOT / "docs" / "accuracy.md").read_text().split())
    counted, _, near = totals(rows).partition(": ")
    assert counted in accuracy
    assert near in accuracy


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        pytest.param(*block, marks=() if page.stem in QUICK_PAGES else EVERY_DAY)
        for page in PAGES
        for block in blocks(page)
    ],
    ids=lambda text: text if text.startswith("memfit ") else "",
)
def test_a_documented_command_prints_the_shown_output(command: str, shown: str) -> None:
    if command.startswith("memfit plan train"):
        pytest.importorskip("mlx_lm", reason="mlx-lm's trainer is traced")
    assert output_of(command, shown) == shown


@EVERY_DAY
@pytest.mark.parametrize("name", IMAGES)
def test_a_picture_on_the_pages_is_what_its_command_draws(name: str) -> None:
    assert picture(IMAGES[name]) == image(name).read_text(encoding="utf-8")


def picture(command: str) -> str:
    """Return what a command draws; of one that writes Markdown, its text as a terminal shows it."""
    output = run(command)[0]
    if not command.endswith("markdown"):
        return output
    console = Console(record=True, width=90, file=io.StringIO(), force_terminal=True)
    console.print(Markdown(output))
    drawn = console.export_svg(title="A comment on a pull request", unique_id="comment")
    return re.sub(r"\s*@font-face \{.*?\}", "", drawn, flags=re.DOTALL)  # it names a server


def image(name: str) -> Path:
    return ROOT / "docs" / "images" / f"{name}.svg"


@pytest.mark.parametrize(
    "command",
    # A list of what fits takes seconds.
    quick(SHOWN_WITHOUT_OUTPUT, [each for each in SHOWN_WITHOUT_OUTPUT if " fits " not in each]),
)
def test_a_command_of_the_readme_has_an_answer(command: str) -> None:
    _, code = run(command)
    assert code in (None, 0, 1)


def test_the_demo_ends_with_commands_that_have_an_answer() -> None:
    shown = subprocess.run(
        ["make", "--dry-run", "demo"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    commands = re.findall(r'echo "  \S*(memfit .*?) {2,}', shown)
    assert len(commands) == 3
    assert any("--device" in command for command in commands)
    for command in commands:
        if " fits " not in command:  # it takes seconds, and the README has it too
            assert run(command)[1] in (None, 0, 1), command


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("command", "schema"),
    re.findall(r"\| `(memfit [^`]* --json)`.* \| `([a-z-]+)`", AGENTS.read_text(encoding="utf-8")),
)
def test_a_command_for_agents_writes_the_schema_of_its_row(command: str, schema: str) -> None:
    output, code = run(command.replace("MODEL", "qwen3-4b-4bit"))
    assert code in (None, 0, 1)
    assert json.loads(output)["schema"].startswith(f"memfit.{schema}/")


def test_the_skill_says_when_it_is_used_and_its_commands_write_what_it_names() -> None:
    _, head, text = SKILL.read_text(encoding="utf-8").split("---\n", 2)
    fields = yaml.safe_load(head)
    # The limits of the format of Agent Skills.
    assert fields["name"] == SKILL.parent.name
    assert 0 < len(fields["description"]) <= 1024
    commands = [line for block in _SHELL.findall(text) for line in block.splitlines()]
    assert len(commands) == 4
    for command in commands:
        if " fits " in command:  # it takes seconds; `memfit mcp` is tested with it
            continue
        output, code = run(command)
        assert code in (None, 0, 1), command
        assert "verdict" in output, command
    named = {"verdict", "peak_bytes", "needed_bytes", "actions", "notes"}
    assert named <= json.loads(run(commands[0])[0]).keys()
    assert all(f"`{name}`" in text for name in named)


def test_links_between_pages_are_valid() -> None:
    wrong = [
        f"{page.name}: {target.name}#{heading}"
        for page in LINKED
        for target, heading in links(page)
        if not target.exists() or (heading and heading not in anchors(target))
    ]
    assert wrong == []


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Yield the file and the heading of each relative link of a page."""
    for target, heading in _LINK.findall(page.read_text(encoding="utf-8")):
        yield (page.parent / target).resolve() if target else page, heading


def anchors(page: Path) -> set[str]:
    """Return the names of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_linked_from_the_index() -> None:
    linked = {target for target, _ in links(INDEX)}
    assert {page for page in PAGES if page.parent == INDEX.parent} - linked == {INDEX}
    assert INDEX in {target for target, _ in links(ROOT / "README.md")}


def test_the_index_answers_ten_questions_with_a_command_or_a_sentence() -> None:
    _, _, text = INDEX.read_text(encoding="utf-8").partition("## Questions\n\n")
    rows = [line.strip("| ").split(" | ") for line in text.partition("\n\n")[0].splitlines()[2:]]
    answered = [question for question, *answers in rows if len(answers) == 2]
    assert len(answered) >= 10
    assert all("](" in row[-1] for row in rows)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "command",
    [
        command
        for command in re.findall(r"`(memfit [^`]*)`", INDEX.read_text(encoding="utf-8"))
        if not re.search(
            r"model\.gguf|ollama:|memfit (tune|gate|compare|plan wired|plan train)", command
        )
    ],
)
def test_a_command_of_the_index_has_an_answer(command: str) -> None:
    output, code = run(command.replace("MODEL", "qwen3-30b-a3b-4bit"))
    assert code in (None, 0, 1), output


def words_of(page: Path) -> int:
    """Count the words of a page, without tables and outputs that programs write."""
    text = page.read_text(encoding="utf-8")
    if page.name == "api.md":  # the reference, which tests.api.test_page writes
        text = text.partition("\n## Reference")[0]
    text = re.sub(r"^```(?:console|text)\n\$ memfit .*?^```$", "", text, flags=re.M | re.S)
    generated = r"^\|.*\n?" if page.name in GENERATED else r"^<!-- generated -->\n\n(?:\|.*\n?)+"
    return len(re.sub(generated, "", text, flags=re.M).split())


def test_the_pages_have_a_limited_number_of_words() -> None:
    assert sum(map(words_of, (ROOT / "docs").rglob("*.md"))) <= MAX_WORDS


def test_every_path_and_every_python_name_on_a_page_exists() -> None:
    for page in LINKED:
        text = page.read_text(encoding="utf-8")
        paths = [path.rstrip(".") for path in _PATH.findall(text)]
        paths += [f"{module.replace('.', '/')}.py" for module in _MODULE.findall(text)]
        assert [path for path in paths if not (ROOT / path).exists()] == [], page.name
        assert all(pkgutil.resolve_name(name) for name in _NAME.findall(text)), page.name


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(example, id=page.name)
        for page in PAGES
        for example in _PYTHON.findall(page.read_text(encoding="utf-8"))
    ],
)
def test_a_python_example_prints_what_its_comments_say(example: str) -> None:
    assert with_outputs(example) == example


def with_outputs(example: str) -> str:
    """Return an example with the output of each ``print(...)`` in the comment after it.

    Coroutine functions are called as well.
    """
    out = io.StringIO()
    here = Path.cwd()
    os.chdir(ROOT)
    try:
        with redirect_stdout(out):
            asyncio.run(_run_example(example, {}))
    finally:
        os.chdir(here)
    printed = out.getvalue().splitlines()
    assert len(printed) == len(_PRINT.findall(example))
    return _PRINT.sub(lambda shown: f"{shown[1]}{printed.pop(0)}", example)


async def _run_example(example: str, names: dict[str, Any]) -> None:
    code = compile(example, "example", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, names)
    if inspect.isawaitable(result):
        await result
    for value in list(names.values()):
        if inspect.iscoroutinefunction(value):
            await value("a prompt")


def test_names_in_contributing_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for name, path in re.findall(r"`([A-Z_]+)`(?: of\s`([^`]*)`)?", text):
        if path:
            assert f"\n{name}: dict" in (ROOT / path).read_text(encoding="utf-8")
    places = re.findall(
        r"`((?:api|cli|docs|estimators|probes|sample_configs|tests)/[\w./]*)`", text
    )
    assert [path for path in places if not (ROOT / path).exists()] == []
    base = re.search(r"`(\(Struct[^`]*)`", text)
    assert base
    assert base[1] in (ROOT / "estimators/arch/specs.py").read_text(encoding="utf-8")


def test_every_path_in_the_terms_of_the_code_exists() -> None:
    text = (ROOT / "docs" / "glossary-developers.md").read_text(encoding="utf-8")
    places = re.findall(r"`([a-z_]+/[a-z_./]*)(?:: (\w+))?`", text)
    assert len(places) > 20
    for path, name in places:
        file = ROOT / "estimators" / path
        assert file.exists(), path
        if name:
            code = file.read_text(encoding="utf-8")
            assert re.search(rf"^((class|def) )?{name}\b", code, re.M), name


def test_the_page_of_errors_has_every_slug_and_every_code_of_a_note() -> None:
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    slugs, notes = (
        set(re.findall(r"`([a-z-]+)`", " ".join(re.findall(r"^\| (`.*?) \|", part, re.M))))
        for part in text.split("## Slugs")[1].split("## Notes")
    )
    assert {*slugs, MemfitError.slug} == {
        error.slug for error in vars(errors).values() if hasattr(error, "slug")
    }
    code = [
        path.read_text(encoding="utf-8")
        for folder in ("api", "estimators", "probes", "cli")
        for path in (ROOT / folder).rglob("*.py")
    ]
    # A limit that may end a run has a note of its name (`run_limits.ending_notes`).
    names = msgspec.json.schema(Limit)["$defs"]["Limit"]["properties"]["name"]["enum"]
    limits = {name.replace("_", "-") for name in names if name != "largest_buffer"}
    assert {*_codes("\n".join(code)), *limits} <= notes
    assert [name for name in notes - limits if f'"{name}"' not in "".join(code)] == []


def _codes(code: str) -> Iterator[str]:
    """Yield the codes of notes that are written out, as the second argument of their call."""
    for call in re.findall(r"\b(?:Note|bounded)\((.{1,80})", code, re.DOTALL):
        yield from re.findall(r'"([a-z-]+)"', ",".join(call.split(",")[1:2]))


def rewrite(page: Path) -> None:
    """Write the current outputs into a page."""
    text = page.read_text(encoding="utf-8")
    fresh = _BLOCK.sub(lambda m: f"```console\n$ {m[1]}\n{output_of(m[1], m[2])}```", text)
    fresh = _PYTHON.sub(lambda m: f"```python\n{with_outputs(m[1])}```", fresh)
    if fresh != text:
        page.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    import tests.conftest  # noqa: F401 - no user's models

    for each in PAGES:
        rewrite(each)
    for drawn, command in IMAGES.items():
        image(drawn).write_text(picture(command), encoding="utf-8")
