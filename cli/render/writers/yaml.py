"""YAML with the fields of the JSON."""

import json

import yaml

from memfit.cli.render.writers import json as json_writer


def write(view: json_writer.HasData, *, to_file: bool) -> str:
    """Return the view's data as YAML text."""
    # Through JSON, so that tuples become lists and enums become strings.
    data = json.loads(json_writer.write(view, to_file=to_file))
    return str(yaml.safe_dump(data, sort_keys=False, width=100))
