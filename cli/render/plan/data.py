"""Plans as JSON: the fields of the result, nothing added or left out."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def to_json(result: "DataclassInstance") -> str:
    """Return a plan as JSON text, its schema first, that ends with a line feed."""
    data: dict[str, Any] = asdict(result)
    ordered = {"schema": data.pop("schema"), "memfit_version": data.pop("memfit_version"), **data}
    return json.dumps(ordered, indent=2, ensure_ascii=False) + "\n"
