"""Pair measured figures with estimated ones; plain arithmetic on bytes."""

from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

from memfit.estimators.base.workload import Workload
from memfit.estimators.mlx.kv_cache import prefilled_kv_cache
from memfit.estimators.results.estimate import Basis
from memfit.estimators.runtimes.measurement import Loaded, Run
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.probes.result import Speed, TuneFigure

NAMES = (
    "weights",
    "active",
    "kv",
    "kv_held",
    "ssm",
    "prefill_kv",
    "prefill_kv_held",
    "prefill_ssm",
    "prefill_peak",
    "decode_peak",
    "peak",
    "workspace",
    "unaccounted",
    "swift_workspace",
    "process",
)

# Figure name to one value for each repeat.
MeasuredValues = Mapping[str, Sequence[int]]


class EstimatedFigure(NamedTuple):
    """One figure of a sized model."""

    nbytes: int
    basis: Basis


def estimated_figures(sized: SizedModel, workload: Workload) -> dict[str, EstimatedFigure]:
    """Return the estimated figures of a workload, by name.

    Raises:
        UnsupportedError: when the runtime cannot run the workload.
    """
    figures, footprint = sized.figures_for(workload), sized.footprint
    cache_basis, _ = sized.runtime_model.basis("cache", workload)
    peak_basis, _ = sized.workspace_basis(workload)
    moment, caches = figures.moment, figures.kv.nbytes + figures.ssm_bytes
    found = {
        "weights": EstimatedFigure(footprint.loaded_bytes, footprint.basis),
        "active": EstimatedFigure(sized.resident_bytes, footprint.basis),
        "kv": EstimatedFigure(figures.kv.nbytes, cache_basis),
        "kv_held": EstimatedFigure(figures.kv.held_bytes, cache_basis),
        "ssm": EstimatedFigure(figures.ssm_bytes, cache_basis),
        # A run is measured from after the load on.
        "peak": EstimatedFigure(moment.run_bytes, peak_basis),
        "workspace": EstimatedFigure(
            moment.run_bytes - footprint.loaded_bytes - caches, peak_basis
        ),
    }
    prefilled = prefilled_kv_cache(sized.model, workload)
    found["prefill_kv"] = EstimatedFigure(prefilled.nbytes, "exact")
    found["prefill_kv_held"] = EstimatedFigure(prefilled.held_bytes, "exact")
    if workload.prompt_tokens > 1:
        found["prefill_ssm"] = EstimatedFigure(figures.ssm_bytes, cache_basis)
    phases = {"prefill_peak": moment.prefill_bytes, "decode_peak": moment.decode_bytes}
    return found | {
        name: EstimatedFigure(b, peak_basis) for name, b in phases.items() if b is not None
    }


def measured_figures(
    loaded: Loaded | None, runs: Sequence[Run], swift_bytes: int | None
) -> dict[str, list[int]]:
    """Return the measured values, by name; a figure without a value is left out."""
    if loaded is None:
        return {}
    found: dict[str, list[int]] = {
        "weights": [loaded.weights_bytes],
        "active": [loaded.active_bytes],
        "prefill_kv": [run.prefill_kv_bytes for run in runs],
        "prefill_kv_held": [run.prefill_kv_held_bytes for run in runs],
        "prefill_ssm": [run.prefill_ssm_bytes for run in runs],
        "kv": [run.kv_bytes for run in runs],
        "kv_held": [run.kv_held_bytes for run in runs],
        "ssm": [run.ssm_bytes for run in runs],
        "prefill_peak": [run.prefill_peak_bytes for run in runs],
        "decode_peak": [run.decode_peak_bytes for run in runs],
        "peak": [run.peak_bytes for run in runs],
        "workspace": [
            run.peak_bytes - loaded.weights_bytes - run.kv_bytes - run.ssm_bytes for run in runs
        ],
        "swift_workspace": [] if swift_bytes is None else [swift_bytes],
        "process": [run.process_bytes for run in runs if run.process_bytes is not None],
    }
    return {name: values for name, values in found.items() if values}


def partial_figures(figures: Mapping[str, int]) -> dict[str, list[int]]:
    """Return the figures received from a run before it stopped, by name."""
    found = {name: figures.get(f"{name}_bytes") for name in NAMES}
    return {name: [nbytes] for name, nbytes in found.items() if nbytes is not None}


def paired_figures(
    measured: MeasuredValues, estimated: Mapping[str, EstimatedFigure]
) -> tuple[TuneFigure, ...]:
    """Return every figure that is measured or estimated, in the order of `NAMES`."""
    values: MeasuredValues = {**measured, **_unaccounted(measured, estimated)}
    return tuple(
        _figure(name, values.get(name, ()), estimated.get(name))
        for name in NAMES
        if name in values or name in estimated
    )


def median_speed(workload: Workload, runs: Sequence[Run]) -> Speed | None:
    """Return the medians of the repeats, None when there is no run."""
    if not runs:
        return None
    firsts = [run.first_token_ns for run in runs]
    prefill = [workload.prompt_tokens * 1e9 / max(1, first) for first in firsts]
    steps = workload.max_tokens - 1
    decode = [steps * 1e9 / run.decode_ns for run in runs if steps > 0 and run.decode_ns]
    return Speed(
        first_token_ns=median_low(firsts),
        prefill_tokens_per_second=median_low(prefill),
        decode_tokens_per_second=median_low(decode) if decode else None,
        first_token_spread_ns=max(firsts) - min(firsts),
        prefill_spread=max(prefill) - min(prefill),
        decode_spread=max(decode) - min(decode) if decode else None,
    )


def _figure(name: str, values: Sequence[int], estimate: EstimatedFigure | None) -> TuneFigure:
    median = median_low(values) if values else None
    return TuneFigure(
        name=name,
        estimated_bytes=estimate.nbytes if estimate else None,
        basis=estimate.basis if estimate else None,
        measured_bytes=median,
        difference_bytes=None if median is None or not estimate else median - estimate.nbytes,
        spread_bytes=max(values, default=0) - min(values, default=0),
    )


def _unaccounted(
    measured: MeasuredValues, estimated: Mapping[str, EstimatedFigure]
) -> dict[str, list[int]]:
    """The measured peak minus measured weights and caches, minus the estimated workspace."""
    if "peak" not in measured or "peak" not in estimated:
        return {}
    workspace = estimated["peak"].nbytes - sum(
        estimated[name].nbytes for name in ("active", "kv", "ssm")
    )
    runs = zip(measured["peak"], measured["kv"], measured["ssm"], strict=True)
    active = measured["active"][0]
    return {"unaccounted": [peak - active - kv - ssm - workspace for peak, kv, ssm in runs]}
