"""``memfit plan ranks``: how many machines a model needs, and what each more of them allows."""

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.ranks import Parallel
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.questions.target import Ranks
from memfit.estimators.results.ranks import Impossible, RankChoice, RanksPlan
from memfit.estimators.runtimes.facets import Commands
from memfit.estimators.runtimes.registry import runtime_summary
from memfit.estimators.runtimes.runtime import judge
from memfit.estimators.sizing.advise import converting
from memfit.estimators.sizing.estimate import device_summary, model_summary, notes_on_versions
from memfit.estimators.sizing.ranks import RankedModel, ranked
from memfit.estimators.sizing.recommend import recommended_context
from memfit.estimators.sizing.run_limits import run_limits, tightened
from memfit.estimators.sizing.serving import server_flags
from memfit.estimators.sizing.sized_model import SizedModel

SIZES = (2, 3, 4, 6, 8)
WAYS: tuple[Parallel, ...] = ("tensor", "pipeline")


def plan_ranks(sized: SizedModel, device: Device, workload: Workload) -> RanksPlan:
    """Return what a model needs on one machine and on several equal ones.

    Raises:
        UnsupportedError: when the runtime cannot run the workload.
    """
    ways = (Ranks(size, parallel) for size in SIZES for parallel in WAYS)
    alone = [_choice(ranked(sized, None), None, workload)]
    return _plan(sized, device, workload, alone, ways)


def plan_named(sized: SizedModel, devices: Sequence[Device], workload: Workload) -> RanksPlan:
    """Return what a model needs on each of these machines, and on all of them together.

    Raises:
        UnsupportedError: when the runtime cannot run the workload.
    """
    ways = (Ranks(len(devices), parallel, devices=tuple(devices)) for parallel in WAYS)
    alone = [
        replace(_choice(ranked(sized.on(device), None), None, workload), on=(device.name,))
        for device in dict.fromkeys(devices)
    ]
    return _plan(sized, devices[0], workload, alone, ways)


def _plan(
    sized: SizedModel,
    device: Device,
    workload: Workload,
    alone: Sequence[RankChoice],
    ways: Iterable[Ranks],
) -> RanksPlan:
    """The plan for each machine ``alone``, then for the ``ways`` to run on several."""
    choices, impossible = [*alone], list[Impossible]()
    for ranks in ways:
        assert ranks.parallel is not None
        try:
            choices.append(_choice(ranked(sized, ranks), ranks, workload))
        except (InputError, UnsupportedError) as error:
            found = Impossible(machines=ranks.size, parallel=ranks.parallel, reason=str(error))
            impossible.append(found)
    fitting = [each.machines for each in choices if each.verdict in ("fits", "tight")]
    two = [each.longest_context or 0 for each in choices if each.machines == 2]
    gained = max(two) - max(each.longest_context or 0 for each in alone) if two else None
    return RanksPlan(
        model=model_summary(sized),
        runtime=runtime_summary(sized.runtime_model.runtime),
        device=device_summary(device),
        workload=workload,
        choices=tuple(choices),
        impossible=tuple(impossible),
        least_machines=min(fitting, default=None),
        second_adds_tokens=gained,
        notes=notes_on_versions(sized, workload, of="one machine: "),
    )


def _choice(shared: RankedModel, ranks: Ranks | None, workload: Workload) -> RankChoice:
    tightest = shared.tightest(workload)
    need = tightest.requirement(workload)
    distinct = {id(each): each for each in shared.ranks}.values()
    contexts = [recommended_context(each, workload) for each in distinct]
    fitting = [tokens for tokens in contexts if tokens]
    runtime_model, server = tightest.runtime_model, server_flags(tightest, workload)
    program = runtime_model.facet(Commands)
    return RankChoice(
        machines=ranks.size if ranks else 1,
        parallel=shared.parallel,
        on=tuple(device.name for device in ranks.devices if device) if ranks else (),
        verdict=tightened(judge(need, tightest.device)[0], run_limits(tightest, workload)),
        needed_bytes=need.peak_bytes,
        weights_bytes=tightest.resident_bytes,
        longest_context=min(fitting) if len(fitting) == len(contexts) else None,
        commands=tuple(
            converting(
                tightest,
                lambda model: program.commands(workload, model, server) if program else (),
            )
        ),
    )
