"""A model over several ranks: what each was estimated to take, and what it took."""

from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.progress import NULL_PROGRESS, Progress
from memfit.estimators.base.units import Bytes, Count, NonEmpty, Number, Units
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.host import detect_host
from memfit.estimators.machine.hosts import require_addresses
from memfit.estimators.questions.target import Ranks
from memfit.estimators.results.estimate import ModelSummary, RankFigures, RankPlan
from memfit.estimators.results.result import Result
from memfit.estimators.runtimes.measurement import Loaded, Run
from memfit.estimators.runtimes.registry import as_installed
from memfit.estimators.runtimes.runtime import Need
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.estimate import model_summary
from memfit.estimators.sizing.ranks import RankedModel, ranked
from memfit.probes.experiments.base import RunRequest
from memfit.probes.preflight import require_memory
from memfit.probes.rank_run import RankRequest, RankRun, measure_ranks
from memfit.probes.speed import median_speed


class MeasuredRank(Struct, frozen=True, kw_only=True):
    """One rank: the estimate, and what the run took."""

    rank: Count
    estimated: RankFigures
    loaded: Loaded
    run: Run
    first_token_ns: Count
    decode_tokens_per_second: Number | None


class RankTune(Result, frozen=True, kw_only=True, tag="memfit.tune-ranks/1"):
    """The answer of ``memfit tune --ranks``."""

    model: ModelSummary
    workload: Workload
    plan: RankPlan
    """The estimate."""
    ranks: NonEmpty[MeasuredRank]
    peak_bytes: Bytes
    """The largest peak of a rank."""


class RankTuneRequest(RunRequest, frozen=True, kw_only=True):
    """The workload to run once, and the ranks to run it on."""

    path: Path
    """The directory of the checkpoint."""
    workload: Workload
    ranks: Ranks
    timeout_seconds: float
    hostfile: Path | None = None
    """None: all ranks on this machine."""


def tune_ranks(request: RankTuneRequest, *, progress: Progress = NULL_PROGRESS) -> RankTune:
    """Return what each rank took of what it was estimated to take, by trace.

    Raises:
        InputError: for ranks or a split that the model cannot have, or a host without an address.
        UnsupportedError: when mlx-lm does not run the model over such ranks.
        RefusedError: when they do not fit by the estimate, unless it is forced.
        MachineError: when MLX is not installed, or a rank ends, hangs or cannot connect.
    """
    ranks, workload, hostfile = request.ranks, request.workload, request.hostfile
    if hostfile:
        require_addresses(hostfile)
    devices = ranks.devices if hostfile else (detect_host(),) * ranks.size
    catalog = Catalog(progress=progress, versioned=as_installed)
    sized = catalog.sized(
        catalog.add(request.checkpoint),
        device=devices[0],
        margin_bytes=request.margin_bytes,
        method="trace",
    )
    shared = ranked(sized, replace(ranks, devices=devices))
    if not request.force:
        _require_room(shared, workload, together=hostfile is None)
    run = RankRequest(
        path=request.path,
        size=ranks.size,
        parallel=shared.parallel or "tensor",
        split=None if shared.is_even else shared.split,
        workload=workload,
        timeout_seconds=request.timeout_seconds,
        memory_limit_bytes=request.memory_limit_bytes,
        hostfile=hostfile,
    )
    return _result(model_summary(sized), workload, shared, measure_ranks(run, progress))


def _require_room(shared: RankedModel, workload: Workload, *, together: bool) -> None:
    """Require that ranks fit, those ``together`` on one machine in sum."""
    needs = [(sized.device, sized.requirement(workload)) for sized in shared.ranks]
    named = [(f"rank {index}", *each) for index, each in enumerate(needs)]
    if together:
        largest = max(need.largest_buffer_bytes for _, need in needs)
        total = Need(sum(need.peak_bytes for _, need in needs), largest)
        named = [(f"{len(needs)} ranks on this machine", needs[0][0], total)]
    for name, device, need in named:
        if device:
            require_memory(f"{shared.ranks[0].checkpoint.id}: {name}", need, device, Units.GB)


def _result(
    model: ModelSummary, workload: Workload, shared: RankedModel, found: tuple[RankRun, ...]
) -> RankTune:
    plan = shared.plan(workload, shared.parallel or "tensor")
    speeds = (median_speed(workload, [each.run]) for each in found)
    measured = tuple(
        MeasuredRank(
            rank=index,
            estimated=estimated,
            loaded=each.loaded,
            run=each.run,
            first_token_ns=each.run.first_token_ns,
            decode_tokens_per_second=speed.decode_tokens_per_second if speed else None,
        )
        for index, (estimated, each, speed) in enumerate(
            zip(plan.ranks, found, speeds, strict=True)
        )
    )
    peak = max(max(each.loaded.peak_bytes, each.run.peak_bytes) for each in found)
    return RankTune(model=model, workload=workload, plan=plan, ranks=measured, peak_bytes=peak)
