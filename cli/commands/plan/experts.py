"""``memfit plan experts``: how many experts to keep in memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace

from memfit.cli.commands.plan.subject import disk_here, sized_for_mlx_lm
from memfit.cli.exits import Exit
from memfit.cli.options.groups import Only, OptionGroup, PlanOutput, grouped, option
from memfit.cli.options.questions import (
    CONTEXT,
    AdaptedModel,
    MachineOptions,
    VersionOptions,
    WorkloadOptions,
)
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import parse_counts, parse_rate
from memfit.estimators.base.workload import Workload

if TYPE_CHECKING:
    from memfit.estimators.plans.experts.replay import Replay
    from memfit.estimators.plans.experts.routing import RoutingProfile
    from memfit.estimators.results.experts import ExpertsPlan
    from memfit.estimators.sizing.sized_model import SizedModel
    from memfit.estimators.weights.expert_slots import ExpertLayer


_STORED = {
    "stored-profile": "the profile is of memfit tune experts; --profile FILE uses another",
    "stored-disk": "the rate of the disk is of memfit tune disk; --bandwidth RATE sets another",
}
"""What measurements of this machine a plan uses, by the codes of its notes."""


class ExpertOptions(OptionGroup, frozen=True, kw_only=True):
    """The experts to keep in memory."""

    capacity: tuple[int, ...] | None = option(
        metavar="N,N...", help="Experts per layer to show, such as 160,192,208.", read=parse_counts
    )
    profile: Path | None = option(
        metavar="FILE", help="JSON of routing counts: layer, expert, count."
    )
    routing: Path | None = option(
        metavar="FILE", help="Replay what memfit tune experts --record wrote, by every policy."
    )
    speed: int | None = option(
        metavar="TOKENS/S", min=1, help="With --routing: the least capacity that decodes so fast."
    )
    bandwidth: int | None = option(
        metavar="RATE", help="Read bandwidth of the disk, such as 3.5GB/s.", read=parse_rate
    )
    plot: bool = option("--plot", help="Draw memory and coverage by experts.", default=False)


@grouped
def experts(
    model: AdaptedModel,
    options: ExpertOptions,
    workload: Annotated[WorkloadOptions, Only(*CONTEXT, "kv_bits")],
    machine: MachineOptions,
    versions: VersionOptions,
    output: PlanOutput,
) -> None:
    """For a mixture too large for memory: how many experts to keep.

    Also the share of the routing they cover.
    """
    from memfit.estimators.plans.experts.plan import ExpertQuestion, plan_experts
    from memfit.estimators.sizing.partial_experts import experts_of, run_memory

    tokens, _ = workload.tokens()
    run = Workload(prompt_tokens=tokens, kv_bits=workload.kv_bits or None, quantized_kv_start=0)
    device = machine.machine()
    saved = None if options.bandwidth else disk_here(device)
    options = replace(options, bandwidth=options.bandwidth or saved)
    sized = sized_for_mlx_lm(model, device, versions, verbose=output.verbose)
    inventory = experts_of(sized)
    profile, replay = _read(options, sized, inventory.layers)
    result = plan_experts(
        inventory,
        ExpertQuestion(run_memory(sized, run), options.capacity or (), profile, options.bandwidth),
        model=sized.checkpoint.id,
        model_type=sized.model.model_type,
        runtime=sized.runtime_model.runtime,
        device=device,
    )
    if replay:
        result = _replayed(result, replay, sized, options)
    is_saved = profile is not None and (options.profile, options.routing) == (None, None)
    texts = {"stored-profile": is_saved, "stored-disk": bool(saved)}
    result = _with_measurements(result, sized, run, [code for code in texts if texts[code]])
    output.write(result, units=output.units, plot=output.draws(options.plot))
    fits = result.chosen.verdict != "exceeds" if result.chosen else device is None
    raise typer.Exit(Exit.YES if fits else Exit.NO)


def _read(
    options: ExpertOptions, sized: "SizedModel", layers: "Sequence[ExpertLayer]"
) -> "tuple[RoutingProfile | None, Replay | None]":
    """Return the profile of a file, else the one that ``memfit tune experts`` saved.

    With --routing also what replays the recorded choices, whose file has the profile.
    """
    from memfit.estimators.plans.experts.recording import read_recording
    from memfit.estimators.plans.experts.replay import Replay
    from memfit.estimators.plans.experts.routing import read_profile
    from memfit.probes.saved import saved_profile
    from memfit.probes.store import user_store

    if options.routing is None and options.speed is not None:
        raise InputError("--speed needs --routing: without one no policy is replayed")
    model_type = sized.model.model_type
    if options.routing:
        profile, recording = read_recording(options.routing, layers, model_type)
        return profile, Replay(profile, recording, layers)
    file = options.profile or saved_profile(sized.checkpoint, user_store())
    return (read_profile(file, layers, model_type) if file else None), None


def _replayed(
    result: "ExpertsPlan", replay: "Replay", sized: "SizedModel", options: ExpertOptions
) -> "ExpertsPlan":
    """Add what every policy misses, and how fast it decodes on the machine at least."""
    from fractions import Fraction

    from memfit.estimators.plans.experts.replay import replayed_plan
    from memfit.estimators.sizing.decode_speed import decode_speed

    workload = Workload(prompt_tokens=max(1, result.context_tokens), max_tokens=1)
    speed = decode_speed(sized, workload)
    least = (speed.range_tokens_per_second or (speed.most_tokens_per_second,))[0] if speed else None
    return replayed_plan(
        result,
        replay,
        decode=Fraction(least) if least else None,
        disk=options.bandwidth,
        wanted=options.speed,
    )


def _with_measurements(
    result: "ExpertsPlan", sized: "SizedModel", run: Workload, stored: "Sequence[str]"
) -> "ExpertsPlan":
    """Add what ``memfit tune experts`` measured here, and notes on what is ``stored``."""
    from memfit.estimators.machine.host import detect_host
    from memfit.estimators.plans.experts.plan import measured_worth
    from memfit.estimators.results.estimate import Note
    from memfit.estimators.sizing.estimate import ALONE, notes_on_versions
    from memfit.probes.saved import saved_capacities
    from memfit.probes.store import user_store

    measured = saved_capacities(sized.checkpoint, sized.device or detect_host(), user_store())
    others = notes_on_versions(sized, run, of=ALONE)
    notes = tuple(Note("info", code, _STORED[code]) for code in stored)
    result = replace(result, measured=measured, notes=(*notes, *result.notes, *others))
    return replace(result, worth=measured_worth(result))
