"""``memfit plan context``: the contexts that fit for a number of requests, by runtime."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.commands.plan.subject import TRAFFIC, sized_model
from memfit.cli.exits import exit_of_verdict
from memfit.cli.options.groups import Only, OptionGroup, PlanOutput, grouped, option
from memfit.cli.options.questions import (
    BATCH,
    CONTEXT,
    IMAGES,
    PlannedModel,
    RankedMachine,
    ServedRuntime,
    WorkloadOptions,
)
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import parse_count
from memfit.estimators.questions.question import RUNTIME_DEFAULTS
from memfit.estimators.questions.target import named_runtime
from memfit.estimators.sizing.sized_model import require_loaded, with_runtime

if TYPE_CHECKING:
    from memfit.estimators.plans.context.plan import ContextQuestion

_MAX_VALUES = 64
_WORKLOAD = (*CONTEXT, *BATCH, *RUNTIME_DEFAULTS, *IMAGES, "cached_tokens")


def _counts(text: str) -> tuple[int, ...]:
    """Read a list of counts; return them ascending and each once."""
    values = {_positive(part) for part in text.split(",")}
    if len(values) > _MAX_VALUES:
        raise InputError(f"{len(values)} values: give at most {_MAX_VALUES}")
    return tuple(sorted(values))


def _positive(text: str) -> int:
    value = parse_count(text)
    if value < 1:
        raise InputError(f"{text!r}: must be at least 1")
    return value


class ContextOptions(OptionGroup, frozen=True, kw_only=True):
    """The table of contexts and requests."""

    contexts: tuple[int, ...] | None = option(
        metavar="A,B", help="Contexts in the table, such as 8k,32k.", read=_counts
    )
    requests: tuple[int, ...] | None = option(
        metavar="A,B", help="Numbers of concurrent requests in the table.", read=_counts
    )
    ceiling: int | None = option(metavar="TOKENS", help="Longest context to plan.", read=_positive)
    backend_cap: int | None = option(
        metavar="TOKENS", help="Longest context that the backend allows.", read=_positive
    )
    traffic: Path | None = TRAFFIC
    plot: bool = option("--plot", help="Draw memory against context.", default=False)

    def question(self) -> "ContextQuestion":
        """Return the question.

        Raises:
            InputError: when a value or the file of requests cannot be read.
        """
        from memfit.estimators.base.reading.request_trace import read_request_trace
        from memfit.estimators.plans.context.plan import MAX_REQUESTS, REQUESTS, ContextQuestion

        at_once = self.requests or REQUESTS
        if max(at_once) > MAX_REQUESTS:
            raise InputError(f"--requests {max(at_once)}: give at most {MAX_REQUESTS}")
        return ContextQuestion(
            contexts=self.contexts or (),
            requests=at_once,
            ceiling=self.ceiling,
            backend_cap=self.backend_cap,
            traffic=read_request_trace(self.traffic) if self.traffic else (),
        )


@grouped
def context(
    model: PlannedModel,
    options: ContextOptions,
    workload: Annotated[WorkloadOptions, Only(*_WORKLOAD)],
    machine: RankedMachine,
    runtime: ServedRuntime,
    output: PlanOutput,
) -> None:
    """Show the contexts that fit, and how many requests at once.

    The context that the runtime itself would choose is shown too.
    """
    from memfit.estimators.plans.context.plan import plan_context
    from memfit.estimators.sizing.estimate import curve
    from memfit.estimators.sizing.ranks import RankedModel
    from memfit.estimators.sizing.resolved import resolved

    question = options.question()
    rules = runtime.chosen()
    sized = sized_model(
        model,
        machine.first_machine(),
        runtime,
        verbose=output.verbose,
        margin_bytes=runtime.margin,
    )
    if runtime.runtime is None:
        rules = runtime.with_settings(runtime.versioned(named_runtime(sized.runtime)))
    named = runtime.runtime is not None
    sized = require_loaded(with_runtime(sized, rules))
    target = resolved(
        sized, workload, machine.over(), keeps_runtime=named, deciding=RankedModel.full_first
    )
    # Hundreds of workloads are sized: a trace of each takes too long.
    sized, run = target.sized.formula_view(), target.workload
    result = plan_context(sized, run, question)
    points = curve(sized, run) if output.draws(options.plot) else ()
    output.write(result, units=output.units, curve=points, as_type=model.as_type)
    raise typer.Exit(exit_of_verdict(result.verdict, is_requested=result.device is not None))
