"""Models side by side: the same figures under the same conditions, and a matrix of verdicts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from memfit.estimators.arch.quantization import Quantization
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.comparison import (
    Cell,
    Compared,
    Comparison,
    Difference,
    Figure,
    Matrix,
    SettingValue,
    Undecided,
    Value,
)
from memfit.estimators.errors import UnreachableError, UnsupportedError
from memfit.estimators.estimate import device_summary, estimate, workload_notes
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.runtime import Runtime
from memfit.estimators.planning.budget import judge
from memfit.estimators.result import Basis, Estimate, RuntimeSummary, WorkloadSummary
from memfit.estimators.scenario import Axis, Scenario, check_axes, scenarios
from memfit.estimators.sizing import Sizing, size
from memfit.estimators.units import Units
from memfit.estimators.version import __version__

Answer = TypeVar("Answer")
_Form = tuple[Quantization | None, int]  # what decides a sizing but for the device


def attempt(make: Callable[[], Answer]) -> Answer | Undecided:
    """Return what ``make`` returns, or why it cannot be decided; bad input still raises."""
    try:
        return make()
    except (UnsupportedError, UnreachableError) as error:
        return Undecided(error.slug, str(error))


@dataclass(slots=True)
class Candidate:
    """A model to compare: read once, sized once for each conversion and device."""

    label: str
    checkpoint: Checkpoint | Undecided
    _sized: dict[_Form, Sizing | Undecided] = field(default_factory=dict)
    _placed: dict[tuple[_Form, Device | None], Sizing] = field(default_factory=dict)

    def sizing(self, scenario: Scenario) -> Sizing | Undecided:
        """Return the sizing for a scenario's conversion and device.

        Raises:
            InputError: when the checkpoint is damaged or has no config.
        """
        form, device = (scenario.quantize, scenario.margin_bytes), scenario.device
        if form not in self._sized:
            self._sized[form] = self._size(*form)
        sized = self._sized[form]
        if isinstance(sized, Undecided):
            return sized
        if (form, device) not in self._placed:
            self._placed[form, device] = sized.on(device)
        return self._placed[form, device]

    def _size(self, quantize: Quantization | None, margin_bytes: int) -> Sizing | Undecided:
        checkpoint = self.checkpoint
        if isinstance(checkpoint, Undecided):
            return checkpoint
        return attempt(
            lambda: size(checkpoint, device=None, margin_bytes=margin_bytes, quantize=quantize)
        )


def compare(
    candidates: Sequence[Candidate],
    base: Scenario,
    axes: Sequence[Axis] = (),
    *,
    runtime: Runtime,
    units: Units = Units.GB,
) -> Comparison:
    """Return the models side by side, and every combination of the axes when there are any.

    The figures are those of the first combination, so that they agree with the matrix. A model
    or a cell that cannot be decided says why in place of its figures.

    Raises:
        InputError: when a checkpoint is damaged, or a combination is out of range.
    """
    check_axes(axes, len(candidates))
    combinations = list(scenarios(base, axes))
    first = combinations[0][1]
    estimates = [_estimate(candidate, first, runtime, units) for candidate in candidates]
    return Comparison(
        memfit_version=__version__,
        workload=WorkloadSummary(**asdict(first.workload)),
        runtime=RuntimeSummary(runtime.name, runtime.version),
        device=device_summary(first.device) if first.device else None,
        quantize=first.quantize,
        margin_bytes=first.margin_bytes,
        models=tuple(
            _compared(candidate.label, result)
            for candidate, result in zip(candidates, estimates, strict=True)
        ),
        figures=tuple(_figures(estimates)),
        matrix=_matrix(candidates, axes, combinations) if axes else None,
    )


def _estimate(
    candidate: Candidate, scenario: Scenario, runtime: Runtime, units: Units
) -> Estimate | Undecided:
    sizing = candidate.sizing(scenario)
    if isinstance(sizing, Undecided):
        return sizing
    return attempt(lambda: estimate(sizing, scenario.workload, runtime=runtime, units=units))


def _compared(label: str, result: Estimate | Undecided) -> Compared:
    if isinstance(result, Undecided):
        return Compared(label=label, undecided=result)
    return Compared(
        label=label,
        model=result.model,
        needed_bytes=result.peak_bytes + result.components.margin.bytes,
        verdict=result.verdict,
        exceeded=result.exceeded,
        assumptions=result.assumptions,
        notes=result.notes,
    )


def _figures(estimates: Sequence[Estimate | Undecided]) -> Iterator[Figure]:
    columns = [
        {} if isinstance(result, Undecided) else dict(_amounts(result)) for result in estimates
    ]
    names = {name: None for column in columns for name in column}
    for name in names:
        amounts = [column.get(name) for column in columns]
        if name.startswith("weights.") and not any(amount and amount[0] for amount in amounts):
            continue
        values = (_value(amounts[0], None), *(_value(a, amounts[0]) for a in amounts[1:]))
        yield Figure(name, "tokens" if name == "recommended_context" else "bytes", values)


def _amounts(result: Estimate) -> Iterator[tuple[str, tuple[int, Basis] | None]]:
    """The figures that are compared, in their order; every model has the same names."""
    parts = result.components
    weights, kv, workspace = parts.weights, parts.kv, parts.workspace
    yield "weights", (weights.bytes, weights.basis)
    for part, nbytes in weights.by_part.items():
        yield f"weights.{part}", (nbytes, weights.basis)
    yield "resident_weights", (weights.resident_bytes, weights.basis)
    yield "kv_per_token", (kv.bytes_per_token, kv.basis)
    yield "kv", (kv.bytes, kv.basis)
    yield "state", (parts.ssm.bytes, parts.ssm.basis)
    yield "workspace", (workspace.bytes, workspace.basis)
    basis: Basis = "bound" if weights.basis == "bound" else "derived"
    yield "peak", (result.peak_bytes, basis)
    context = result.recommendation.context_tokens
    yield "recommended_context", None if context is None else (context, basis)


def _value(amount: tuple[int, Basis] | None, first: tuple[int, Basis] | None) -> Value | None:
    if amount is None:
        return None
    value, basis = amount
    return Value(value, basis, difference(value, first[0]) if first else None)


def difference(value: int, first: int) -> Difference:
    """Return what ``value`` is above ``first``, with hundredths of a percent, halves away from 0.

    >>> difference(3, 2), difference(1999, 2000)
    (Difference(amount=1, percent=50.0), Difference(amount=-1, percent=-0.05))
    """
    amount = value - first
    if not first:
        return Difference(amount, None if amount else 0.0)
    hundredths = (2 * 10_000 * abs(amount) + first) // (2 * first)
    return Difference(amount, (hundredths if amount >= 0 else -hundredths) / 100)


def _matrix(
    candidates: Sequence[Candidate],
    axes: Sequence[Axis],
    combinations: Sequence[tuple[dict[str, SettingValue], Scenario]],
) -> Matrix:
    return Matrix(
        axes={axis.name: tuple(setting.value for setting in axis.settings) for axis in axes},
        cells=tuple(
            _cell(candidate, settings, scenario)
            for settings, scenario in combinations
            for candidate in candidates
        ),
    )


def _cell(candidate: Candidate, settings: dict[str, SettingValue], scenario: Scenario) -> Cell:
    sizing = candidate.sizing(scenario)
    if isinstance(sizing, Undecided):
        return Cell(settings=settings, model=candidate.label, undecided=sizing)
    need = attempt(lambda: sizing.need(scenario.workload))
    if isinstance(need, Undecided):
        return Cell(settings=settings, model=candidate.label, undecided=need)
    verdict, exceeded = judge(need, scenario.device)
    return Cell(
        settings=settings,
        model=candidate.label,
        verdict=verdict,
        exceeded=exceeded,
        peak_bytes=need.peak_bytes - sizing.margin_bytes,
        needed_bytes=need.peak_bytes,
        working_set_bytes=scenario.device.working_set_bytes if scenario.device else None,
        notes=tuple(workload_notes(sizing, scenario.workload)),
    )
