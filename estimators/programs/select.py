"""Which recorded graph has a call of a config."""

from collections.abc import Mapping, Sequence
from typing import Any

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.programs.expressions import compiled
from memfit.estimators.programs.graph import RecordedClass, Structure, Variant


def features_met(features: Sequence[str], sizes: Mapping[str, Any]) -> str:
    """Return the value of each feature, one digit each."""
    return "".join(str(int(value)) for value in compiled(features)(sizes))


def structure_of(recorded: RecordedClass, variant: Variant, sizes: Mapping[str, Any]) -> Structure:
    """Return the graph that a call of these sizes has.

    Raises:
        UnsupportedError: when no recording has such a call.
    """
    met = features_met(recorded.features, sizes)
    known = [each for each in variant.structures if met in each.when]
    failed: list[str] = []
    for structure in known:
        holds = compiled(structure.guards)(sizes)
        wrong = [t for t, held in zip(structure.guards, holds, strict=True) if not held]
        if not wrong:
            return structure
        failed += wrong
    why = f"recorded only with {failed[0]}" if failed else _named(recorded.features, met)
    raise UnsupportedError(f"a call of {sizes['L']} tokens after {sizes['P']} was {why}")


def _named(features: tuple[str, ...], met: str) -> str:
    pairs = zip(features, met, strict=True)
    return f"not recorded ({', '.join(f'{text}: {value}' for text, value in pairs)})"
