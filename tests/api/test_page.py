"""The reference in docs/api.md is that of the code.

``python -m tests.api.test_page`` rewrites it.
"""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import memfit
from memfit import settings
from memfit.cli.command_groups import option_name
from memfit.cli.options import questions
from memfit.cli.options.groups import Options
from memfit.estimators.results.estimate import Estimate
from memfit.estimators.results.result import Result
from tests.test_schemas import described

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
HEADING = "## Reference\n"
GROUPS = [each for each in vars(questions).values() if isinstance(each, Options)]
OPTIONS = {
    parameter.name: parameter.default for group in GROUPS for parameter in group.parameters(())
}
"""The option of each setting, by its name."""


def reference() -> str:
    """Return the text below the heading."""
    parts = [
        "Generated from signatures, docstrings and the help of the options (`make docs`).",
        *_callable("memfit.estimate", memfit.estimate),
        *_callable("memfit.open", memfit.open),
        _settings(settings.OpenSettings),
        *_callable("OpenModel.on", memfit.OpenModel.on),
        _settings(settings.MachineSettings),
        *_callable("OpenModel.at", memfit.OpenModel.at),
        _settings(settings.WorkloadSettings),
        "### `Estimate`",
        "Immutable. The [schema](schema/estimate.schema.json) of its JSON has the parts.",
        _table(("Member", "Type", "Meaning"), _members()),
        "### Other names",
        _table(("Name", "Meaning"), _others()),
    ]
    return "\n\n".join(parts) + "\n"


def _callable(name: str, function: Callable[..., Any]) -> Iterator[str]:
    signature = dedent(inspect.getsource(function)).partition('    """')[0]
    yield f"### `{name}`"
    yield f"```text\n{signature.strip().removesuffix(':').replace(chr(34), '')}\n```"
    text, _, errors = inspect.cleandoc(function.__doc__ or "").partition("\n\nRaises:\n")
    yield _plain(text)
    raised = (line.partition(": ") for line in dedent(errors).replace("\n    ", " ").splitlines())
    yield "\n".join(f"- `{error}`: {_plain(when)}" for error, _, when in raised)


def _settings(group: type) -> str:
    rows = (
        (f"`{name}`", _code(kind), _meaning(name), _default(name))
        for name, kind in _annotated(group)
    )
    return _table(("Setting", "Type", "Meaning", "Default"), rows)


def _members() -> Iterator[tuple[str, ...]]:
    for kind in (Estimate, Result):
        for each in _body(kind):
            if isinstance(each, ast.FunctionDef) and not each.name.startswith("_") and each.returns:
                name = each.name if each.decorator_list else f"{each.name}()"
                yield f"`{name}`", _code(each.returns), _plain(ast.get_docstring(each) or "")
    texts = described(Estimate)
    for name, annotation in _annotated(Estimate):
        yield f"`{name}`", _code(annotation), texts.get(name, "")


def _others() -> Iterator[tuple[str, str]]:
    shown = {"estimate", "open", "OpenModel", "Estimate"}
    for name in memfit.__all__:
        found = getattr(memfit, name)
        text = "" if isinstance(found, str) else inspect.cleandoc(found.__doc__ or "")
        if name not in shown:
            yield f"`{name}`", _plain(text.partition("\n\n")[0]) or "The version."


def _annotated(kind: type) -> Iterator[tuple[str, ast.expr]]:
    for each in _body(kind):
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id, each.annotation


def _body(kind: type) -> list[ast.stmt]:
    (tree,) = ast.parse(dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    return tree.body


def _code(annotation: ast.expr) -> str:
    text = ast.unparse(annotation)
    if isinstance(annotation, ast.Constant):  # it was quoted
        text = str(annotation.value)
    return f"`{text.removesuffix(' | None')}`".replace("|", r"\|")


def _meaning(name: str) -> str:
    """The help of the option, with keywords in place of options."""
    text: str = OPTIONS[name].help
    for other in OPTIONS:
        text = re.sub(rf"{option_name(other)}\b(?!-)", other, text)
    return text


def _default(name: str) -> str:
    default = OPTIONS[name].default
    return "" if default is None else f"`{getattr(default, 'value', default)}`"


def _plain(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


def _table(headings: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = (headings, ("---",) * len(headings), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def test_the_reference_is_that_of_the_code() -> None:
    """After a change of a signature, a docstring or an option run ``make docs``."""
    _, _, shown = PAGE.read_text(encoding="utf-8").partition(HEADING)
    assert shown.lstrip("\n") == reference()


if __name__ == "__main__":
    kept, _, _ = PAGE.read_text(encoding="utf-8").partition(HEADING)
    PAGE.write_text(f"{kept}{HEADING}\n{reference()}", encoding="utf-8")
