"""Where a value is in a file."""

from memfit.estimators.base.files import printable

# How a value is reached from the top: names of mappings and indices of sequences.
Place = tuple[str | int, ...]


def key_path(place: Place) -> str:
    """Return a place as messages name it.

    >>> key_path(("runs", 0, "kv_bytes"))
    'runs[0].kv_bytes'
    """
    steps = (f"[{step}]" if isinstance(step, int) else f".{printable(step)}" for step in place)
    return "".join(steps).removeprefix(".")
