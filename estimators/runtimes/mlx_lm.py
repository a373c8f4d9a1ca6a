"""mlx-lm: caches grow with the tokens, the workspace follows MLX's scheduler.

What other runtimes on its classes share is `MlxModel`; `MlxLm` adds what its own programs do.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import replace

from memfit.estimators.arch.ranks import chosen_parallel, share_of
from memfit.estimators.arch.registry import class_row
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.files import printable
from memfit.estimators.base.ranks import Parallel, Rank
from memfit.estimators.base.setting_names import setting
from memfit.estimators.base.units import open_size
from memfit.estimators.base.workload import CallPhase, ServerSettings, Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import ANY_MAC
from memfit.estimators.mlx.call_plan import CHUNKS, grouped_batch, merges_caches, require_batch
from memfit.estimators.mlx.kv_cache import (
    KVCache,
    buffer_counts,
    buffer_token_bytes,
    kv_bits_apply,
    kv_cache,
    state_bytes,
)
from memfit.estimators.mlx.versions import MLX_LM_VERSION, MLX_VERSION, format_version
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.terms import Basis, PeakMoment
from memfit.estimators.runtimes.facets import (
    Batching,
    Cache,
    CachedPrompts,
    Drafting,
    MlxLmPrograms,
    Sharding,
    Views,
)
from memfit.estimators.runtimes.held import with_batch_held
from memfit.estimators.runtimes.interface import (
    DraftFigures,
    Figure,
    MemoryFigures,
    RuntimeModel,
    Subject,
)
from memfit.estimators.runtimes.mlx_lm_commands import (
    STDIN,
    generate_command,
    launched,
    server_command,
)
from memfit.estimators.runtimes.mlx_runtime import MlxRuntimeModel
from memfit.estimators.runtimes.runtime import Budget, Runtime
from memfit.estimators.runtimes.source import (
    TRACE_ERROR_PERCENT,
    Formula,
    Interpolated,
    Recorded,
)
from memfit.estimators.weights.ranks import rank_footprint
from memfit.estimators.workspace.peak import (
    ERROR_PERCENT,
    CutLoad,
    cut_load,
    first_load,
    load_extra,
    peak,
    prepared_model,
)

if TYPE_CHECKING:
    from memfit.estimators.runtimes.token_cost import TokenCost

MLX_LM = Runtime(
    name="mlx-lm",
    version=format_version(MLX_LM_VERSION),
    mlx_version=MLX_VERSION,
    mlx_lm_version=MLX_LM_VERSION,
    prefill_step=2048,  # mlx_lm/generate.py, generate_step
    kv_step=256,  # mlx_lm/models/cache.py, KVCache.step
    kv_group_size=64,  # mlx_lm/generate.py, generate_step
    quantized_kv_start=5000,  # mlx_lm/generate.py, DEFAULT_QUANTIZED_KV_START
    growth="steps",
    charges="its own caches",
    budget=Budget("working_set", 90),  # mlx_lm/generate.py, wired_limit warns above it
    keeps="everything in unified memory",
    allocates="each layer's cache grows in steps of 256 tokens, a window's rotates",
    source="https://github.com/ml-explore/mlx-lm, mlx_lm/models/cache.py and generate.py",
)


# ring.cpp: ALL_SUM_BUFFERS of ALL_SUM_SIZE for the socket to the next rank and from the last one.
RING_BYTES = 2 * 2 * (8 << 20)


class MlxModel(MlxRuntimeModel, Views, Cache, frozen=True):
    """A model by the formula of mlx-lm's classes; what runs on its classes inherits its rules."""

    _workspace_basis: ClassVar[tuple[Basis, int]] = ("derived", ERROR_PERCENT)

    @classmethod
    def loads(cls, checkpoint: Checkpoint) -> None:
        super().loads(checkpoint)
        kind = checkpoint.config.get("model_type")
        if isinstance(kind, str) and _is_of_mlx_vlm(kind):
            raise UnsupportedError(
                f"{checkpoint.id}: {cls.defaults.name} has no class for model_type"
                f" {printable(kind)}, and mlx-vlm has one; leave the runtime out"
            )

    def token_costs(self, workload: Workload) -> tuple["TokenCost", ...]:
        """Return what mlx-lm's caches keep, e.g. no KV bits on a rotating one."""
        from memfit.estimators.runtimes.token_cost import TokenCost

        model = self.subject.model
        return tuple(
            TokenCost(
                layers,
                buffer_token_bytes(model, buffer, workload, workload.total_tokens),
                buffer.limit,
                buffer.limit,
            )
            for buffer, layers in buffer_counts(model, workload.max_kv_size).items()
        )

    def figures(self, workload: Workload) -> MemoryFigures:
        return self.together(workload)

    def together(self, workload: Workload) -> MemoryFigures:
        """Return what sequences take that are prefilled and decoded as one batch."""
        subject = self.subject
        kv, states = MlxModel.caches(self, workload)
        if isinstance(subject.source, Interpolated | Recorded):
            kept, versions = self.resident_bytes() + kv.nbytes + states, self.runtime.versions
            moment = subject.source.workspace.peak(workload, subject.device, versions, kept)
        else:
            moment = self._moment(workload)
        return MemoryFigures(kv, states, moment.with_load(self.load_bytes()))

    def caches(self, workload: Workload) -> tuple[KVCache, int]:
        """Return keys and values, and the bytes of states, of sequences that decode together.

        There are no KV bits on a rotating cache.
        """
        model, states = self.subject.model, state_bytes(self.subject.model, workload.batch)
        return kv_cache(model, workload), states * (2 if workload.cached_tokens else 1)

    def _moment(self, workload: Workload, *, keeps_up: bool = False) -> PeakMoment:
        """Return the largest moment by formula; of a GPU that ``keeps_up``, of CUDA only."""
        subject = self.subject
        return peak(
            subject.model,
            workload,
            resident_bytes=self.resident_bytes(),
            plan=subject.footprint.plan,
            device=subject.device,
            versions=self.runtime.versions,
            keeps_up=keeps_up,
            has_decode=subject.has_decode,
        )

    def basis(self, figure: Figure, workload: Workload) -> tuple[Basis, int]:
        """Return what a figure rests on; on CUDA the workspace is a bound."""
        if figure == "workspace" and self.subject.backend == "cuda":
            return "bound", 0
        if figure == "workspace" and isinstance(self.source, Recorded):
            return "traced", TRACE_ERROR_PERCENT
        # Between traced ones it is as good as a formula's.
        if figure == "workspace" and isinstance(self.source, Interpolated):
            return "traced", ERROR_PERCENT
        return RuntimeModel.basis(self, figure, workload)

    def load_bytes(self) -> int:
        footprint, backend = self.subject.footprint, self.subject.backend
        loaded = max(self.resident_bytes(), self._cut_load.expected)
        if not self._sanitizes():
            return loaded
        loaded += load_extra(footprint.conversions, backend=backend)
        return max(loaded, *(first_load(each, loaded) for each in footprint.first), 0)

    def _sanitizes(self) -> bool:
        """Whether it converts a checkpoint's arrays as mlx-lm does, while it loads them."""
        return True

    def most_load_bytes(self) -> int:
        """Return the most that the load of a rank takes that reads whole arrays, else 0."""
        load = self._cut_load
        return self.load_bytes() + load.most - load.expected if load.most else 0

    @property
    def _cut_load(self) -> CutLoad:
        cut = self.subject.footprint.cut
        return cut_load(cut, self.subject.device or ANY_MAC) if cut else CutLoad(0, 0)

    def formula(self) -> RuntimeModel:
        return self

    def comparing(self, *workloads: Workload) -> RuntimeModel:
        return self

    def for_phases(self, phases: frozenset[CallPhase]) -> "MlxModel":
        """Return the same without the calls after a prompt, where none is among the phases."""
        return replace(self, subject=replace(self.subject, has_decode=not phases <= CHUNKS))

    def least_bytes(self, workload: Workload) -> int:
        """Return weights, states and the tokens in the caches, which the last step reads."""
        kv, states = MlxModel.caches(self, workload)
        return self.resident_bytes() + kv.held_bytes + states

    def runs_kv_bits(self, workload: Workload) -> bool:
        """Whether it is one sequence, and KV bits reach a cache of the model.

        BatchGenerator (mlx_lm/generate.py) has none.
        """
        return workload.batch == 1 and kv_bits_apply(self.subject.model, workload.max_kv_size)

    def _assumptions(self, workload: Workload) -> Iterator[str]:
        runtime = self.runtime
        mlx = format_version(runtime.versions.mlx)
        yield f"by the rules of {runtime.name} {runtime.version} and MLX {mlx}"
        yield from super()._assumptions(workload)

    def _notes(self, workload: Workload, figures: MemoryFigures) -> Iterator[Note]:
        from memfit.estimators.runtimes.mlx_runtime import version_notes

        yield from super()._notes(workload, figures)
        if self.subject.backend == "cuda":
            yield Note("info", "cuda-bound", self._bound_of_cuda(workload))
        yield from version_notes(self, workload, figures)

    def _bound_of_cuda(self, workload: Workload) -> str:
        text = (
            "on CUDA the workspace is an upper bound, without what cuBLAS and cuDNN add: how many"
            " of the graphs under way have run depends on the speed of GPU and CPU"
        )
        if not isinstance(self.subject.source, Formula):
            return text
        least = self._moment(workload, keeps_up=True).nbytes
        return f"{text}; the peak is about {open_size(least)} where the GPU keeps up"

    def _explanation(self, workload: Workload, figures: MemoryFigures) -> Iterator[str]:
        from memfit.estimators.runtimes.cache_lines import cache_lines, state_lines

        yield from super()._explanation(workload, figures)
        yield from cache_lines(self.subject.model, workload, figures.kv.nbytes)
        yield from state_lines(self.subject.model, workload)


