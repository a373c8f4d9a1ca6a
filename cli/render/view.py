"""A result in the forms that writers ask for."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec import Struct, to_builtins

from memfit.cli.render.document import Document


def as_data(result: Struct) -> dict[str, Any]:
    """Return a result as a mapping, its schema and version first."""
    data: dict[str, Any] = to_builtins(result)
    return {"schema": data.pop("schema"), "memfit_version": data.pop("memfit_version"), **data}


class Answer(NamedTuple):
    """A result for programs, and its document for people."""

    result: Struct
    shown: Document

    def data(self) -> Mapping[str, Any]:
        """Return the fields of the result."""
        return as_data(self.result)

    def document(self) -> Document:
        """Return the document."""
        return self.shown
