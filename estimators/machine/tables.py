"""The data files beside this module: facts about machines and runtimes, each with its source."""

from functools import cache
from importlib import resources
from typing import Any


@cache
def load_table(name: str) -> Any:
    """Return the contents of ``data/<name>.yaml``, from a checkout, a wheel or a zip."""
    import yaml  # not at the top: the command line must start without it

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    file = resources.files("memfit.estimators.machine") / "data" / f"{name}.yaml"
    return yaml.load(file.read_bytes(), Loader=loader)
