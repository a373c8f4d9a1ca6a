"""One target of a policy: its figures, their checks, and what makes broken limits pass."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.base.errors import InputError, UnreachableError, UnsupportedError
from memfit.estimators.base.quantization import FloatMode, Quantization
from memfit.estimators.base.recipe import Recipe
from memfit.estimators.base.units import Units, ceil_div, format_bytes
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.opening import HUB
from memfit.estimators.gate.baseline import (
    NAME,
    Asked,
    BaselineEntry,
    changes,
    differences,
    fingerprint,
    replaced,
)
from memfit.estimators.gate.figures import figures_of
from memfit.estimators.gate.policy import (
    RUN_LIMITS,
    TRAINING_LIMITS,
    PolicyLimit,
    PolicyTarget,
)
from memfit.estimators.gate.remedies import Question, remedies
from memfit.estimators.gate.verdict import Totals, bounds, judge_limit, judge_limits
from memfit.estimators.images.processor import with_image_tokens
from memfit.estimators.machine.device import Device
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.gate import (
    BoundName,
    LimitCheck,
    TargetReport,
    TargetStatus,
    Unit,
)
from memfit.estimators.runtimes.budget import OF_RUNTIME, judge
from memfit.estimators.runtimes.facets import MlxLmPrograms, OnMlx, context_limit
from memfit.estimators.runtimes.registry import runtime_for_images, with_versions
from memfit.estimators.runtimes.run_limits import ending_notes, run_limits
from memfit.estimators.runtimes.runtime import Runtime
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.ranks import Ranks, ranked
from memfit.estimators.sizing.search import fits_comfortably
from memfit.estimators.sizing.sized_model import SizedModel, is_foreign, require_loaded
from memfit.estimators.sizing.smaller_workloads import are_compared, can_take_more
from memfit.estimators.sizing.training_steps import TracedSteps
from memfit.estimators.sizing.workload import MARGIN_BYTES


class TargetModel(Struct, frozen=True):
    """A model in a target's place."""

    catalog: Catalog
    target: PolicyTarget
    model: str
    """The reference to it."""

    @property
    def runtime(self) -> Runtime:
        """The target's runtime, else the native one of the checkpoint, on the target's versions."""
        target = self.target
        runtime = target.runtime
        if runtime is None:
            runtime = self.catalog.native_runtime(self.model)
            if target.workload.values.images:
                runtime = runtime_for_images(runtime)
        return with_versions(runtime, mlx=target.mlx_version, mlx_lm=target.mlx_lm_version)

    @property
    def workload(self) -> Workload:
        """The target's workload with the runtime's defaults."""
        asked = self.target.workload.under(self.runtime.on(self.target.device))
        return with_image_tokens(self.catalog.checkpoint(self.model), asked)

    def sized(self, quantize: Quantization | None) -> SizedModel:
        """Return the model as it is, or converted; of ranks the tightest."""
        margin_bytes = self.target.margin_bytes
        sized = self.catalog.sized(
            self.model,
            quantize=quantize,
            margin_bytes=MARGIN_BYTES if margin_bytes is None else margin_bytes,
            adapter=self.target.adapter,
            device=self.target.device,
            runtime=self.runtime,
        )
        return ranked(sized, self.target.ranks).tightest(self.workload)

    def entry(self) -> BaselineEntry:
        """Return the figures that a baseline keeps.

        Raises:
            UnreachableError: when the checkpoint may not be the present one, and must be.
        """
        stale = self.catalog.checkpoint(self.model).stale
        if stale and not self.target.allow_stale:
            raise UnreachableError(f"{stale}; allow_stale: true in the target accepts it")
        target, workload = self.target, self.workload
        sized = self.sized(target.quantize)
        # A policy may accept the bound of a model that is converted first, and no other files.
        sized = sized if is_foreign(sized) else require_loaded(sized)
        named: dict[str, Any] = {**target.versions(), **_of_ranks(target.ranks)}
        if target.margin_bytes is not None:
            named["margin_bytes"] = target.margin_bytes
        figures = figures_of(sized, workload)
        if target.training is not None:
            named["training"] = target.training
            nbytes = self.training_steps().run_bytes(target.training, target.quantize)
            figures = replace(figures, training_peak_bytes=nbytes)
        return BaselineEntry(
            model=self.model,
            quantize=_format_name(target.quantize),
            model_type=sized.model.model_type,
            asked=Asked(
                device=target.device.name, runtime=self.runtime.name, workload=workload, **named
            ),
            checkpoint=fingerprint(sized.checkpoint),
            figures=figures,
        )

    def training_steps(self) -> TracedSteps:
        """Return what traces the trainer's steps, as memfit plan train does.

        Raises:
            UnsupportedError: when mlx-lm does not run the model.
        """
        device = self.target.device
        sized = self.catalog.sized(self.model, device=device, runtime=self.runtime)
        if not sized.runtime_model.facet(MlxLmPrograms):
            raise UnsupportedError(f"training: mlx_lm.lora does not train for {sized.runtime}")
        versions = sized.runtime_model.runtime.versions
        return TracedSteps(sized.checkpoint, sized.model.dtype, device, versions)


