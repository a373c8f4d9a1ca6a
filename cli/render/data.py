"""Results as JSON, YAML and CSV: the fields of the result, nothing added or left out."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from memfit.estimators.results.estimate import Estimate, Plots


def as_data(result: "DataclassInstance") -> dict[str, Any]:
    """Return a result as a mapping, its schema and version first."""
    data = asdict(result)
    return {"schema": data.pop("schema"), "memfit_version": data.pop("memfit_version"), **data}


def estimate_data(
    result: "Estimate", plots: "Plots | None", explanation: tuple[str, ...]
) -> dict[str, Any]:
    """Return an estimate as the mapping of docs/schema/estimate.schema.json."""
    data = as_data(result)
    if data["components"]["draft"] is None:
        del data["components"]["draft"]
    if plots:
        data |= {name: rows for name, rows in asdict(plots).items() if rows}
    if explanation:
        data["explanation"] = list(explanation)
    return data


def json_text(data: Mapping[str, Any]) -> str:
    """Return a mapping as JSON text that ends with a line feed."""
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def to_json(result: "DataclassInstance") -> str:
    """Return a result as JSON text."""
    return json_text(as_data(result))


def yaml_text(data: Mapping[str, Any]) -> str:
    """Return a mapping as YAML text."""
    import yaml

    # Through JSON, so that tuples become lists and enums become strings.
    return str(yaml.safe_dump(json.loads(json_text(data)), sort_keys=False, width=100))


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Return rows as CSV text; None becomes an empty cell."""
    import csv
    import io

    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()
