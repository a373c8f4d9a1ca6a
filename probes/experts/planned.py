"""What `memfit plan experts` computes for a run with a part of the experts."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from memfit.estimators.base import dtypes
from memfit.estimators.base.errors import MemfitError
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import Device
from memfit.estimators.runtimes.interface import MemoryFigures
from memfit.estimators.sizing.measurement_lookup import workload_words
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.estimators.weights.expert_slots import Inventory, inventory, layered_startup_bytes
from memfit.probes.difference_report import model_line, report_lines
from memfit.probes.experiments.base import sized_here
from memfit.probes.experts.result import ExpertsPoint, PlannedFigure

# The table from expert to slot has 4 bytes for each expert, the one of the missing has 1.
_TABLE_BYTES = 5
_HALF_BYTES, _FLOAT32_BYTES = 2, 4


class PlannedBytes(NamedTuple):
    weights: int | None
    startup: int | None
    prefill_peak: int | None
    decode_peak: int | None

    @property
    def need(self) -> int:
        """The most in use at any time."""
        return max(self.startup or 0, self.prefill_peak or 0, self.decode_peak or 0)


class Plan(NamedTuple):
    """A model and a run, for any number of experts."""

    experts: Inventory
    figures: MemoryFigures
    copies: int
    """How many times the bytes of the kept experts a step allocates to compute with them."""
    model: str
    """Its type, data type and layers."""
    percent: int
    """The stated error of a peak."""

    def at(self, capacities: Sequence[int]) -> PlannedBytes:
        """Return the bytes with these numbers of experts, one a layer."""
        experts = self.experts
        weights = experts.non_expert_bytes + experts.held_bytes(capacities)
        less = experts.non_expert_bytes + experts.expert_bytes - weights
        moment = self.figures.moment
        more = _TABLE_BYTES * sum(layer.experts for layer in experts.layers)
        if less:
            more += experts.slot_bytes  # an expert while it is read
        more += self.copies * experts.held_bytes(capacities)
        return PlannedBytes(
            weights,
            layered_startup_bytes(experts, capacities),
            _less(moment.prefill_bytes, less, more),
            _less(moment.decode_bytes, less, more),
        )


def plan_of(checkpoint: Checkpoint, device: Device, workload: Workload) -> Plan | str:
    """Return the plan, or why there is none."""
    try:
        sized = sized_here(checkpoint, device, workload, margin_bytes=0)
        experts = inventory(sized.model, checkpoint.tensors, sized.footprint)
        return Plan(
            experts=experts,
            figures=sized.figures_for(workload),
            copies=_copies(sized, device),
            model=model_line(sized),
            percent=sized.runtime_model.basis("workspace", workload)[1],
        )
    except MemfitError as error:
        return str(error)


def difference_report(
    plan: Plan, points: Sequence[ExpertsPoint], workload: Workload, versions: Mapping[str, str]
) -> tuple[str, ...]:
    """Return lines to paste into an issue, none when every figure is as stated.

    Weights are stated to the byte, peaks as upper bounds with an error.
    """
    found = (
        f"{point.capacity} of {plan.experts.experts} experts, {name}: planned"
        f" {figure.planned_bytes} bytes, measured {figure.measured_bytes}"
        for point in points
        for name in ("weights", "startup", "prefill_peak", "decode_peak")
        if _is_beyond(figure := getattr(point, name), 0 if name == "weights" else plan.percent)
    )
    return report_lines(versions, plan.model, found, workload_words(workload))


def _is_beyond(figure: PlannedFigure, percent: int) -> bool:
    planned, measured = figure.planned_bytes, figure.measured_bytes
    if planned is None or measured is None:
        return False
    return measured != planned if not percent else 100 * measured > (100 + percent) * planned


def _copies(sized: SizedModel, device: Device) -> int:
    """Return how often 16-bit experts count again on MLX's CPU backend: a bound.

    Its gather_mm takes float32 only (mlx backend/cpu/matmul.cpp, GatherMM::eval_cpu), so that each
    projection is cast to 4 bytes. Nothing is evaluated between layers, and the copies of all can be
    under way at once.
    """
    is_cast = sized.footprint.plan is None and dtypes.nbytes(1, sized.model.dtype) == _HALF_BYTES
    return _FLOAT32_BYTES // _HALF_BYTES if is_cast and device.backend == "cpu" else 0


def _less(peak: int | None, less: int, more: int) -> int | None:
    return None if peak is None else peak - less + more
