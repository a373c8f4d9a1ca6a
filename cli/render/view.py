"""A result in the forms that writers ask for."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from memfit.cli.render.document import Document

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def as_data(result: "DataclassInstance") -> dict[str, Any]:
    """Return a result as a mapping, its schema and version first."""
    data = asdict(result)
    return {"schema": data.pop("schema"), "memfit_version": data.pop("memfit_version"), **data}


class Answer(NamedTuple):
    """A result for programs, and its document for people."""

    result: "DataclassInstance"
    shown: Document

    def data(self) -> Mapping[str, Any]:
        """Return the fields of the result."""
        return as_data(self.result)

    def document(self) -> Document:
        """Return the document."""
        return self.shown
