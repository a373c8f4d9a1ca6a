"""``memfit plan static``: allocations of an engine that allocates before the first token."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.commands.plan.subject import sized_for_mlx_lm
from memfit.cli.exits import Exit
from memfit.cli.options.groups import Only, OptionGroup, PlanOutput, grouped, option
from memfit.cli.options.questions import CONTEXT, AdaptedModel, VersionOptions, WorkloadOptions
from memfit.cli.render.output import write_whole
from memfit.estimators.base.dtypes import Quantization

if TYPE_CHECKING:
    from memfit.estimators.sizing.sized_model import SizedModel
    from memfit.estimators.trace.graph_format import Trace

# Foundry prefills in chunks of 32 tokens.
FOUNDRY_CHUNK = 32
_LARGEST_TRACE = 2**30


class TraceOptions(OptionGroup, frozen=True, kw_only=True):
    """The recorded graph."""

    trace: Path | None = option(
        metavar="FILE", help="A recorded trace; by default MLX records one."
    )
    save_trace: Path | None = option(metavar="FILE", help="Write the recorded trace to a file.")
    prefill_step: int = option(help="Tokens of a recorded prompt chunk.", default=FOUNDRY_CHUNK)
    plot: bool = option("--plot", help="Draw the arena by call.", default=False)


@grouped
def static(
    model: AdaptedModel,
    options: TraceOptions,
    workload: Annotated[WorkloadOptions, Only(*CONTEXT)],
    versions: VersionOptions,
    output: PlanOutput,
) -> None:
    """For an engine that allocates at start: one arena for its graph.

    All other allocations are added.
    """
    from memfit.estimators.plans.static.plan import plan_static
    from memfit.estimators.trace.graph_format import to_json

    tokens, _ = workload.tokens()
    conversion = model.quantization()
    stored = _read(options.trace) if options.trace else None
    sized = sized_for_mlx_lm(model, None, versions, verbose=output.verbose)
    recorded = stored or _record(sized, tokens, options.prefill_step, conversion)
    if options.save_trace:
        write_whole(options.save_trace, to_json(recorded))
    result = plan_static(
        recorded,
        sized.model,
        name=sized.checkpoint.id,
        context_tokens=tokens,
        environment=os.environ,
    )
    output.write(result, units=output.units, plot=output.draws(options.plot))
    raise typer.Exit(Exit.YES)


def _read(path: Path) -> "Trace":
    from memfit.estimators.base.files import read_whole
    from memfit.estimators.trace.graph_format import from_json

    return from_json(read_whole(path, limit=_LARGEST_TRACE), path)


def _record(
    sized: "SizedModel", tokens: int, prefill_step: int, conversion: Quantization | None
) -> "Trace":
    from memfit.estimators.base.workload import Workload
    from memfit.estimators.trace.kernel_stubs import TraceTarget
    from memfit.estimators.trace.traced_model import TracedModel

    checkpoint = sized.checkpoint
    target = TraceTarget(versions=sized.runtime_model.runtime.versions)
    model = TracedModel(
        checkpoint.config,
        target.backend,
        name=checkpoint.config_name,
        dtype=sized.model.dtype,
        tensors=checkpoint.tensors,
        quantize=conversion,
        adapter=sized.runtime_model.subject.adapter,
    )
    # Two generated tokens, so that the trace has a decode step.
    workload = Workload(prompt_tokens=tokens, max_tokens=2, prefill_step=prefill_step)
    return model.record(workload, target)[0]
