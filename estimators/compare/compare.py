"""Models side by side: the same figures under the same conditions, and a matrix of verdicts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TypeVar

from memfit.estimators.arch.quantization import Quantization
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.results.comparison import (
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
from memfit.estimators.base.errors import UnreachableError, UnsupportedError
from memfit.estimators.sizing.estimate import device_summary, estimate, workload_notes
from memfit.estimators.machine.device import Device
from memfit.estimators.runtimes.foundry import FoundrySettings
from memfit.estimators.runtimes.registry import Runtime
from memfit.estimators.runtimes.budget import judge
from memfit.estimators.base.records import record
from memfit.estimators.results.estimate import Basis, Estimate, RuntimeSummary, WorkloadSummary
from memfit.estimators.compare.axes import Axis, Scenario, check_axes, scenarios
from memfit.estimators.sizing.sized_model import Sizing, size
from memfit.estimators.base.units import Units
from memfit.estimators.base.version import __version__
from memfit.estimators.base.workload import Workload

Answer = TypeVar("Answer")
_Form = tuple[Quantization | None, int]  # what decides a sizing but for the device
_DEFAULTS = ("prefill_step", "kv_bits", "kv_group_size", "quantized_kv_start")


def attempt(make: Callable[[], Answer]) -> Answer | Undecided:
    """Return what ``make`` returns, or why it cannot be decided; bad input still raises."""
    try:
        return make()
    except (UnsupportedError, UnreachableError) as error:
        return Undecided(error.slug, str(error))


@record(frozen=True, slots=True)
class Under:
    """A runtime to size under; ``asked`` are the workload's fields that are not its defaults."""

    rules: Runtime
    settings: FoundrySettings | None = None
    asked: frozenset[str] = frozenset()

    def workload(self, base: Workload) -> Workload:
        """Return a workload with the runtime's own defaults where nothing was asked for."""
        own = {name: getattr(self.rules, name) for name in _DEFAULTS if name not in self.asked}
        return replace(base, **own)


@dataclass(slots=True)
class Candidate:
    """A model to compare: read once, sized once for each conversion and device.

    ``under`` is the runtime where runtimes are compared.
    """

    label: str
    checkpoint: Checkpoint | Undecided
    under: Under | None = None
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
    settings: FoundrySettings | None = None,
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
    plain = Under(runtime, settings, frozenset(_DEFAULTS))
    ready = [_ready(candidate, first, plain) for candidate in candidates]
    estimates = [_estimate(one, units) for one in ready]
    return Comparison(
        memfit_version=__version__,
        workload=WorkloadSummary(**asdict(first.workload)),
        runtime=RuntimeSummary(runtime.name, runtime.version),
        device=device_summary(first.device) if first.device else None,
        quantize=first.quantize,
        margin_bytes=first.margin_bytes,
        models=tuple(
            _compared(candidate, result)
            for candidate, result in zip(candidates, estimates, strict=True)
        ),
        figures=tuple(_figures(estimates)),
        matrix=_matrix(candidates, axes, combinations, plain) if axes else None,
    )


@record(frozen=True, slots=True)
class _Ready:
    """A model under a runtime with the workload it is asked."""

    sizing: Sizing
    workload: Workload
    rules: Runtime


def _ready(candidate: Candidate, scenario: Scenario, plain: Under) -> _Ready | Undecided:
    sizing = candidate.sizing(scenario)
    if isinstance(sizing, Undecided):
        return sizing
    under = candidate.under or plain
    moved = attempt(lambda: sizing.under(under.rules, under.settings))
    if isinstance(moved, Undecided):
        return moved
    return _Ready(moved, under.workload(scenario.workload), under.rules)


def _estimate(ready: _Ready | Undecided, units: Units) -> Estimate | Undecided:
    if isinstance(ready, Undecided):
        return ready
    return attempt(lambda: estimate(ready.sizing, ready.workload, runtime=ready.rules, units=units))


def _compared(candidate: Candidate, result: Estimate | Undecided) -> Compared:
    label = candidate.label
    if isinstance(result, Undecided):
        return Compared(label=label, undecided=result)
    return Compared(
        label=label,
        runtime=result.runtime if candidate.under else None,
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
    plain: Under,
) -> Matrix:
    return Matrix(
        axes={axis.name: tuple(setting.value for setting in axis.settings) for axis in axes},
        cells=tuple(
            _cell(candidate, settings, scenario, plain)
            for settings, scenario in combinations
            for candidate in candidates
        ),
    )


def _cell(
    candidate: Candidate,
    settings: dict[str, SettingValue],
    scenario: Scenario,
    plain: Under,
) -> Cell:
    ready = _ready(candidate, scenario, plain)
    if isinstance(ready, Undecided):
        return Cell(settings=settings, model=candidate.label, undecided=ready)
    sizing = ready.sizing
    need = attempt(lambda: sizing.need(ready.workload))
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
        notes=tuple(workload_notes(sizing, ready.workload)),
    )
