"""``memfit plan static``: allocations of an engine that allocates before the first token."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.commands.plan.subject import Model, size_subject
from memfit.cli.exits import Exit
from memfit.cli.option_values import DEFAULT_CONTEXT, requested_quantization
from memfit.cli.options import (
    Context,
    GroupSize,
    Json,
    Output,
    PlanForm,
    PlanFormat,
    Quantize,
    QuantMode,
    ShownUnits,
    Verbose,
    parsed,
)
from memfit.cli.render.output import write_whole
from memfit.estimators.base.quantization import Quantization
from memfit.estimators.base.units import Units, parse_count

if TYPE_CHECKING:
    from memfit.estimators.sizing.sized_model import SizedModel
    from memfit.estimators.trace.graph_format import Trace

# Foundry prefills in chunks of 32 tokens.
FOUNDRY_CHUNK = 32
_LARGEST_TRACE = 2**30


def static(
    model: Model,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A recorded trace; by default MLX records one."),
    ] = None,
    save_trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the recorded trace to a file.")
    ] = None,
    context: Context = None,
    prefill_step: Annotated[
        int, typer.Option(help="Tokens of a recorded prompt chunk.")
    ] = FOUNDRY_CHUNK,
    quantize: Quantize = None,
    group_size: GroupSize = None,
    quant_mode: QuantMode = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw the arena by call.")] = False,
    format_: PlanForm = PlanFormat.TABLE,
    json_: Json = False,
    output: Output = None,
    units: ShownUnits = Units.GB,
    verbose: Verbose = False,
) -> None:
    """Place every intermediate of a recorded graph in one arena.

    All other allocations are added.
    """
    # The library is imported here so that --help stays fast.
    from memfit.cli.render.output import deliver
    from memfit.cli.render.view import Answer
    from memfit.cli.render.views.static import to_document
    from memfit.estimators.plans.static.plan import plan_static
    from memfit.estimators.trace.graph_format import to_json

    asked = parsed("--context", parse_count, context)
    tokens = DEFAULT_CONTEXT if asked is None else asked
    conversion = requested_quantization(quantize, group_size, quant_mode)
    kept = _read(trace) if trace else None
    sized = size_subject(model, None, conversion, verbose=verbose)
    recorded = kept or _record(sized, tokens, prefill_step, conversion)
    if save_trace:
        write_whole(save_trace, to_json(recorded))
    result = plan_static(
        recorded,
        sized.model,
        name=sized.checkpoint.id,
        context_tokens=tokens,
        environment=os.environ,
    )
    document = to_document(result, units, plot=plot)
    deliver(Answer(result, document), "json" if json_ else format_.value, output)
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
    from memfit.estimators.trace.traced_model import record

    checkpoint = sized.checkpoint
    return record(
        checkpoint.config,
        # Two generated tokens, so that the trace has a decode step.
        Workload(prompt_tokens=tokens, max_tokens=2, prefill_step=prefill_step),
        target=TraceTarget(),
        name=checkpoint.config_name,
        dtype=sized.model.dtype,
        tensors=checkpoint.tensors,
        quantize=conversion,
    )
