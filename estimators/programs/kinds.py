"""Of which kind each layer of a config is."""

from collections.abc import Mapping
from typing import Any

from memfit.estimators.programs.expressions import compiled, evaluate


def layer_kinds(
    kinds: tuple[str, ...], layer_count: str, config: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the kind of each layer as text, the values of the expressions ``kinds``.

    >>> layer_kinds(("i < dense",), "layers", {"layers": 3, "dense": 1})
    ('1', '0', '0')

    Raises:
        ExpressionError: when the config does not say it.
    """
    count, values = evaluate(layer_count, config), compiled(kinds)
    return tuple(
        "-".join(_shown(value) for value in values({**config, "i": layer}))
        for layer in range(count)
    )


def _shown(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
