"""One target of a policy: its figures, their checks, and what makes broken limits pass."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.base.errors import UnreachableError, UnsupportedError
from memfit.estimators.base.units import Units, ceil_div, format_bytes, with_sizes
from memfit.estimators.base.workload import Recipe
from memfit.estimators.checkpoint.opening import HUB
from memfit.estimators.gate.baseline import (
    BaselineEntry,
    differences,
    entry_of,
    replaced,
    require_baseline,
)
from memfit.estimators.gate.figures import RUN_ALONE, changes, figures_of
from memfit.estimators.gate.limit_values import Unit
from memfit.estimators.gate.limits import (
    BoundName,
    LimitCheck,
    PolicyLimit,
    Totals,
    bounds,
    judge_basis,
    judge_limit,
)
from memfit.estimators.gate.policy import PolicyTarget
from memfit.estimators.gate.remedies import Candidate, remedies
from memfit.estimators.gate.report import TargetReport, TargetStatus
from memfit.estimators.results.estimate import Note
from memfit.estimators.runtimes.facets import MlxLmPrograms, OnMlx, context_limit
from memfit.estimators.runtimes.runtime import OF_RUNTIME, judge
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.resolved import ResolvedTarget
from memfit.estimators.sizing.run_limits import ending_notes, notes_beyond, run_limits
from memfit.estimators.sizing.search import are_compared, can_take_more, fits_comfortably
from memfit.estimators.sizing.sized_model import SizedModel, is_foreign, require_loaded

# The trace of training, which other targets do not need.
if TYPE_CHECKING:
    from memfit.estimators.sizing.training_steps import TracedSteps


class SizedTarget(Struct, frozen=True):
    """A target with its model: everything that its checks are computed from."""

    target: PolicyTarget
    resolved: ResolvedTarget
    steps: "TracedSteps | None"
    """The trainer's steps, each traced once; None where the target is not fine-tuned."""
    now: BaselineEntry
    """The figures that a baseline keeps."""


def size_target(catalog: Catalog, target: PolicyTarget) -> SizedTarget:
    """Return a target with its model and its figures.

    Raises:
        UnreachableError: when the checkpoint may not be the present one, and must be.
        MemfitError: when the model cannot be sized, or its runtime cannot run the workload.
    """
    question = target.question
    stale = catalog.checkpoint(question.reference).stale
    if stale and not target.allow_stale:
        raise UnreachableError(f"{stale}; allow_stale: true in the target accepts it")
    resolved = catalog.resolve(question)
    # A policy may accept the bound of a model that is converted first, and no other files.
    sized = resolved.sized if is_foreign(resolved.sized) else require_loaded(resolved.sized)
    figures, steps = figures_of(sized, resolved.workload, target.others), None
    if target.training is not None:
        steps = _training_steps(catalog, target)
        nbytes = steps.run_bytes(target.training, question.quantize)
        figures = replace(figures, training_peak_bytes=nbytes)
    return SizedTarget(target, resolved, steps, entry_of(target, resolved, figures))


def _training_steps(catalog: Catalog, target: PolicyTarget) -> "TracedSteps":
    """What traces the trainer's steps, as memfit plan train does."""
    from memfit.estimators.sizing.training_steps import TracedSteps

    sized = catalog.sized_for(replace(target.question, quantize=None, adapter=None))
    if not sized.runtime_model.facet(MlxLmPrograms):
        raise UnsupportedError(f"training: mlx_lm.lora does not train for {sized.runtime}")
    versions = sized.runtime_model.runtime.versions
    return TracedSteps(sized.checkpoint, sized.model.dtype, target.device, versions)


def report_of(
    catalog: Catalog, present: SizedTarget, before: BaselineEntry | None, *, allow_bounds: bool
) -> TargetReport:
    """Return the report of a target; ``before`` is its entry in the baseline.

    Raises:
        InputError: when a limit on growth has no baseline, or one for another question.
    """
    target, sized = present.target, present.resolved.sized
    differing = tuple(differences(before.asked, present.now.asked)) if before else ()
    if any(limit.rule.kind.is_growth for limit in target.limits):
        require_baseline(before, differing)
    accepts_bounds = allow_bounds or (target.basis is not None and target.basis.least == "bound")
    device = present.resolved.device or target.device
    totals = Totals(device, before.figures if before else None, accepts_bounds)
    return _Evaluation(
        catalog=catalog,
        present=present,
        before=before,
        differing="; ".join(differing),
        totals=totals,
        recipe=_counted(target.training or Recipe(), len(sized.model.layers)),
        excess_tokens=_excess_tokens(sized, present.resolved.workload.total_tokens),
    ).report()


def _counted(recipe: Recipe, layers: int) -> Recipe:
    """The recipe with its number of layers, where it trains all."""
    return recipe if recipe.num_layers > 0 else replace(recipe, num_layers=layers)


def _excess_tokens(sized: SizedModel, tokens: int) -> int:
    """The tokens beyond the model's own limit, or the runtime's lower one."""
    limits = (sized.model.max_context, context_limit(sized.runtime_model))
    return max(0, tokens - min(filter(None, limits), default=tokens))


