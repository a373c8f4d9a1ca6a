"""Results as JSON and YAML: the fields of the result, nothing added or left out."""

import json
from dataclasses import asdict
from typing import Any

from memfit.estimators.results.estimate import Estimate, Plots


def to_json(result: Estimate, plots: Plots | None = None, explanation: tuple[str, ...] = ()) -> str:
    """Return the result as JSON text that ends with a line feed."""
    return json.dumps(as_data(result, plots, explanation), indent=2, ensure_ascii=False) + "\n"


def to_yaml(result: Estimate, plots: Plots | None = None, explanation: tuple[str, ...] = ()) -> str:
    """Return the result as YAML text."""
    import yaml

    # Through JSON: tuples become lists and text enums become text.
    plain = json.loads(to_json(result, plots, explanation))
    return str(yaml.safe_dump(plain, sort_keys=False, width=100))


def as_data(
    result: Estimate, plots: Plots | None = None, explanation: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return the result as the mapping of docs/schema/estimate.schema.json."""
    data = asdict(result)
    ordered = {"schema": data.pop("schema"), **data}
    if ordered["components"]["draft"] is None:
        del ordered["components"]["draft"]
    if plots:
        ordered |= {name: rows for name, rows in asdict(plots).items() if rows}
    if explanation:
        ordered["explanation"] = list(explanation)
    return ordered
