"""Every measured figure, declared once: its name and label, how it is measured and estimated."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median_low
from typing import Annotated, Any, NamedTuple

from msgspec import Struct

from memfit.estimators.base.units import Bytes, one_of
from memfit.estimators.base.workload import Workload
from memfit.estimators.mlx.kv_cache import KVCache, prefilled_kv_cache
from memfit.estimators.results.terms import Basis
from memfit.estimators.runtimes.facets import loaded_weights
from memfit.estimators.runtimes.held import most_held_bytes
from memfit.estimators.runtimes.interface import MemoryFigures
from memfit.estimators.runtimes.measurement import Loaded, Run
from memfit.estimators.sizing.sized_model import SizedModel

# Figure name to one value for each repeat.
MeasuredValues = Mapping[str, Sequence[int]]
SwiftBytes = tuple[int | None, int | None]
"""The workspace and the caches by the rule of mlx-swift-lm's tune, where it was measured."""


class EstimatedFigure(NamedTuple):
    """One figure of a sized model."""

    nbytes: int
    basis: Basis


class RunMoment(NamedTuple):
    """What a run holds at one moment, as the measuring process reads it."""

    caches: list[Any]
    peak: int
    """The most in use since the run began, or since its prompt was read."""
    kv: int
    kv_held: int
    ssm: int
    process: Callable[[], int | None]
    """Returns the resident size of the process."""
    held: int | None = None
    """The most in use and kept for reuse together since the run began, None before its end."""
    footprint: int | None = None
    """The most that macOS has charged the process for, where that was requested."""


class MeasuredRuns(NamedTuple):
    """What was measured of one workload."""

    loaded: Loaded
    runs: Sequence[Run]
    swift: SwiftBytes
    warm_up: Run | None


class EstimatedRun(NamedTuple):
    sized: SizedModel
    figures: MemoryFigures
    prefilled: KVCache
    """The cache after prefill."""
    has_prefill: bool
    cache_basis: Basis
    peak_basis: Basis

    def weights(self, nbytes: int) -> EstimatedFigure:
        return EstimatedFigure(nbytes, self.sized.footprint.basis)

    def cache(self, nbytes: int) -> EstimatedFigure:
        """Return a figure of the caches when the workload ends."""
        return EstimatedFigure(nbytes, self.cache_basis)

    def peak(self, nbytes: int | None) -> EstimatedFigure | None:
        return None if nbytes is None else EstimatedFigure(nbytes, self.peak_basis)

    @property
    def run_bytes(self) -> int:
        """The peak of the run: a measurement begins when the model is loaded."""
        return self.figures.moment.run_bytes

    @property
    def held_bytes(self) -> int | None:
        """The most that MLX holds in the run, None where it is not known."""
        moment = self.figures.moment
        if moment.held_bytes is None:
            return None
        held = self.run_bytes + max(0, moment.held_bytes - moment.nbytes)
        return most_held_bytes(self.run_bytes, held, self.sized.device)

    @property
    def cached_bytes(self) -> int:
        """Caches and states when the workload ends."""
        return self.figures.kv.nbytes + self.figures.ssm_bytes


class Figure(Struct, frozen=True, kw_only=True):
    """One figure, in bytes; without a way to measure or to estimate it that value is left out."""

    name: str
    """Its name in JSON."""
    label: str
    meaning: str
    """What is measured, as docs/tune.md says it."""
    after_prefill: Callable[[RunMoment], int | None] | None = None
    """How it is read in the measuring process, before the last token of the prompt."""
    at_end: Callable[[RunMoment], int | None] | None = None
    """How it is read there when the workload ends."""
    measured: Callable[[MeasuredRuns], Iterable[int | None]] | None = None
    """How it follows from a measurement, where it is not read in every run."""
    estimated: Callable[[EstimatedRun], EstimatedFigure | None] | None = None
    hides_zero: bool = False
    """Whether a table leaves it out where both values are zero."""

    def values(self, measured: MeasuredRuns) -> list[int]:
        if self.measured:
            found = self.measured(measured)
        else:
            found = (run.value(f"{self.name}_bytes") for run in measured.runs)
        return [value for value in found if value is not None]


