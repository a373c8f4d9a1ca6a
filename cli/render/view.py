"""The views of results: one for each type, for commands, pages and notebooks."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any, NamedTuple, TypeVar

from memfit.cli.render.document import Document
from memfit.estimators.base.units import Units
from memfit.estimators.results.result import Result

View = TypeVar("View", bound=Callable[..., Any])
_VIEWS: dict[type[Result], Callable[..., Any]] = {}
_OF_NOTEBOOKS = {"units": Units.GB, "plot": True}


class Answer(NamedTuple):
    """A result for programs, and its document for people."""

    result: Result
    make_document: Callable[[], Document]

    def document(self) -> Document:
        """Return the document."""
        return self.make_document()


def view(kind: type[Result]) -> Callable[[View], View]:
    """Register what shows the results of a type: a class of views, or what makes a document.

    It is in the module of `views` with the name of the schema: `plan_context` for
    ``memfit.plan-context/1``.
    """

    def register(shown: View) -> View:
        _VIEWS[kind] = shown
        return shown

    return register


def view_of(result: Result, **settings: Any) -> Any:
    """Return the view of a result, with settings such as its units, which its sentences take."""
    result = result.in_units(settings.get("units", Units.GB))
    shown = registered(type(result))
    if shown is None:
        raise LookupError(f"no view of {type(result).__name__}")
    if isinstance(shown, type):
        return shown(result, **settings)
    return Answer(result, lambda: shown(result, **settings))


def as_html(result: Result) -> str | None:
    """Return a result as an element with its style sheet, None where it has no view.

    Notebooks ask for it, through the entry point in pyproject.toml.
    """
    from memfit.cli.render.writers.html import to_fragment

    shown = registered(type(result))
    if shown is None:
        return None
    taken = signature(shown).parameters
    settings = {name: value for name, value in _OF_NOTEBOOKS.items() if name in taken}
    return to_fragment(view_of(result, **settings).document())


def registered(kind: type[Result]) -> Callable[..., Any] | None:
    """Import the view of a type of results, and return it; None where there is none."""
    if kind not in _VIEWS:
        schema = str(kind.__struct_config__.tag).partition("/")[0]
        module = f"memfit.cli.render.views.{schema.rpartition('.')[2].replace('-', '_')}"
        if find_spec(module):
            import_module(module)
    return _VIEWS.get(kind)
