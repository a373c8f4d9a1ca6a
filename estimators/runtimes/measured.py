"""mlx-lm measured: what a real run took, in place of what would be computed."""

from collections.abc import Iterable, Iterator
from typing import ClassVar

from msgspec.structs import replace

from memfit.estimators.base.units import open_size
from memfit.estimators.base.workload import ServerSettings, Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.kv_cache import KVCache
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.terms import Basis, PeakMoment, Phase
from memfit.estimators.runtimes.facets import (
    Commands,
    Images,
    LoadedWeights,
    OwnWeights,
    PerMachine,
    decoding_rows,
    formula_of,
    is_grouped,
    loaded_weights,
)
from memfit.estimators.runtimes.interface import Figure, MemoryFigures, RuntimeModel
from memfit.estimators.runtimes.measurement import Measurement
from memfit.estimators.runtimes.mlx_lm import MlxLm
from memfit.estimators.runtimes.source import Measured, Source


class MeasuredModel(MlxLm, Images, OwnWeights, PerMachine, frozen=True):
    """The figures of a measurement for its own workload, of ``inner`` for every other.

    Figures are medians over the repeats; of a peak, the warm-up's where that is above all.
    """

    inner: RuntimeModel
    measurement: Measurement

    _workspace_basis: ClassVar[tuple[Basis, int]] = ("measured", 0)

    @property
    def source(self) -> Source:
        return Measured()

    def commands(
        self, workload: Workload, model: str, server: ServerSettings | None
    ) -> tuple[str, ...]:
        inner = self.inner.facet(Commands)
        return inner.commands(workload, model, server) if inner else ()

    def resident_bytes(self) -> int:
        """Return what MLX held after loading."""
        return self.measurement.loaded.active_bytes

    def loaded_weights(self) -> LoadedWeights:
        unloaded_bytes = loaded_weights(self.inner).unloaded_bytes
        return LoadedWeights(self.measurement.loaded.weights_bytes, unloaded_bytes)

    def figures(self, workload: Workload) -> MemoryFigures:
        estimated = self.inner.figures(workload)
        if not self._is_of(workload):
            return estimated
        return self._measured(estimated, self.subject.device)

    def _is_of(self, workload: Workload) -> bool:
        # Before 0.3 a batch was measured prefilled as one, whatever its size.
        return workload == self.measurement.workload and not self.is_grouped(workload)

    def is_grouped(self, workload: Workload) -> bool:
        return is_grouped(self.inner, workload)

    def decoding_rows(self, workload: Workload) -> int:
        return decoding_rows(self.inner, workload)

    def least_bytes(self, workload: Workload) -> int:
        """Return nothing: a run may have taken less than what is computed."""
        return 0

    def basis(self, figure: Figure, workload: Workload) -> tuple[Basis, int]:
        if figure == "workspace" and not self._is_of(workload):
            return self.inner.basis(figure, workload)
        return self._workspace_basis

    def formula(self) -> RuntimeModel:
        """Return what answers many workloads quickly: nothing else was measured."""
        return formula_of(self.inner)

    def comparing(self, *workloads: Workload) -> RuntimeModel:
        """Return the estimate: one workload was measured."""
        return self.inner

    def _assumptions(self, workload: Workload) -> Iterator[str]:
        """Yield how it was measured, and what an estimate assumes."""
        taken = self.measurement
        peaks = [run.peak_bytes for run in taken.runs]
        spread = open_size(max(peaks) - min(peaks))
        runs = f"the median of {len(peaks)} runs, {spread} apart" if len(peaks) > 1 else "one run"
        yield (
            f"measured on {taken.measured_at[:10]} on {taken.device} with mlx {taken.mlx_version}"
            f" and {self.runtime.name} {taken.mlx_vlm_version or taken.mlx_lm_version}: {runs}"
            f" ({taken.id}); --method formula ignores it"
        )
        yield from super()._assumptions(workload)

    def _notes(self, workload: Workload, figures: MemoryFigures) -> Iterator[Note]:
        """Yield a note for each figure that a run contradicts by more than the stated error.

        Weights, caches and states are stated to the byte, the peak within its workspace's error.
        """
        how, percent = self.inner.source.method, self.inner._workspace_basis[1]
        estimated = self.inner.figures(workload)
        error_bytes = estimated.moment.workspace_bytes * percent // 100
        here, there = self.loaded_weights(), loaded_weights(self.inner)
        for name, measured, computed, allowed in (
            ("loaded weights", here.loaded_bytes, there.loaded_bytes, 0),
            ("KV cache", figures.kv.nbytes, estimated.kv.nbytes, 0),
            ("recurrent state", figures.ssm_bytes, estimated.ssm_bytes, 0),
            ("peak", figures.moment.nbytes, estimated.moment.nbytes, error_bytes),
        ):
            if abs(measured - computed) > allowed:
                stated = f", stated within {allowed}" if allowed else ""
                text = f"{name}: measured {measured} bytes, {how} {computed}{stated}"
                text += "; the measured is shown"
                yield Note("warning", "methods-differ", text)

    def _measured(self, estimated: MemoryFigures, device: Device | None) -> MemoryFigures:
        runs = self.measurement.runs
        kv: KVCache = replace(
            estimated.kv,
            nbytes=_median(run.kv_bytes for run in runs),
            held_bytes=_median(run.kv_held_bytes for run in runs),
        )
        ssm_bytes = _median(run.ssm_bytes for run in runs)
        peak_bytes, prefill, decode = (
            _peak(self.measurement, name)
            for name in ("peak_bytes", "prefill_peak_bytes", "decode_peak_bytes")
        )
        phase: Phase = "prefill" if prefill >= decode else "decode"
        held = [nbytes for run in runs if (nbytes := run.value("held_bytes")) is not None]
        kept = self.resident_bytes() + kv.nbytes + ssm_bytes
        peaks = ", ".join(str(run.peak_bytes) for run in runs)
        is_first = peak_bytes > max(run.peak_bytes for run in runs)
        source = "the warm-up's, above" if is_first else "the median of"
        moment: PeakMoment = replace(
            estimated.moment,
            phase=phase,
            nbytes=peak_bytes,
            workspace_bytes=max(0, peak_bytes - kept),
            largest_buffer_bytes=_granted(estimated.moment.largest_buffer_bytes, device),
            explanation=(f"peak = {peak_bytes} bytes, {source} measured {peaks}",),
            prefill_bytes=prefill,
            decode_bytes=decode,
            held_bytes=max(held) if held else None,
        )
        # A run is measured from after the load on.
        load = estimated.moment.nbytes if estimated.moment.phase == "load" else 0
        return MemoryFigures(kv, ssm_bytes, moment.with_load(load))


def _peak(taken: Measurement, name: str) -> int:
    """The median of a peak, or the warm-up's where it is above all: a first request takes it."""
    first, *peaks = (run.value(name) or 0 for run in taken.all_runs)
    if taken.warm_up is None:
        peaks.append(first)
    return first if first > max(peaks) else _median(peaks)


def _median(values: Iterable[int]) -> int:
    """The middle one, the lower of two; importing statistics would cost every estimate."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def _granted(largest_bytes: int, device: Device | None) -> int:
    """The run went through: no allocation of it was above what the device gives."""
    limit = device.max_buffer_bytes if device else None
    return largest_bytes if limit is None else min(largest_bytes, limit)
