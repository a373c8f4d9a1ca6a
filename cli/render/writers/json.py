"""JSON: the fields of a result, nothing added or left out."""

import json
from collections.abc import Mapping
from typing import Any, Protocol


class HasData(Protocol):
    """What the writers for programs need."""

    def data(self) -> Mapping[str, Any]:
        """Return the result as a mapping."""


def write(view: HasData, *, to_file: bool) -> str:
    """Return the view's data as JSON text that ends with a line feed."""
    return json.dumps(view.data(), indent=2, ensure_ascii=False) + "\n"
