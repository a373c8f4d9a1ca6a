"""YAML with the fields of the JSON."""

import yaml
from msgspec import to_builtins

from memfit.cli.render.writers.json import HasResult


def write(view: HasResult, *, to_file: bool) -> str:
    """Return the view's result as YAML text."""
    data = to_builtins(view.result, builtin_types=())
    return str(yaml.safe_dump(data, sort_keys=False, width=100))
