"""``memfit plan offload``: conversations kept in memory and on disk."""

from pathlib import Path
from typing import Annotated

import typer

from memfit.cli.commands.plan.subject import Model, size_subject
from memfit.cli.exits import Exit
from memfit.cli.option_values import DEFAULT_CONTEXT, requested_device, requested_quantization
from memfit.cli.options import (
    DeviceName,
    GroupSize,
    Json,
    Memory,
    Output,
    PlanForm,
    PlanFormat,
    Quantize,
    QuantMode,
    Regime,
    ShownUnits,
    Verbose,
    WorkingSet,
    parsed,
)
from memfit.estimators.base.units import Units, parse_count, parse_rate, parse_size
from memfit.estimators.machine.working_set import DEFAULT_REGIME


def offload(
    model: Model,
    conversations: Annotated[int, typer.Option(help="Number of conversations.")] = 8,
    tokens: Annotated[
        str | None, typer.Option(help="Tokens of each conversation, such as 18000 or 16k.")
    ] = None,
    stored_bits: Annotated[
        int, typer.Option(help="Bits of a stored conversation: 4, 8 or 16.")
    ] = 4,
    stored_group_size: Annotated[int, typer.Option(help="Group size of --stored-bits.")] = 64,
    cache_budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory for them; by default 90 % of the working set minus the active peak.",
        ),
    ] = None,
    disk: Annotated[str | None, typer.Option(metavar="SIZE", help="Free disk space.")] = None,
    read: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Read bandwidth of the disk, such as 3.5GB/s."),
    ] = None,
    write: Annotated[
        str | None, typer.Option(metavar="RATE", help="Write bandwidth of the disk, such as 2GB/s.")
    ] = None,
    prefill_speed: Annotated[
        int | None, typer.Option(metavar="N", help="Prompt tokens per second, not generated ones.")
    ] = None,
    requests: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Simulate this CSV or JSONL of agent, prompt_tokens and completion_tokens.",
        ),
    ] = None,
    quantize: Quantize = None,
    group_size: GroupSize = None,
    quant_mode: QuantMode = None,
    device: DeviceName = None,
    memory: Memory = None,
    working_set: WorkingSet = None,
    os_regime: Regime = DEFAULT_REGIME,
    plot: Annotated[
        bool, typer.Option("--plot", help="Draw the size of all conversations by tokens.")
    ] = False,
    format_: PlanForm = PlanFormat.TABLE,
    json_: Json = False,
    output: Output = None,
    units: ShownUnits = Units.GB,
    verbose: Verbose = False,
) -> None:
    """Show the memory and disk space of cached conversations.

    Also the time saved by loading them again.
    """
    # The library is imported here so that --help stays fast.
    from memfit.cli.render.output import deliver
    from memfit.cli.render.view import Answer
    from memfit.cli.render.views.offload import to_document
    from memfit.estimators.base.reading.request_trace import read_request_trace
    from memfit.estimators.base.workload import Workload
    from memfit.estimators.plans.offload.cache_tiers import Speeds
    from memfit.estimators.plans.offload.plan import OffloadQuestion, Server, plan_offload
    from memfit.estimators.plans.offload.session_cache import storage_of
    from memfit.estimators.sizing.estimate import device_summary

    length = parsed("--tokens", parse_count, tokens)
    question = OffloadQuestion(
        conversations=conversations,
        tokens=DEFAULT_CONTEXT if length is None else length,
        hot_bytes=parsed("--cache-budget", parse_size, cache_budget),
        disk_bytes=parsed("--disk", parse_size, disk),
        speeds=Speeds(
            parsed("--read", parse_rate, read), parsed("--write", parse_rate, write), prefill_speed
        ),
        requests=read_request_trace(requests, agents=True) if requests else (),
    )
    machine = requested_device(device, memory, working_set, os_regime)
    conversion = requested_quantization(quantize, group_size, quant_mode)
    sized = size_subject(model, machine, conversion, verbose=verbose)
    active = sized.requirement(Workload(prompt_tokens=question.tokens))
    result = plan_offload(
        storage_of(sized.model, bits=stored_bits, group_size=stored_group_size),
        question,
        Server(
            model=sized.checkpoint.id,
            model_type=sized.model.model_type,
            max_context=sized.model.max_context,
            weight_bytes=sized.resident_bytes,
            active_bytes=active.peak_bytes,
            device=machine,
            summary=device_summary(machine) if machine else None,
        ),
    )
    document = to_document(result, units, plot=plot)
    deliver(Answer(result, document), "json" if json_ else format_.value, output)
    raise typer.Exit(Exit.NO if result.hot_conversations == 0 else Exit.YES)
