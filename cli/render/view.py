"""A result in the forms that writers ask for."""

from typing import NamedTuple

from memfit.cli.render.document import Document
from memfit.estimators.results.result import Result


class Answer(NamedTuple):
    """A result for programs, and its document for people."""

    result: Result
    shown: Document

    def document(self) -> Document:
        """Return the document."""
        return self.shown
