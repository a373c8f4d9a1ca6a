"""The results of ``memfit tune --kit`` and ``memfit compare-kit`` as data."""

from fractions import Fraction
from typing import Annotated

from msgspec import Struct

from memfit.estimators.base.units import Count, Line, NonEmpty, one_of
from memfit.estimators.machine.device import KnownDevice
from memfit.estimators.results.result import Result
from memfit.estimators.results.terms import Basis

KIT = "memfit.kit/1"
NEAR = Fraction(1, 200)
"""The share of an estimate that counts as equal to it."""
CheckUnit = Annotated[str, one_of("bytes", "nanoseconds", "yes")]
CheckStatus = Annotated[str, one_of("measured", "not run", "failed")]


class KitCheck(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One figure of one run: the estimate beside the measurement."""

    subject: Line
    """A model of the kit, or what else is checked."""
    setting: Line
    """What was run."""
    figure: Line
    unit: CheckUnit = "bytes"
    """Of both values; ``yes`` is 1 where the library does what is expected, else 0."""
    status: CheckStatus = "measured"
    reason: Line | None = None
    """Why it was not run, or how it failed: no names and no paths."""
    estimated: Count | None = None
    basis: Basis | None = None
    measured: Count | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """What names it in every kit."""
        return self.subject, self.setting, self.figure

    @property
    def difference(self) -> int | None:
        """The measurement less the estimate."""
        if self.estimated is None or self.measured is None:
            return None
        return self.measured - self.estimated

    @property
    def is_different(self) -> bool:
        """Whether the measurement is off by more than `NEAR`, or above a bound.

        MLX's scalars and the moment of a free move figures by some hundred bytes between runs.
        """
        found = self.difference or 0
        off = max(0, found) if self.basis == "bound" else abs(found)
        return off > NEAR * (self.estimated or 0)


class Kit(Result, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=KIT):
    """What one machine measured; nothing in it names a person, a file or a model of theirs."""

    memfit_version: Line
    mlx_version: Line
    mlx_lm_version: Line
    mlx_vlm_version: Line | None
    system: Line
    """The system and its version."""
    device: KnownDevice
    seconds: Count
    checks: NonEmpty[KitCheck]


class ComparedCheck(Struct, frozen=True, kw_only=True):
    """One check in every kit that has it, None in the others."""

    subject: str
    setting: str
    figure: str
    kits: tuple[KitCheck | None, ...]

    @property
    def is_different(self) -> bool:
        """Whether a kit measured something else than was estimated there."""
        return any(each and each.is_different for each in self.kits)


class KitSummary(Struct, frozen=True, kw_only=True):
    """A kit without its checks."""

    memfit_version: str
    mlx_version: str
    mlx_lm_version: str
    mlx_vlm_version: str | None
    system: str
    device: KnownDevice
    seconds: Count
    measured: Count
    different: Count
    """Checks whose measurement is off by more than half a percent, or above a bound."""
    not_run: Count
    failed: Count


class KitComparison(Result, frozen=True, kw_only=True, tag="memfit.compare-kit/1"):
    """Kits side by side."""

    kits: NonEmpty[KitSummary]
    checks: tuple[ComparedCheck, ...]
    """All checks, in the order of the first kit that has them."""
