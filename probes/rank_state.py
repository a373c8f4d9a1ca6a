"""What a rank of a measured run sends to the process that started it."""

from typing import Annotated

from msgspec import Meta, Struct

from memfit.estimators.base.quantities import Count
from memfit.estimators.runtimes.measurement import Loaded, Run


class RankError(Struct, frozen=True):
    """Why a rank cannot go on."""

    kind: str
    """The name of its class."""
    text: str


class RankState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far a rank is, whole in every message.

    Messages of several ranks are merged as bytes arrive: one that is lost does no harm.
    """

    rank: Count
    pid: Annotated[int, Meta(ge=1)]
    steps: Count = 0
    """Reports of progress so far."""
    connected: bool = False
    loaded: Loaded | None = None
    run: Run | None = None
    error: RankError | None = None

    @property
    def stage(self) -> int:
        """How many of the stages are done: started, connected, loaded, run."""
        return 1 + self.connected + (self.loaded is not None) + (self.run is not None)