def _format_name(quantize: Quantization | None) -> int | FloatMode | None:
    """Return a format as the policy names it: bits, or a mode of floating-point numbers."""
    if quantize is None:
        return None
    return quantize.bits if quantize.mode == "affine" else cast(FloatMode, quantize.mode)


def _of_ranks(ranks: Ranks | None) -> dict[str, Any]:
    """Return what a baseline keeps of ranks: what the policy names."""
    if ranks is None:
        return {}
    named = {"ranks": ranks.size, "parallel": ranks.parallel, "split": ranks.split}
    return {key: value for key, value in named.items() if value is not None}


class Evaluation(Struct, frozen=True):
    """One target with its present figures and those of the baseline."""

    subject: TargetModel
    now: BaselineEntry
    before: BaselineEntry | None
    allow_bounds: bool

    @property
    def target(self) -> PolicyTarget:
        """The target of the policy."""
        return self.subject.target

    @property
    def sized(self) -> SizedModel:
        """The model as the target has it."""
        return self.subject.sized(self.target.quantize)

    def report(self) -> TargetReport:
        """Return the target's report.

        Raises:
            InputError: when a limit on growth has no baseline, or one for another question.
        """
        target = self.target
        self._require_baseline()
        figures, before = self.now.figures, self.before
        checks = tuple(
            self._with_remedies(check) if check.is_broken else check
            for check in judge_limits(target.limits, target.basis, figures, self._totals)
        )
        if self._beyond_context and not target.allow_beyond_context:
            checks += (self._context_check(),)
        checks += tuple(self._budget_checks())
        message = self._undecided(checks)
        status: TargetStatus = "undecided" if message else "passed"
        if any(check.is_broken for check in checks):
            status = "broken"
        return TargetReport(
            name=target.name,
            line=target.line,
            model=self.now.model,
            device=target.device.name,
            working_set_bytes=self._device.working_set_bytes,
            budget=self._device.budget,
            status=status,
            message=message,
            checks=checks,
            figures=figures,
            baseline_model=before.model if before else None,
            changes=tuple(changes(before.figures, figures)) if before else (),
            notes=tuple(self._notes()),
            source=self.sized.checkpoint.source,
        )

    @property
    def _device(self) -> Device:
        """The machine as the runtime uses it."""
        return self.sized.device or self.target.device

    @property
    def _totals(self) -> Totals:
        baseline = self.before.figures if self.before else None
        return Totals(self._device, baseline, self._accepts_bounds)

    @property
    def _accepts_bounds(self) -> bool:
        basis = self.target.basis
        return self.allow_bounds or (basis is not None and basis.least == "bound")

    @property
    def _beyond_context(self) -> int:
        """The tokens of the workload beyond the model's own limit, or the runtime's lower one."""
        limits = (self.sized.model.max_context, context_limit(self.sized.runtime_model))
        tokens = self.subject.workload.total_tokens
        return max(0, tokens - min(filter(None, limits), default=tokens))

    def _context_check(self) -> LimitCheck:
        tokens = self.subject.workload.total_tokens
        most = tokens - self._beyond_context
        return self._broken("model_context", "tokens", tokens, most, "the model's context")

    def _budget_checks(self) -> Iterator[LimitCheck]:
        """Yield that a runtime does not run the workload in the memory that it gives itself.

        Or that the host, or GPU and host together, have not the memory.
        """
        need = self.sized.requirement(self.subject.workload)
        budget, exceeded = need.budget, judge(need, self._device)[1]
        if "memory" in exceeded:
            memory = self._device.memory_bytes
            yield self._broken("memory", "bytes", need.shared_bytes, memory, "")
        if "host_memory" in exceeded and need.host:
            memory = need.host.memory_bytes or 0
            yield self._broken("host_memory", "bytes", need.host.nbytes, memory, "")
        if budget and OF_RUNTIME.intersection(exceeded):
            allowed, figures = budget.of_device(self._device), self.now.figures
            check = self._broken("runtime_budget", "bytes", need.budgeted_bytes, allowed, "")
            found = tuple(bounds(figures, with_workspace=not budget.for_cache))
            known = need.budgeted_bytes - ("workspace" in found) * figures.workspace_bytes
            certain = self._accepts_bounds or ("weights" not in found and known > allowed)
            yield check if certain else replace(check, undecided_by=found)

    def _broken(self, limit: str, unit: Unit, figure: int, allowed: int, whole: str) -> LimitCheck:
        """A limit that is not the policy's, and that the figure is above."""
        return LimitCheck(
            limit=limit,
            line=self.target.line,
            passed=False,
            unit=unit,
            sense="at most",
            figure=figure,
            allowed=allowed,
            written=str(allowed),
            whole=whole,
            missed_by=figure - allowed,
        )

    def _require_baseline(self) -> None:
        if not self.target.needs_baseline:
            return
        if self.before is None:
            raise InputError(f"no baseline to grow from; memfit gate --update writes {NAME}")
        if different := self._differences():
            raise InputError(
                f"the baseline answers another question ({different});"
                " memfit gate --update makes a new one"
            )

    def _differences(self) -> str:
        before = self.before.asked if self.before else self.now.asked
        return "; ".join(differences(before, self.now.asked))

    def _undecided(self, checks: tuple[LimitCheck, ...]) -> str | None:
        """Why bounds do not decide, None where the figures are no bounds or a bound is accepted."""
        found = dict.fromkeys(name for check in checks for name in check.undecided_by)
        if not found:
            return None
        return f"{'; '.join(map(self._bound, found))}; --allow-bounds accepts it"

    def _bound(self, name: BoundName) -> str:
        figures = self.now.figures
        match name:
            case "weights":
                reason = next((n.message for n in self.sized.footprint.notes), self.now.model)
                return f"the weights are a bound ({reason})"
            case "workspace":
                least = format_bytes(figures.peak_bytes - figures.workspace_bytes)
                peak = format_bytes(figures.peak_bytes)
                return f"the workspace is a bound (the peak is from {least} to {peak})"
            case "baseline_weights":
                return "the baseline's weights are a bound"
            case "baseline_workspace":
                return "the baseline's workspace is a bound"
            case _:
                assert_never(name)

    def _notes(self) -> Iterator[Note]:
        before = self.before
        if before and before.model == self.now.model:
            parts = replaced(before.checkpoint, self.now.checkpoint)
            if parts:
                text = f"{self.now.model} was replaced behind its name: {', '.join(parts)}"
                yield Note("warning", "checkpoint-changed", text)
        revision = self.sized.checkpoint.revision
        if self.subject.model.startswith(HUB) and f"@{revision}" not in self.subject.model:
            text = f"{self.now.model}: not pinned to a commit; it is {revision} now"
            yield Note("warning", "not-pinned", text)
        if self._beyond_context:
            text = f"the workload is {self._beyond_context} tokens longer than the model's context"
            yield Note("warning", "beyond-context", text)
        if different := self._differences():
            yield Note("warning", "other-question", f"the baseline is of {different}")
        yield from self._runtime_warnings()
        for note in self.sized.footprint.notes:
            if note.level == "warning":
                yield note
        for warning in self.sized.checkpoint.warnings:
            yield Note("warning", "checkpoint", warning)

    def _runtime_warnings(self) -> Iterator[Note]:
        workload = self.subject.workload
        figures, runtime_model = self.sized.figures_for(workload), self.sized.runtime_model
        yield from ending_notes(run_limits(runtime_model, workload))
        if can_take_more(self.sized) and not are_compared(self.sized):
            text = "by trace the peak is of this workload alone; a smaller one can take more"
            yield Note("info", "one-workload", text)
        for note in runtime_model.statements(workload, figures, Units.GB).notes:
            # A budget is a check of its own.
            if note.level == "warning" and note.code != "runtime-budget":
                yield note

    def _with_remedies(self, check: LimitCheck) -> LimitCheck:
        limit = next((one for one in self.target.limits if one.name == check.limit), None)
        if limit is None:
            return check
        footprint = self.sized.footprint
        is_on_mlx = self.sized.runtime_model.facet(OnMlx) is not None
        found = remedies(
            limit.name,
            Question(self.subject.workload, self.target.quantize, self._recipe),
            # Other runtimes load no weights that mlx-lm converts.
            ceil_div(8 * footprint.nbytes, footprint.parameters) * is_on_mlx,
            self._whole(limit),
        )
        return replace(check, mends=tuple(found))

    def _whole(self, limit: PolicyLimit) -> Callable[[Question], bool]:
        """What judges whether the target passes with a change that is for one limit."""
        first, *others = sorted(self.target.limits, key=lambda other: other.name != limit.name)
        judges = {one.name: self._judge_of(one) for one in (first, *others)}

        def passes(question: Question) -> bool:
            if not judges[limit.name](question) or not self._runs(question):
                return False
            return all(
                judges[one.name](question)
                if self._concerns(question, one)
                else judge_limit(one, self.now.figures, self._totals).is_passed
                for one in others
            )

        return passes

    def _judge_of(self, limit: PolicyLimit) -> Callable[[Question], bool]:
        if limit.name in TRAINING_LIMITS:
            return self._trains(limit)
        return partial(self._passes, limit)

    def _concerns(self, question: Question, limit: PolicyLimit) -> bool:
        """Whether a change is of what a limit is on: training, or the run."""
        if question.quantize != self.target.quantize:
            return True
        if limit.name in TRAINING_LIMITS:
            return question.recipe != self._recipe
        return question.workload != self.subject.workload

    def _runs(self, question: Question) -> bool:
        """Whether the changed workload is within the model's context and the runtime's budget."""
        target, workload = self.target, question.workload
        most = self.sized.model.max_context
        if most and workload.total_tokens > most and not target.allow_beyond_context:
            return False
        need = self.subject.sized(question.quantize).requirement(workload)
        if OF_RUNTIME.intersection(judge(need, self._device)[1]):
            return False
        basis = judge_limits((), target.basis, self.now.figures, self._totals)
        return all(check.is_passed for check in basis)

    @property
    def _recipe(self) -> Recipe:
        recipe = self.target.training or Recipe()
        if recipe.num_layers > 0:
            return recipe
        return replace(recipe, num_layers=len(self.sized.model.layers))

    def _trains(self, limit: PolicyLimit) -> Callable[[Question], bool]:
        """What judges a limit on training; its steps are traced once for all questions."""
        steps = self.subject.training_steps()

        def passes(question: Question) -> bool:
            recipe = question.recipe
            if recipe.fine_tune_type == "full" and question.quantize != self.target.quantize:
                return False  # mlx-lm trains no quantised weights
            nbytes = steps.run_bytes(recipe, question.quantize)
            figures = replace(self.now.figures, training_peak_bytes=nbytes)
            return judge_limit(limit, figures, self._totals).is_passed

        return passes

    def _passes(self, limit: PolicyLimit, question: Question) -> bool:
        sized = self.subject.sized(question.quantize)
        is_context = limit.name == "context"
        if is_context:
            prompt = question.workload.prompt_only(limit.amount.numerator)
            if not fits_comfortably(sized, prompt):
                return False  # one evaluation in place of a search

        def judged(*, with_smaller: bool) -> bool:
            figures = figures_of(
                sized, question.workload, with_context=is_context, with_smaller=with_smaller
            )
            return judge_limit(limit, figures, self._totals).is_passed

        # Smaller workloads are computed for those alone that may pass.
        return judged(with_smaller=False) and (
            limit.name not in RUN_LIMITS or judged(with_smaller=True)
        )
