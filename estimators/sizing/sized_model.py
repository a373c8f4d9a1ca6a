"""A model on a runtime and a device: every byte it takes at any workload."""

from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.registry import row_or_default
from memfit.estimators.base.errors import DoesNotLoadError, UnsupportedError
from memfit.estimators.base.ranks import Rank
from memfit.estimators.base.setting_names import setting
from memfit.estimators.base.units import ceil_div
from memfit.estimators.base.workload import CallPhase, Workload
from memfit.estimators.checkpoint.kinds import is_mtp_head
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import Device
from memfit.estimators.questions.target import DRAFT_TOKENS, MARGIN_BYTES
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.terms import LimitName, Verdict
from memfit.estimators.runtimes.facets import (
    CachedPrompts,
    Drafting,
    ForeignFormats,
    HeadDrafting,
    Images,
    OnMlx,
    PerMachine,
    Sharding,
    SplitMemory,
    Views,
    communication_bytes,
    context_limit,
    formula_of,
)
from memfit.estimators.runtimes.held import most_held_bytes
from memfit.estimators.runtimes.interface import DraftFigures, MemoryFigures, RuntimeModel
from memfit.estimators.runtimes.registry import bind, get_runtime, offers, runtime_names
from memfit.estimators.runtimes.runtime import Need, Runtime, judge
from memfit.estimators.weights.footprint import WeightFootprint

if TYPE_CHECKING:
    from memfit.estimators.runtimes.measurement import Measurement


