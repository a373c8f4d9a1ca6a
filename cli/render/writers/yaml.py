"""YAML with the fields of the JSON."""

import yaml

from memfit.cli.render.writers.json import HasResult
from memfit.estimators.results.result import plain


def write(view: HasResult, *, to_file: bool) -> str:
    """Return the view's result as YAML text."""
    data = plain(view.result)
    return str(yaml.safe_dump(data, sort_keys=False, width=100))
