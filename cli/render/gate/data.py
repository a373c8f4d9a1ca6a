"""A gate's report as JSON: the fields of the report, nothing added or left out."""

import json
from dataclasses import asdict

from memfit.estimators.gate.report import Report


def to_json(report: Report) -> str:
    """Return the report as JSON text that ends with a line feed."""
    data = asdict(report)
    ordered = {"schema": data.pop("schema"), **data}
    return json.dumps(ordered, indent=2, ensure_ascii=False) + "\n"
