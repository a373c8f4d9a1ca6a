"""What a real run took in place of what would be computed, as an engine around another."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from memfit.estimators.arch.model import Model
from memfit.estimators.base.records import record
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Backend, Device
from memfit.estimators.mlx.kv_cache import KVCache
from memfit.estimators.results.estimate import Basis, Phase
from memfit.estimators.runtimes.interface import Figures, RuntimeModel
from memfit.estimators.weights.footprint import WeightFootprint
from memfit.estimators.workspace import PeakMoment

if TYPE_CHECKING:
    from memfit.estimators.runtimes.measurement import Measurement


@record(frozen=True, slots=True)
class MeasuredEngine:
    """The figures of a measurement for its own workload, of ``inner`` for every other.

    Figures are medians over the repeats.
    """

    inner: RuntimeModel
    measurement: "Measurement"
    workspace_basis: tuple[Basis, int] = ("measured", 0)

    @property
    def runtime(self) -> str:
        """The name of the runtime that was measured."""
        return self.inner.runtime

    def resident_bytes(self, footprint: WeightFootprint, backend: Backend) -> int:
        """Return what MLX held after loading."""
        return self.measurement.loaded.active_bytes

    def figures(
        self, model: Model, footprint: WeightFootprint, workload: Workload, device: Device | None
    ) -> Figures:
        """Return what a workload took."""
        estimated = self.inner.figures(model, footprint, workload, device)
        if workload != self.measurement.workload:
            return estimated
        return self._measured(estimated, device)

    def _measured(self, estimated: Figures, device: Device | None) -> Figures:
        runs = self.measurement.runs
        kv: KVCache = replace(
            estimated.kv,
            nbytes=_median(run.kv_bytes for run in runs),
            held_bytes=_median(run.kv_held_bytes for run in runs),
        )
        ssm_bytes = _median(run.ssm_bytes for run in runs)
        peak_bytes = _median(run.peak_bytes for run in runs)
        prefill = _median(run.prefill_peak_bytes for run in runs)
        decode = _median(run.decode_peak_bytes for run in runs)
        phase: Phase = "prefill" if prefill >= decode else "decode"
        there = self.measurement.loaded.active_bytes + kv.nbytes + ssm_bytes
        peaks = ", ".join(str(run.peak_bytes) for run in runs)
        moment: PeakMoment = replace(
            estimated.moment,
            phase=phase,
            nbytes=peak_bytes,
            workspace_bytes=max(0, peak_bytes - there),
            largest_buffer_bytes=_granted(estimated.moment.largest_buffer_bytes, device),
            explanation=(f"peak = {peak_bytes} bytes, the median of measured {peaks}",),
            prefill_bytes=prefill,
            decode_bytes=decode,
        )
        return Figures(kv, ssm_bytes, moment)


def _median(values: Iterable[int]) -> int:
    """The middle one, the lower of two; importing statistics would cost every estimate."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def _granted(largest_bytes: int, device: Device | None) -> int:
    """The run went through: no allocation of it was above what the device gives."""
    limit = device.max_buffer_bytes if device else None
    return largest_bytes if limit is None else min(largest_bytes, limit)