class SizedModel(Struct):
    """A model ready for questions about workloads; answers are kept."""

    runtime_model: RuntimeModel
    margin_bytes: int = MARGIN_BYTES
    draft: "SizedModel | None" = None
    draft_tokens: int = DRAFT_TOKENS
    """Tokens that the draft model proposes in each step."""
    notes: tuple[Note, ...] = ()
    """Notes on measurements that were looked for."""
    _answers: dict[Workload, MemoryFigures] = field(default_factory=dict)
    _drafts: dict[Workload, DraftFigures] = field(default_factory=dict)

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that was opened."""
        return self.runtime_model.subject.checkpoint

    @property
    def model(self) -> Model:
        return self.runtime_model.subject.model

    @property
    def footprint(self) -> WeightFootprint:
        return self.runtime_model.subject.footprint

    @property
    def device(self) -> Device | None:
        """The machine, None where none was named."""
        return self.runtime_model.subject.device

    @property
    def runtime(self) -> str:
        """The name of the runtime it is sized for."""
        return self.runtime_model.runtime.name

    @property
    def resident_bytes(self) -> int:
        """Bytes of the weights as the runtime lays them out in memory."""
        return self.runtime_model.resident_bytes()

    def figures_for(self, workload: Workload) -> MemoryFigures:
        """Return the figures of a workload.

        Raises:
            UnsupportedError: when the runtime cannot run it, e.g. KV bits on a rotating cache.
        """
        if workload not in self._answers:
            require_images(self, workload)
            self._answers[workload] = self.runtime_model.figures(workload)
        return self._answers[workload]

    def requirement(self, workload: Workload) -> Need:
        """Return what must fit, and the budget that it must fit in."""
        figures, runtime_model = self.figures_for(workload), self.runtime_model
        draft, budget = draft_bytes_of(self, workload), runtime_model.runtime.budget
        added, split = draft_figures(self, workload), runtime_model.facet(SplitMemory)
        on_host = figures.host_bytes + (added.host_bytes if added else 0)
        most_tokens = context_limit(runtime_model) or workload.total_tokens
        return Need(
            figures.moment.nbytes + draft + self.margin_bytes,
            figures.moment.largest_buffer_bytes,
            figures.budgeted_bytes(runtime_model.runtime) + (0 if budget.for_cache else draft),
            budget,
            error_bytes_of(self, workload),
            split.shared_bytes(figures) if split else 0,
            max(0, workload.total_tokens - most_tokens),
            split.host_need(on_host) if split else None,
        )

    def on(self, device: Device | None) -> "SizedModel":
        """Return the same model on another device; nothing is read again."""
        draft = self.draft.on(device) if self.draft else None
        answers = self._answers if self._is_alike_on(device) else {}
        runtime_model = self.runtime_model.on(device)
        return replace(self, runtime_model=runtime_model, draft=draft, _answers=answers, _drafts={})

    def _is_alike_on(self, device: Device | None) -> bool:
        """Whether figures on another machine are the same."""
        if self.runtime_model.facet(PerMachine):
            return device == self.device
        return self.device is not None and device is not None and self.device.gpu == device.gpu

    def formula_view(self) -> "SizedModel":
        """Return what answers many workloads quickly."""
        return self._under(formula_of(self.runtime_model))

    def _under(self, runtime_model: RuntimeModel) -> "SizedModel":
        if runtime_model is self.runtime_model:
            return self
        return replace(self, runtime_model=runtime_model, _answers={}, _drafts={})


def for_phases(sized: SizedModel, phases: frozenset[CallPhase]) -> SizedModel:
    """Return what may leave out the calls of other phases, if that is quicker."""
    views = sized.runtime_model.facet(Views)
    return sized._under(views.for_phases(phases)) if views else sized


def comparing(sized: SizedModel, *workloads: Workload) -> SizedModel:
    """Return what answers for all these workloads in one way, so that peaks compare."""
    views = sized.runtime_model.facet(Views)
    return sized._under(views.comparing(*workloads)) if views else sized


def is_known(sized: SizedModel, workload: Workload) -> bool:
    """Whether the figures of a workload were computed already."""
    return workload in sized._answers


def require_images(sized: SizedModel, workload: Workload) -> None:
    """Check that the runtime's figures include the images of a workload, if it has any.

    Raises:
        UnsupportedError: when they do not.
    """
    if workload.images and not sized.runtime_model.facet(Images):
        raise UnsupportedError(
            f"{sized.runtime}: what it does with images is not described; leave the runtime out,"
            " or take mlx-vlm"
        )


def require_cached(sized: SizedModel, workload: Workload) -> None:
    """Check that the runtime's figures are of prompts with cached tokens, if there are any.

    Raises:
        UnsupportedError: when they are not.
    """
    if not workload.cached_tokens:
        return
    if (cached := sized.runtime_model.facet(CachedPrompts)) is None:
        raise UnsupportedError(
            f"{sized.runtime}: prompts with a stored cache are described for mlx-lm only; leave out"
            f" {setting('cached_tokens')}"
        )
    cached.require_cached(workload)


def verdict_of(sized: SizedModel, workload: Workload) -> tuple[Verdict, tuple[LimitName, ...]]:
    """Return the verdict on a workload, and the limits that are exceeded."""
    if refusal_of(sized):
        return "does_not_load", ()
    return judge(sized.requirement(workload), sized.device)


def error_bytes_of(sized: SizedModel, workload: Workload) -> int:
    """Return by how much the peak may be too low: the error of its workspace, or a load."""
    mlx, peak_bytes = sized.runtime_model.facet(OnMlx), sized.figures_for(workload).moment.nbytes
    above_peak = mlx.most_load_bytes() - peak_bytes if mlx else 0
    return max(workspace_error_of(sized, workload), above_peak)


def workspace_error_of(sized: SizedModel, workload: Workload) -> int:
    """Return by how much the peak may be wrong: the stated error of its workspace.

    With a draft model the workspace of the largest moment of both counts: it can be the draft's, or
    in a chunk of the target that finds its own caches small. At least a batch of work, which may
    have run already or not yet when the peak is reached.
    """
    _, percent = sized.runtime_model.basis("workspace", workload)
    moment, added = sized.figures_for(workload).moment, draft_figures(sized, workload)
    workspace = max(moment.workspace_bytes, added.workspace_bytes if added else 0)
    stated = ceil_div(workspace * percent, 100)
    return max(stated, moment.batch_bytes) if percent else stated


def with_draft(sized: SizedModel, draft: SizedModel, tokens: int) -> SizedModel:
    """Return the same with a draft model that proposes ``tokens`` in each step.

    Raises:
        UnsupportedError: for a model of another runtime, under mlx-lm with another vocabulary, and
            for a head that the runtime or the target does not take.
    """
    if draft.runtime != sized.runtime:
        raise UnsupportedError(
            f"{draft.checkpoint.id}: a draft for {draft.runtime} cannot serve a model that"
            f" runs on {sized.runtime}"
        )
    if drafting := sized.runtime_model.facet(Drafting):
        drafting.require_draft(draft.runtime_model.subject)
    return replace(sized, draft=draft, draft_tokens=tokens, _drafts={})


def peak_of(sized: SizedModel, workload: Workload) -> int:
    """Return the peak in bytes, with a draft model's.

    Raises:
        UnsupportedError: when the runtime cannot run the workload.
    """
    return sized.figures_for(workload).moment.nbytes + draft_bytes_of(sized, workload)


def held_of(sized: SizedModel, workload: Workload) -> int | None:
    """Return the most bytes that MLX holds, with a draft model's; None where they are not known.

    Raises:
        UnsupportedError: when the runtime cannot run the workload.
    """
    peak_bytes, kept = peak_of(sized, workload), kept_of(sized, workload)
    return most_held_bytes(peak_bytes, None if kept is None else peak_bytes + kept, sized.device)


def kept_of(sized: SizedModel, workload: Workload) -> int | None:
    """Return the freed bytes that MLX keeps beside the peak, without a limit; None: not known."""
    moment, drafted = sized.figures_for(workload).moment, draft_figures(sized, workload)
    if workload.max_tokens and sized.device and sized.device.backend == "cuda":
        # A step's inputs are referred to until a thread of the CPU sees that its graph has run
        # (mlx backend/cuda/eval.cpp, eval; worker.cpp): caches are copied whenever that is late.
        return None
    if drafted:
        return drafted.kept_bytes
    return None if moment.held_bytes is None else max(0, moment.held_bytes - moment.nbytes)


def draft_bytes_of(sized: SizedModel, workload: Workload) -> int:
    """Return what a draft model adds to the peak, 0 without one."""
    added = draft_figures(sized, workload)
    return added.nbytes if added else 0


def draft_figures(sized: SizedModel, workload: Workload) -> DraftFigures | None:
    """Return what a draft model adds, None without one.

    Raises:
        UnsupportedError: when the runtime cannot run it.
    """
    if sized.draft is None:
        return None
    if workload not in sized._drafts:
        drafting, draft = sized.runtime_model.facet(Drafting), sized.draft.runtime_model
        sized._drafts[workload] = (
            drafting.drafted(workload, draft, sized.draft_tokens)
            if drafting
            else DraftFigures(draft.figures(workload).moment.nbytes, "bound")
        )
    return sized._drafts[workload]


def with_runtime(sized: SizedModel, runtime: Runtime) -> SizedModel:
    """Return the same model under another runtime, or one with other settings.

    Raises:
        UnsupportedError: when the runtime cannot load the checkpoint.
    """
    if runtime == sized.runtime_model.runtime:
        return sized
    alone = replace(sized._under(bind(runtime, sized.runtime_model.subject)), draft=None)
    if sized.draft is None:
        return alone
    require_head_drafting(runtime, sized.draft.checkpoint)
    return with_draft(alone, with_runtime(sized.draft, runtime), sized.draft_tokens)


def require_head_drafting(runtime: Runtime, draft: Checkpoint) -> None:
    """Check that a runtime takes a draft that is no language model by itself, if it is one.

    Raises:
        UnsupportedError: when it does not.
    """
    if is_mtp_head(draft) and not offers(runtime, HeadDrafting):
        raise UnsupportedError(
            f"{draft.id}: an MTP head, which {runtime.name} does not load; take"
            f" {setting('runtime')} mlx-vlm"
        )


def settled_for(sized: SizedModel, workload: Workload) -> SizedModel:
    """Return the same with the settings that its runtime chooses by a workload.

    Raises:
        UnsupportedError: when it cannot choose.
    """
    split = sized.runtime_model.facet(SplitMemory)
    return with_runtime(sized, split.settled(workload)) if split else sized


def for_rank(sized: SizedModel, rank: Rank) -> SizedModel:
    """Return the part of one of several ranks; its margin includes what ranks exchange in.

    Raises:
        InputError: for a split that is not of the model's layers.
        UnsupportedError: when the model does not divide among the ranks.
    """
    sharding = sized.runtime_model.facet(Sharding)
    assert sharding
    ranked = sharding.for_rank(rank)
    margin_bytes = sized.margin_bytes + communication_bytes(ranked)
    return replace(sized._under(ranked), margin_bytes=margin_bytes)


def as_measured(sized: SizedModel, measurement: "Measurement") -> SizedModel:
    """Return the same with what a run on this device took, in place of figures for it.

    It stays as it is: neither moved to another device nor put under another runtime.
    """
    from memfit.estimators.runtimes.measured import MeasuredModel

    inner = sized.runtime_model
    return sized._under(MeasuredModel(inner.runtime, inner.subject, inner, measurement))


def refusal_of(sized: SizedModel) -> str:
    """Return why the runtime does not load the checkpoint, or its draft model's; else nothing."""
    mlx = sized.runtime_model.facet(OnMlx)
    refusal = mlx.refusal() if mlx else ""
    if sized.draft and not refusal and (of_draft := refusal_of(sized.draft)):
        return f"the draft model {sized.draft.checkpoint.id}: {of_draft}"
    return refusal