class _Evaluation(Struct, frozen=True, kw_only=True):
    """A target's checks, with what all of them need."""

    catalog: Catalog
    present: SizedTarget
    before: BaselineEntry | None
    differing: str
    """How the baseline's question differs; empty where it does not."""
    totals: Totals
    recipe: Recipe
    excess_tokens: int
    """By how much the workload is longer than the context, in tokens."""

    def report(self) -> TargetReport:
        target, now, before = self.present.target, self.present.now, self.before
        checks = tuple(self._checks())
        message = self._undecided(checks)
        status: TargetStatus = "undecided" if message else "passed"
        if any(check.is_broken for check in checks):
            status = "broken"
        return TargetReport(
            name=target.name,
            line=target.line,
            model=now.model,
            device=target.device.name,
            working_set_bytes=self.totals.device.working_set_bytes,
            budget=self.totals.device.budget,
            status=status,
            message=message,
            checks=checks,
            figures=now.figures,
            baseline_model=before.model if before else None,
            changes=tuple(changes(before.figures, now.figures)) if before else (),
            notes=tuple(self._notes()),
            source=self.present.resolved.sized.checkpoint.source,
        )

    def _checks(self) -> Iterator[LimitCheck]:
        """Yield the checks of the policy's limits, then those that are always made and fail."""
        target, figures = self.present.target, self.present.now.figures
        for limit in target.limits:
            check = judge_limit(limit, figures, self.totals)
            yield self._with_remedies(limit, check) if check.is_broken else check
        if target.basis:
            yield judge_basis(target.basis, figures)
        if self.excess_tokens and not target.allow_beyond_context:
            tokens = self.present.resolved.workload.total_tokens
            most = tokens - self.excess_tokens
            yield self._broken("model_context", "tokens", tokens, most, "the model's context")
        yield from self._budget_checks()

    def _budget_checks(self) -> Iterator[LimitCheck]:
        """Yield that a runtime does not run the workload in the memory that it gives itself.

        Or that the host, or GPU and host together, have not the memory.
        """
        device, figures = self.totals.device, self.present.now.figures
        need = self.present.resolved.sized.requirement(self.present.resolved.workload)
        budget, exceeded = need.budget, judge(need, device)[1]
        if "memory" in exceeded:
            yield self._broken("memory", "bytes", need.shared_bytes, device.memory_bytes)
        if "host_memory" in exceeded and need.host:
            memory = need.host.memory_bytes or 0
            yield self._broken("host_memory", "bytes", need.host.nbytes, memory)
        if budget and OF_RUNTIME.intersection(exceeded):
            allowed = budget.of_device(device)
            check = self._broken("runtime_budget", "bytes", need.budgeted_bytes, allowed)
            unknown = tuple(bounds(figures, with_workspace=not budget.for_cache))
            known = need.budgeted_bytes - ("workspace" in unknown) * figures.workspace_bytes
            certain = self.totals.accepts_bounds or ("weights" not in unknown and known > allowed)
            yield check if certain else replace(check, undecided_by=unknown)

    def _broken(
        self, limit: str, unit: Unit, figure: int, allowed: int, relative_to: str = ""
    ) -> LimitCheck:
        """A limit that is not the policy's, and that the figure is above."""
        return LimitCheck(
            limit=limit,
            line=self.present.target.line,
            passed=False,
            unit=unit,
            sense="at most",
            figure=figure,
            allowed=allowed,
            limit_text=str(allowed),
            relative_to=relative_to,
            excess=figure - allowed,
        )

    def _undecided(self, checks: tuple[LimitCheck, ...]) -> str | None:
        """Why bounds do not decide, None where the figures are no bounds or a bound is accepted."""
        unknown = dict.fromkeys(name for check in checks for name in check.undecided_by)
        if not unknown:
            return None
        return f"{'; '.join(map(self._bound, unknown))}; --allow-bounds accepts it"

    def _bound(self, name: BoundName) -> str:
        now, notes = self.present.now, self.present.resolved.sized.footprint.notes
        match name:
            case "weights":
                reason = next((note.message for note in notes), now.model)
                return f"the weights are a bound ({reason})"
            case "workspace":
                least = format_bytes(
                    now.figures.peak_bytes - now.figures.workspace_bytes,
                    rounding="nearest",
                    digits=3,
                )
                peak = format_bytes(now.figures.peak_bytes, rounding="nearest", digits=3)
                return f"the workspace is a bound (the peak is from {least} to {peak})"
            case "baseline_weights":
                return "the baseline's weights are a bound"
            case "baseline_workspace":
                return "the baseline's workspace is a bound"
            case _:
                assert_never(name)

    def _notes(self) -> Iterator[Note]:
        before, now, sized = self.before, self.present.now, self.present.resolved.sized
        is_same = before is not None and before.model == now.model
        if before and is_same and (parts := replaced(before.checkpoint, now.checkpoint)):
            text = f"{now.model} was replaced behind its name: {', '.join(parts)}"
            yield Note("warning", "checkpoint-changed", text)
        revision = sized.checkpoint.revision
        if now.model.startswith(HUB) and f"@{revision}" not in now.model:
            text = f"{now.model}: not pinned to a commit; it is {revision} now"
            yield Note("warning", "not-pinned", text)
        if self.excess_tokens:
            text = f"the workload is {self.excess_tokens} tokens longer than the model's context"
            yield Note("warning", "beyond-context", text)
        if self.differing:
            yield Note("warning", "other-question", f"the baseline is of {self.differing}")
        yield from self._runtime_warnings()
        for note in sized.footprint.notes:
            if note.level == "warning":
                yield note
        for warning in sized.checkpoint.warnings:
            yield Note("warning", "checkpoint", warning)

    def _runtime_warnings(self) -> Iterator[Note]:
        sized, workload = self.present.resolved.sized, self.present.resolved.workload
        figures, runtime_model = sized.figures_for(workload), sized.runtime_model
        contexts = (
            limit.amount.least(0)
            for limit in self.present.target.limits
            if limit.rule.of == "context"
        )
        yield from ending_notes(run_limits(sized, workload))
        yield from notes_beyond(sized, workload, max(contexts, default=0))
        if can_take_more(sized) and not are_compared(sized):
            text = "by trace the peak is of this workload alone; a smaller one can take more"
            yield Note("info", "one-workload", text)
        for note in runtime_model.statements(workload, figures).notes:
            # A budget is a check of its own.
            if note.level == "warning" and note.code != "runtime-budget":
                yield replace(note, message=with_sizes(note.message, Units.GB))

    def _with_remedies(self, limit: PolicyLimit, check: LimitCheck) -> LimitCheck:
        sized = self.present.resolved.sized
        bits = ceil_div(8 * sized.footprint.nbytes, sized.footprint.parameters)
        now = Candidate(
            workload=self.present.resolved.workload,
            quantize=self.present.target.question.quantize,
            recipe=self.recipe,
            # Other runtimes load no weights that mlx-lm converts.
            weight_bits=bits if sized.runtime_model.facet(OnMlx) else 0,
        )
        passes = self._target_passes(limit, now)
        return replace(check, remedies=tuple(remedies(limit.rule.settings, now, passes)))

    def _target_passes(self, first: PolicyLimit, now: Candidate) -> Callable[[Candidate], bool]:
        """What judges whether the target passes with a change that is for its ``first`` limit."""
        others = [other for other in self.present.target.limits if other is not first]

        def is_unchanged(limit: PolicyLimit, candidate: Candidate) -> bool:
            if limit.rule.of == "training":
                changed = replace(candidate, workload=now.workload)
            else:
                changed = replace(candidate, recipe=now.recipe)
            return changed == now

        def passes(candidate: Candidate) -> bool:
            return (
                self._passes(first, candidate)
                and self._runs(candidate)
                and all(
                    judge_limit(other, self.present.now.figures, self.totals).is_passed
                    if is_unchanged(other, candidate)
                    else self._passes(other, candidate)
                    for other in others
                )
            )

        return passes

    def _runs(self, candidate: Candidate) -> bool:
        """Whether the changed workload is within the model's context and the runtime's budget."""
        target, workload = self.present.target, candidate.workload
        most = self.present.resolved.sized.model.max_context
        if most and workload.total_tokens > most and not target.allow_beyond_context:
            return False
        need = self._sized(candidate).requirement(workload)
        if OF_RUNTIME.intersection(judge(need, self.totals.device)[1]):
            return False
        basis = target.basis
        return basis is None or judge_basis(basis, self.present.now.figures).is_passed

    def _sized(self, candidate: Candidate) -> SizedModel:
        question = replace(self.present.target.question, quantize=candidate.quantize)
        return self.catalog.resolve(question).sized

    def _passes(self, limit: PolicyLimit, candidate: Candidate) -> bool:
        """Whether a limit holds with a change."""
        if limit.rule.of == "training":
            return self._trains(limit, candidate)
        sized, workload = self._sized(candidate), candidate.workload
        is_other = limit.rule.of in ("routing", "restore")
        others = self.present.target.others if is_other else RUN_ALONE
        is_context = limit.rule.of == "context"
        if is_context:
            prompt = workload.prompt_only(limit.amount.least(0))
            if not fits_comfortably(sized, prompt):
                return False  # one evaluation in place of a search

        def judged(*, with_smaller: bool) -> bool:
            figures = figures_of(
                *(sized, workload, others), with_context=is_context, with_smaller=with_smaller
            )
            return judge_limit(limit, figures, self.totals).is_passed

        # Smaller workloads are computed for those alone that may pass.
        return judged(with_smaller=False) and (limit.rule.of != "run" or judged(with_smaller=True))

    def _trains(self, limit: PolicyLimit, candidate: Candidate) -> bool:
        recipe, quantize = candidate.recipe, candidate.quantize
        if recipe.fine_tune_type == "full" and quantize != self.present.target.question.quantize:
            return False  # mlx-lm trains no quantised weights
        assert self.present.steps is not None
        nbytes = self.present.steps.run_bytes(recipe, quantize)
        figures = replace(self.present.now.figures, training_peak_bytes=nbytes)
        return judge_limit(limit, figures, self.totals).is_passed
