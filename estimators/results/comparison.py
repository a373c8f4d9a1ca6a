"""A comparison as data: renderers show it and compute nothing."""

from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

from msgspec import Meta, Struct

from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.errors import UnreachableError, UnsupportedError
from memfit.estimators.base.units import Bytes, Count, NonEmpty, Positive, one_of
from memfit.estimators.base.workload import Workload
from memfit.estimators.results.estimate import (
    DeviceSummary,
    ModelSummary,
    Note,
    RuntimeSummary,
)
from memfit.estimators.results.result import Result
from memfit.estimators.results.terms import Basis, LimitName, Verdict

SettingValue = Count | str | None
AXES = "context max-tokens batch prefill-step kv-bits quantize device memory".split()
AxisName = Annotated[str, one_of(*AXES)]
Answer = TypeVar("Answer")


class Unavailable(Struct, frozen=True):
    """Why there is no figure: the slug of docs/errors.md, and the reason in one line."""

    slug: str
    reason: Annotated[str, Meta(min_length=1)]


def try_or_reason(make: Callable[[], Answer]) -> Answer | Unavailable:
    """Return what ``make`` returns, or why there is no answer; bad input still raises."""
    try:
        return make()
    except (UnsupportedError, UnreachableError) as error:
        return Unavailable(error.slug, str(error))


class Difference(Struct, frozen=True):
    """A figure less the first model's."""

    amount: int
    percent: float | None
    """For display; None where the first model's figure is 0."""


class ComparedValue(Struct, frozen=True):
    """One model's figure."""

    value: Count
    basis: Basis
    difference: Difference | None
    """None for the first model, and where the first model has no such figure."""


class ComparedFigure(Struct, frozen=True):
    """One figure of every model."""

    name: str
    """``weights`` and its parts, ``resident_weights``, ``kv_per_token``, ``kv``, ``state``,
    ``workspace``, ``peak`` or ``recommended_context``."""
    unit: Literal["bytes", "tokens"]
    values: tuple[ComparedValue | None, ...]
    """In the order of the models; None where a model has no such figure."""


class Compared(Struct, frozen=True, kw_only=True):
    """One model; everything but ``label`` and ``undecided`` is empty when it is undecided."""

    label: str
    """The reference to the model, or its runtime's name where runtimes are compared."""
    undecided: Unavailable | None = None
    runtime: RuntimeSummary | None = None
    """None where all models have the runtime of the comparison."""
    model: ModelSummary | None = None
    needed_bytes: Bytes | None = None
    """The peak with the margin, which the verdict is about."""
    verdict: Verdict | None = None
    longest_verdict: Verdict | None = None
    """Of the longest context: tight where something else than its bytes may end it."""
    exceeded: tuple[LimitName, ...] = ()
    assumptions: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()


class ComparedCell(Struct, frozen=True, kw_only=True):
    """One model under one combination of settings."""

    settings: dict[AxisName, SettingValue]
    model: str
    undecided: Unavailable | None = None
    verdict: Verdict | None = None
    exceeded: tuple[LimitName, ...] = ()
    peak_bytes: Bytes | None = None
    needed_bytes: Bytes | None = None
    working_set_bytes: Positive | None = None
    notes: tuple[Note, ...] = ()


class Matrix(Struct, frozen=True):
    """Every combination of the axes for every model, the last axis changing fastest."""

    axes: dict[AxisName, NonEmpty[SettingValue]]
    cells: tuple[ComparedCell, ...]


class Comparison(Result, frozen=True, kw_only=True, tag="memfit.compare/1"):
    """The answer of ``memfit compare``.

    Workload, quantisation and device are those of ``models`` and ``figures``: as given, with the
    first value of each axis of the matrix.
    """

    workload: Workload
    runtime: RuntimeSummary
    device: DeviceSummary | None
    quantize: Quantization | None
    margin_bytes: Bytes
    models: NonEmpty[Compared]
    figures: tuple[ComparedFigure, ...]
    matrix: Matrix | None

    @property
    def has_refusals(self) -> bool:
        """Whether a runtime does not load one of the models."""
        cells = self.matrix.cells if self.matrix else ()
        verdicts = (*(each.verdict for each in self.models), *(cell.verdict for cell in cells))
        return "does_not_load" in verdicts

    @property
    def undecided(self) -> tuple[Unavailable, ...]:
        """Everything without a figure, models first."""
        cells = self.matrix.cells if self.matrix else ()
        found = [model.undecided for model in self.models] + [cell.undecided for cell in cells]
        return tuple(undecided for undecided in found if undecided)
