"""What changed between the figures of a baseline and those of now."""

from collections.abc import Iterator

from memfit.estimators.base.records import record
from memfit.estimators.gate.figures import Figures

COMPARED = (
    "weights_bytes",
    "kv_bytes_per_token",
    "state_bytes",
    "workspace_bytes",
    "peak_bytes",
    "context_tokens",
    "expert_capacity",
)


@record(frozen=True, slots=True)
class Change:
    """One figure before and now; None where there is none. ``by`` is now less before."""

    figure: str
    before: int | None
    now: int | None
    by: int | None


def changes(before: Figures, now: Figures) -> Iterator[Change]:
    """Yield the compared figures, those that did not change as well."""
    for name in COMPARED:
        old, new = getattr(before, name), getattr(now, name)
        yield Change(name, old, new, None if old is None or new is None else new - old)