_DECLARED = (
    Figure(
        name="weights",
        label="Weights",
        meaning="the sum of the arrays' `nbytes`",
        measured=lambda of: [of.loaded.weights_bytes],
        estimated=lambda of: of.weights(loaded_weights(of.sized.runtime_model).loaded_bytes),
    ),
    Figure(
        name="active",
        label="Active after load",
        meaning="what MLX's allocator holds for the weights",
        measured=lambda of: [of.loaded.active_bytes],
        estimated=lambda of: of.weights(of.sized.resident_bytes),
    ),
    Figure(
        name="kv",
        label="KV cache at the end",
        meaning="bytes allocated when the workload ends",
        at_end=lambda moment: moment.kv,
        estimated=lambda of: of.cache(of.figures.kv.nbytes),
    ),
    Figure(
        name="kv_held",
        label="  held by its tokens",
        meaning="the part of `kv` that its tokens need",
        at_end=lambda moment: moment.kv_held,
        estimated=lambda of: of.cache(of.figures.kv.held_bytes),
    ),
    Figure(
        name="ssm",
        label="State at the end",
        meaning="the states of layers with a recurrent state, if there are any",
        at_end=lambda moment: moment.ssm,
        estimated=lambda of: of.cache(of.figures.ssm_bytes),
        hides_zero=True,
    ),
    Figure(
        name="prefill_kv",
        label="KV cache after prefill",
        meaning="the same after all chunks, before the prompt's last token",
        after_prefill=lambda moment: moment.kv,
        estimated=lambda of: EstimatedFigure(of.prefilled.nbytes, "exact"),
    ),
    Figure(
        name="prefill_kv_held",
        label="  held by its tokens",
        meaning="the part of `prefill_kv` that its tokens need",
        after_prefill=lambda moment: moment.kv_held,
        estimated=lambda of: EstimatedFigure(of.prefilled.held_bytes, "exact"),
    ),
    Figure(
        name="prefill_ssm",
        label="State after prefill",
        meaning="the states at that moment",
        after_prefill=lambda moment: moment.ssm,
        estimated=lambda of: of.cache(of.figures.ssm_bytes) if of.has_prefill else None,
        hides_zero=True,
    ),
    Figure(
        name="prefill_peak",
        label="Peak in prefill",
        meaning="the peak up to that moment, weights included",
        after_prefill=lambda moment: moment.peak,
        estimated=lambda of: of.peak(of.figures.moment.prefill_bytes),
    ),
    Figure(
        name="decode_peak",
        label="Peak in decode",
        meaning="the peak from the prompt's last token to the end",
        at_end=lambda moment: moment.peak,
        estimated=lambda of: of.peak(of.figures.moment.decode_bytes),
    ),
    Figure(
        name="peak",
        label="Peak",
        meaning="the larger of the two",
        estimated=lambda of: of.peak(of.run_bytes),
    ),
    Figure(
        name="warm_up_peak",
        label="  of the warm-up",
        meaning="the peak of the first run, where it is above that of every repeat",
        measured=lambda of: [
            run.peak_bytes
            for run in (of.warm_up,)
            if run and run.peak_bytes > max((each.peak_bytes for each in of.runs), default=0)
        ],
    ),
    Figure(
        name="held",
        label="Held at most",
        meaning="the most in use, and freed and kept for the next use, together",
        at_end=lambda moment: moment.held,
        estimated=lambda of: of.peak(of.held_bytes),
    ),
    Figure(
        name="workspace",
        label="Workspace",
        meaning="peak minus weights, cache and state at the end",
        measured=lambda of: [
            run.peak_bytes - of.loaded.weights_bytes - run.kv_bytes - run.ssm_bytes
            for run in of.runs
        ],
        estimated=lambda of: of.peak(
            of.run_bytes - loaded_weights(of.sized.runtime_model).loaded_bytes - of.cached_bytes
        ),
    ),
    Figure(
        name="unaccounted",
        label="Unaccounted",
        meaning=(
            "peak minus active memory, cache, state and the *estimated* workspace; below zero the"
            " estimate is too large"
        ),
        measured=lambda _: [],  # from both sides: `paired_figures`
    ),
    Figure(
        name="swift_workspace",
        label="Workspace, mlx-swift-lm",
        meaning=(
            "by the rule of mlx-swift-lm's `tune`: logits of the whole last chunk are evaluated,"
            " caches count their tokens only"
        ),
        measured=lambda of: [of.swift[0]],
    ),
    Figure(
        name="swift_kv",
        label="Caches, mlx-swift-lm",
        meaning="by the same rule: caches and states of the whole prompt",
        measured=lambda of: [of.swift[1]],
    ),
    Figure(
        name="process",
        label="Process, by the system",
        meaning="resident bytes of the process, Python and libraries included",
        at_end=lambda moment: moment.process(),
    ),
    Figure(
        name="footprint",
        label="Footprint, by macOS",
        meaning=(
            "the most that macOS has charged the process for, from its start on, with"
            " `--footprint` (`ri_lifetime_max_phys_footprint`)"
        ),
        at_end=lambda moment: moment.footprint,
    ),
)
FIGURES = {figure.name: figure for figure in _DECLARED}
"""By name, in the order in which they are shown."""


