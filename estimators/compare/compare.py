"""Models side by side: the same figures under the same conditions, and a matrix of verdicts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TypeVar

from memfit.estimators.base.errors import UnreachableError, UnsupportedError
from memfit.estimators.base.quantization import Quantization
from memfit.estimators.base.records import record
from memfit.estimators.base.units import Units
from memfit.estimators.base.version import __version__
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.compare.axes import Axis, Scenario, check_axes, scenarios
from memfit.estimators.machine.device import Device
from memfit.estimators.results.comparison import (
    Cell,
    Compared,
    Comparison,
    Difference,
    Figure,
    Matrix,
    SettingValue,
    Unavailable,
    Value,
)
from memfit.estimators.results.estimate import Basis, Estimate, RuntimeSummary, WorkloadSummary
from memfit.estimators.runtimes.budget import judge
from memfit.estimators.runtimes.foundry import FoundrySettings
from memfit.estimators.runtimes.registry import Runtime
from memfit.estimators.sizing.estimate import device_summary, estimate, workload_notes
from memfit.estimators.sizing.sized_model import SizedModel, size

Answer = TypeVar("Answer")
_Form = tuple[Quantization | None, int]  # what decides a sizing but for the device
_DEFAULTS = ("prefill_step", "kv_bits", "kv_group_size", "quantized_kv_start")


def try_or_reason(make: Callable[[], Answer]) -> Answer | Unavailable:
    """Return what ``make`` returns, or why it cannot be decided; bad input still raises."""
    try:
        return make()
    except (UnsupportedError, UnreachableError) as error:
        return Unavailable(error.slug, str(error))


@record(frozen=True, slots=True)
class RuntimeChoice:
    """A runtime to size under; ``asked`` are the workload's fields that are not its defaults."""

    rules: Runtime
    settings: FoundrySettings | None = None
    asked: frozenset[str] = frozenset()

    def workload(self, base: Workload) -> Workload:
        """Return a workload with the runtime's own defaults where nothing was asked for."""
        own = {name: getattr(self.rules, name) for name in _DEFAULTS if name not in self.asked}
        return replace(base, **own)


@dataclass(slots=True)
class ComparedModel:
    """A model to compare: read once, sized once for each conversion and device.

    ``under`` is the runtime where runtimes are compared.
    """

    label: str
    checkpoint: Checkpoint | Unavailable
    under: RuntimeChoice | None = None
    _sized: dict[_Form, SizedModel | Unavailable] = field(default_factory=dict)
    _placed: dict[tuple[_Form, Device | None], SizedModel] = field(default_factory=dict)

    def sized(self, scenario: Scenario) -> SizedModel | Unavailable:
        """Return the sizing for a scenario's conversion and device.

        Raises:
            InputError: when the checkpoint is damaged or has no config.
        """
        form, device = (scenario.quantize, scenario.margin_bytes), scenario.device
        if form not in self._sized:
            self._sized[form] = self._size(*form)
        sized = self._sized[form]
        if isinstance(sized, Unavailable):
            return sized
        if (form, device) not in self._placed:
            self._placed[form, device] = sized.on(device)
        return self._placed[form, device]

    def _size(self, quantize: Quantization | None, margin_bytes: int) -> SizedModel | Unavailable:
        checkpoint = self.checkpoint
        if isinstance(checkpoint, Unavailable):
            return checkpoint
        return try_or_reason(
            lambda: size(checkpoint, device=None, margin_bytes=margin_bytes, quantize=quantize)
        )


def compare(
    candidates: Sequence[ComparedModel],
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
    plain = RuntimeChoice(runtime, settings, frozenset(_DEFAULTS))
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

    sized: SizedModel
    workload: Workload
    rules: Runtime


def _ready(
    candidate: ComparedModel, scenario: Scenario, plain: RuntimeChoice
) -> _Ready | Unavailable:
    sized = candidate.sized(scenario)
    if isinstance(sized, Unavailable):
        return sized
    under = candidate.under or plain
    moved = try_or_reason(lambda: sized.with_runtime(under.rules, under.settings))
    if isinstance(moved, Unavailable):
        return moved
    return _Ready(moved, under.workload(scenario.workload), under.rules)


def _estimate(ready: _Ready | Unavailable, units: Units) -> Estimate | Unavailable:
    if isinstance(ready, Unavailable):
        return ready
    return try_or_reason(
        lambda: estimate(ready.sized, ready.workload, runtime=ready.rules, units=units)
    )


def _compared(candidate: ComparedModel, result: Estimate | Unavailable) -> Compared:
    label = candidate.label
    if isinstance(result, Unavailable):
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


def _figures(estimates: Sequence[Estimate | Unavailable]) -> Iterator[Figure]:
    columns = [
        {} if isinstance(result, Unavailable) else dict(_amounts(result)) for result in estimates
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
    candidates: Sequence[ComparedModel],
    axes: Sequence[Axis],
    combinations: Sequence[tuple[dict[str, SettingValue], Scenario]],
    plain: RuntimeChoice,
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
    candidate: ComparedModel,
    settings: dict[str, SettingValue],
    scenario: Scenario,
    plain: RuntimeChoice,
) -> Cell:
    ready = _ready(candidate, scenario, plain)
    if isinstance(ready, Unavailable):
        return Cell(settings=settings, model=candidate.label, undecided=ready)
    sized = ready.sized
    need = try_or_reason(lambda: sized.requirement(ready.workload))
    if isinstance(need, Unavailable):
        return Cell(settings=settings, model=candidate.label, undecided=need)
    verdict, exceeded = judge(need, scenario.device)
    return Cell(
        settings=settings,
        model=candidate.label,
        verdict=verdict,
        exceeded=exceeded,
        peak_bytes=need.peak_bytes - sized.margin_bytes,
        needed_bytes=need.peak_bytes,
        working_set_bytes=scenario.device.working_set_bytes if scenario.device else None,
        notes=tuple(workload_notes(sized, ready.workload)),
    )
