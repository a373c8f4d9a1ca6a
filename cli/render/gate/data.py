"""A gate's report as JSON: the fields of the report, nothing added or left out."""

import json
from dataclasses import asdict

from memfit.estimators.results.gate import GateReport


def to_json(report: GateReport) -> str:
    """Return the report as JSON text that ends with a line feed."""
    data = asdict(report)
    ordered = {"schema": data.pop("schema"), **data}
    return json.dumps(ordered, indent=2, ensure_ascii=False) + "\n"