class TuneFigure(Struct, frozen=True, kw_only=True):
    """One figure, measured and estimated; None where that value does not exist."""

    name: Annotated[str, one_of(*FIGURES)]
    estimated_bytes: int | None
    basis: Basis | None
    """Basis of the estimate."""
    measured_bytes: int | None
    """Median of the repeats."""
    difference_bytes: int | None
    """Measured minus estimated."""
    spread_bytes: Bytes
    """Largest repeat minus smallest."""


def estimated_figures(sized: SizedModel, workload: Workload) -> dict[str, EstimatedFigure]:
    """Return the estimated figures of a workload, by name.

    Raises:
        UnsupportedError: when the runtime cannot run the workload.
    """
    of = EstimatedRun(
        sized=sized,
        figures=sized.figures_for(workload),
        prefilled=prefilled_kv_cache(sized.model, workload),
        has_prefill=workload.prompt_tokens > 1,
        cache_basis=sized.runtime_model.basis("cache", workload)[0],
        peak_basis=sized.runtime_model.basis("workspace", workload)[0],
    )
    found = {each.name: each.estimated(of) for each in _DECLARED if each.estimated}
    return {name: figure for name, figure in found.items() if figure}


def measured_figures(
    loaded: Loaded | None, runs: Sequence[Run], swift: SwiftBytes, warm_up: Run | None = None
) -> dict[str, list[int]]:
    """Return the measured values, by name; a figure without a value is left out."""
    if loaded is None:
        return {}
    of = MeasuredRuns(loaded, runs, swift, warm_up)
    found = {figure.name: figure.values(of) for figure in _DECLARED}
    return {name: values for name, values in found.items() if values}


def partial_figures(figures: Mapping[str, int]) -> dict[str, list[int]]:
    """Return the figures received from a run before it stopped, by name."""
    found = {name: figures.get(f"{name}_bytes") for name in FIGURES}
    return {name: [nbytes] for name, nbytes in found.items() if nbytes is not None}


def paired_figures(
    measured: MeasuredValues, estimated: Mapping[str, EstimatedFigure]
) -> tuple[TuneFigure, ...]:
    """Return every figure that is measured or estimated, in the order of `FIGURES`."""
    values: MeasuredValues = {**measured, **_unaccounted(measured, estimated)}
    return tuple(
        _figure(name, values.get(name, ()), estimated.get(name))
        for name in FIGURES
        if name in values or name in estimated
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