def is_foreign(sized: SizedModel) -> bool:
    """Whether its files are in a format of another program: figures are of a conversion."""
    return sized.footprint.of_original or sized.checkpoint.weight_bytes_bound is not None


def is_loadable(sized: SizedModel) -> bool:
    """Whether the library loads the checkpoint, or its program converts it, as it is."""
    return not (refusal_of(sized) or sized.footprint.of_original)


def require_loaded(sized: SizedModel) -> SizedModel:
    """Return the same model, which the runtime loads.

    Raises:
        DoesNotLoadError: when it does not.
    """
    if not (refusal := refusal_of(sized)):
        return sized
    others = "".join(f"; {name} loads it" for name in runtimes_that_load(sized))
    raise DoesNotLoadError(
        f"{sized.checkpoint.id}: {sized.runtime} does not load it: {refusal}{others}"
    )


def runtimes_that_load(sized: SizedModel) -> tuple[str, ...]:
    """Return the runtimes that are known to load a checkpoint that this one does not."""
    return tuple(name for name in runtime_names() if _is_loaded_by(sized, name))


def _is_loaded_by(sized: SizedModel, name: str) -> bool:
    try:
        other = bind(get_runtime(name), sized.runtime_model.subject)
    except UnsupportedError:
        return False
    mlx = other.facet(OnMlx)
    config = sized.checkpoint.config
    misses = row_or_default(str(config.get("model_type"))).missing_key(config)
    if misses and not other.facet(Images):
        return False
    if mlx and (misses or sized.checkpoint.has_other_names):
        # The rules of all image processors, for a question that few models have.
        from memfit.estimators.images.processor import has_tower

        # Classes of mlx-vlm are of models with towers.
        return not mlx.refusal() and (not other.facet(Images) or has_tower(sized.checkpoint))
    return is_foreign(sized) and other.facet(ForeignFormats) is not None
