"""JSON: the fields of a result, nothing added or left out."""

from typing import Protocol

from memfit.estimators.results.result import Result


class HasResult(Protocol):
    """What the writers for programs need."""

    @property
    def result(self) -> Result:
        """The result, which its type encodes."""


def write(view: HasResult, *, to_file: bool) -> str:
    """Return the view's result as JSON text that ends with a line feed."""
    return to_json(view.result)


def to_json(result: Result) -> str:
    """Return a result as JSON text that ends with a line feed."""
    # "##[" is a command to GitHub's runner, which reads what a job prints.
    return result.to_json().replace("##[", "##\\u005b") + "\n"