class MlxLm(MlxModel, MlxLmPrograms, Batching, CachedPrompts, Sharding, Drafting, frozen=True):
    """mlx-lm by formula, as its own programs run it."""

    defaults = MLX_LM
    reply_tokens = 100  # mlx_lm/generate.py, DEFAULT_MAX_TOKENS

    def figures(self, workload: Workload) -> MemoryFigures:
        """Return what a workload takes; a batch is prefilled in groups."""
        if workload.cached_tokens:
            self.require_cached(workload)
        figures = self._grouped(workload) if self.is_grouped(workload) else self.together(workload)
        is_batched = workload.batch > 1 and workload.kv_bits is None
        if not (is_batched and merges_caches(self.subject.model)):
            return figures
        return with_batch_held(figures, workload)

    def _grouped(self, workload: Workload) -> MemoryFigures:
        from memfit.estimators.runtimes.batch_groups import grouped_figures

        return grouped_figures(self, workload)

    def together(self, workload: Workload) -> MemoryFigures:
        require_batch(self.subject.model, workload.batch)
        return super().together(workload)

    def is_grouped(self, workload: Workload) -> bool:
        """Whether mlx-lm's batch generator runs the batch, and prefills it in groups."""
        is_larger = workload.batch > workload.prefill_batch
        return is_larger and workload.kv_bits is None and merges_caches(self.subject.model)

    def require_cached(self, workload: Workload) -> None:
        model = self.subject.model
        if not isinstance(self.source, Formula):
            reason = "traced and measured figures are of whole prompts"
        elif not merges_caches(model):
            reason = f"mlx-lm makes no stored cache of {model.model_type} as short as its tokens"
        elif self.is_grouped(workload):
            reason = "a batch that is prefilled in groups is of whole prompts"
        else:
            return
        raise UnsupportedError(f"{reason}: leave out {setting('cached_tokens')}")

    def decoding_rows(self, workload: Workload) -> int:
        if not self.is_grouped(workload):
            return workload.batch
        return grouped_batch(self.subject.model, workload).rows

    def least_bytes(self, workload: Workload) -> int:
        if self.is_grouped(workload):
            # Others may have ended before the last group is prefilled.
            workload = replace(workload, batch=workload.prefill_batch)
        return super().least_bytes(workload)

    def parallel(self, requested: Parallel | None) -> Parallel:
        """Return how mlx-lm's sharded_load runs the class."""
        if isinstance(self.source, Recorded):
            traced: MlxLm = self.source.workspace.by_trace(self)
            return traced.parallel(requested)
        return chosen_parallel(self.subject.model.model_type, requested)

    def for_rank(self, rank: Rank) -> "MlxLm":
        """Return the part of one rank, by the rules of its class."""
        subject = self.subject
        if isinstance(self.source, Recorded):
            traced: MlxLm = self.source.workspace.by_trace(self)
            return traced.for_rank(rank)
        share = share_of(subject.model, rank)
        footprint = rank_footprint(subject.footprint, subject.model, share, rank)
        return replace(self, subject=replace(subject, model=share, footprint=footprint, rank=rank))

    def communication_bytes(self) -> int:
        """Return what MLX's ring keeps to receive in (mlx distributed/ring/ring.cpp, RingGroup)."""
        return RING_BYTES if self.subject.rank else 0

    def commands(
        self, workload: Workload, model: str, server: ServerSettings | None
    ) -> tuple[str, ...]:
        """Return the command of the server where it fits, else of one run."""
        rank = self.subject.rank
        if rank and rank.split:
            return ()  # it splits the layers evenly
        if server:
            return (launched(server_command(model, workload, server), rank),)
        if rank or workload.batch > 1 or workload.cached_tokens:
            return ()  # mlx_lm.generate runs one whole prompt on one rank
        return (generate_command(model, workload, STDIN),)

    def require_draft(self, draft: Subject) -> None:
        from memfit.estimators.runtimes.drafting import require_same_vocabulary

        require_same_vocabulary(self.subject, draft)

    def drafted(self, workload: Workload, draft: RuntimeModel, tokens: int) -> DraftFigures:
        """Return what both models take by generate.py, speculative_generate_step, above this one.

        Raises:
            UnsupportedError: when mlx-lm rejects or ignores what is asked.
        """
        model = self.subject.model
        by_formula = (isinstance(one.subject.source, Formula) for one in (self, draft))
        if not all(by_formula) or not isinstance(draft, MlxLm):
            return DraftFigures(draft.figures(workload).moment.nbytes, "bound")
        from memfit.estimators.runtimes.drafting import require_drafting
        from memfit.estimators.workspace.speculation import LoadedModel, speculative_moments

        require_drafting(model, workload)
        target, other_model = (
            LoadedModel(
                prepared_model(
                    one.subject.model,
                    one.subject.footprint.plan,
                    self.subject.device,
                    self.runtime.versions,
                ),
                one.resident_bytes(),
            )
            for one in (self, draft)
        )
        moments = tuple(speculative_moments(target, other_model, workload, tokens))
        best = max(moments, key=lambda moment: moment.nbytes)
        kept = [one.kept(workload, tokens) for one in (target, other_model)]
        both = DraftFigures(
            best.nbytes,
            "derived",
            best.phase,
            best.explanation,
            workspace_bytes=best.workspace_bytes,
            kept_bytes=None
            if None in kept
            else max(sum(filter(None, kept)), *(moment.replaced_bytes for moment in moments)),
        )
        return self._above_alone(both, draft, MlxLm.figures(self, workload))

    def _above_alone(
        self, both: DraftFigures, draft: "MlxLm", alone: MemoryFigures
    ) -> DraftFigures:
        """Return what a peak of both models is above this one's; they are loaded one by one."""
        loading = self.resident_bytes() + draft.load_bytes()
        if loading > both.nbytes:
            line = "the draft model is loaded second"
            both = replace(both, nbytes=loading, phase="load", explanation=line, workspace_bytes=0)
        # The load of this model alone is in its own peak.
        return replace(both, nbytes=max(0, both.nbytes - alone.moment.nbytes))

    def _allocation(self) -> Iterator[str]:
        return iter(())

    def _assumptions(self, workload: Workload) -> Iterator[str]:
        yield from super()._assumptions(workload)
        if workload.cached_tokens:
            yield (
                f"the first {workload.cached_tokens} tokens of the prompt are in a stored cache,"
                " which stays beside the copy that the run makes of it"
            )

    def _notes(self, workload: Workload, figures: MemoryFigures) -> Iterator[Note]:
        yield from super()._notes(workload, figures)
        model = self.subject.model
        if workload.batch > 1 and not merges_caches(model):
            text = (
                f"mlx-lm batches no caches of {model.model_type}: mlx_lm.server answers one request"
                " at a time"
            )
            yield Note("warning", "no-batch", text)

    def _explanation(self, workload: Workload, figures: MemoryFigures) -> Iterator[str]:
        yield from super()._explanation(
            replace(workload, batch=self.decoding_rows(workload)), figures
        )


def _is_of_mlx_vlm(model_type: str) -> bool:
    if row := class_row(model_type):
        return row.only_mlx_vlm
    # Imported where a type is not described: it looks into the packages that are installed.
    from memfit.estimators.trace.libraries import only_mlx_vlm_has

    return only_mlx_vlm_has(model_type)
