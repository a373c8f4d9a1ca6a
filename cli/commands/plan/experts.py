"""``memfit plan experts``: how many experts to keep in memory."""

from pathlib import Path
from typing import Annotated

import typer

from memfit.cli.commands.plan.subject import Model, size_subject
from memfit.cli.exits import Exit
from memfit.cli.option_values import DEFAULT_CONTEXT, requested_device, requested_quantization
from memfit.cli.options import (
    Context,
    DeviceName,
    GroupSize,
    Json,
    KVBits,
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
from memfit.estimators.base.units import Units, parse_count, parse_rate
from memfit.estimators.machine.working_set import DEFAULT_REGIME


def experts(
    model: Model,
    capacity: Annotated[
        str | None,
        typer.Option(metavar="N,N...", help="Experts per layer to show, such as 160,192,208."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON of routing counts: layer, expert, count."),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Read bandwidth of the disk, such as 3.5GB/s."),
    ] = None,
    context: Context = None,
    kv_bits: KVBits = None,
    quantize: Quantize = None,
    group_size: GroupSize = None,
    quant_mode: QuantMode = None,
    device: DeviceName = None,
    memory: Memory = None,
    working_set: WorkingSet = None,
    os_regime: Regime = DEFAULT_REGIME,
    plot: Annotated[
        bool, typer.Option("--plot", help="Draw memory and coverage by experts.")
    ] = False,
    format_: PlanForm = PlanFormat.TABLE,
    json_: Json = False,
    output: Output = None,
    units: ShownUnits = Units.GB,
    verbose: Verbose = False,
) -> None:
    """Show memory and disk reads for numbers of experts kept in memory.

    Also the share of the routing they cover.
    """
    # The library is imported here so that --help stays fast.
    from memfit.cli.render.output import deliver
    from memfit.cli.render.view import Answer
    from memfit.cli.render.views.experts import to_document
    from memfit.estimators.base.workload import Workload
    from memfit.estimators.plans.experts.expert_slots import inventory
    from memfit.estimators.plans.experts.plan import ExpertQuestion, RunMemory, plan_experts
    from memfit.estimators.plans.experts.routing import read_profile
    from memfit.estimators.sizing.estimate import device_summary

    speed = parsed("--bandwidth", parse_rate, bandwidth)
    capacities = parsed("--capacity", _counts, capacity) or ()
    tokens = parsed("--context", parse_count, context)
    workload = Workload(
        prompt_tokens=DEFAULT_CONTEXT if tokens is None else tokens,
        kv_bits=kv_bits,
        quantized_kv_start=0,
    )
    machine = requested_device(device, memory, working_set, os_regime)
    conversion = requested_quantization(quantize, group_size, quant_mode)
    sized = size_subject(model, machine, conversion, verbose=verbose)
    tensors = None if conversion else sized.checkpoint.tensors
    kept = inventory(sized.model, tensors, sized.footprint)
    figures = sized.figures_for(workload)
    result = plan_experts(
        kept,
        ExpertQuestion(
            RunMemory(
                workload.prompt_tokens,
                figures.kv.nbytes,
                figures.ssm_bytes,
                figures.moment.workspace_bytes,
            ),
            capacities,
            read_profile(profile, kept.layers) if profile else None,
            speed,
        ),
        model=sized.checkpoint.id,
        model_type=sized.model.model_type,
        device=machine,
        summary=device_summary(machine) if machine else None,
    )
    document = to_document(result, units, plot=plot)
    deliver(Answer(result, document), "json" if json_ else format_.value, output)
    row = result.chosen
    fits = row.verdict != "exceeds" if row else machine is None
    raise typer.Exit(Exit.YES if fits else Exit.NO)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(parse_count(part.strip()) for part in text.split(",")))
