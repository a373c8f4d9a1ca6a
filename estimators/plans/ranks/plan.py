"""``memfit plan ranks``: how many machines a model needs, and what each more of them allows."""

from collections.abc import Iterator, Sequence

from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.ranks import Parallel
from memfit.estimators.base.units import Units
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.results.ranks import Impossible, RankChoice, RanksPlan
from memfit.estimators.runtimes.budget import judge
from memfit.estimators.runtimes.registry import runtime_summary
from memfit.estimators.runtimes.run_limits import run_limits, tightened
from memfit.estimators.sizing.actions import converting
from memfit.estimators.sizing.estimate import device_summary, model_summary, notes_on_versions
from memfit.estimators.sizing.ranks import RankedModel, Ranks, ranked
from memfit.estimators.sizing.recommend import recommended_context
from memfit.estimators.sizing.serving import server_flags
from memfit.estimators.sizing.sized_model import SizedModel

SIZES = (2, 3, 4, 6, 8)
WAYS: tuple[Parallel, ...] = ("tensor", "pipeline")


def plan_ranks(
    sized: SizedModel, device: Device, workload: Workload, units: Units = Units.GB
) -> RanksPlan:
    """Return what a model needs on one machine and on several equal ones.

    Raises:
        UnsupportedError: when the runtime cannot run the workload.
    """
    alone = ranked(sized, None)
    choices, impossible = [_choice(alone, 1, workload)], list[Impossible]()
    for found in _several(sized, SIZES, workload):
        if isinstance(found, Impossible):
            impossible.append(found)
        else:
            machines, shared = found
            choices.append(_choice(shared, machines, workload))
    fitting = [each.machines for each in choices if each.verdict in ("fits", "tight")]
    two = [each.longest_context or 0 for each in choices if each.machines == 2]
    gained = max(two) - (choices[0].longest_context or 0) if two else None
    return RanksPlan(
        model=model_summary(sized),
        runtime=runtime_summary(sized.runtime_model.runtime),
        device=device_summary(device),
        workload=workload,
        choices=tuple(choices),
        impossible=tuple(impossible),
        least_machines=min(fitting, default=None),
        second_adds_tokens=gained,
        notes=notes_on_versions(sized, workload, units, of="one machine: "),
    )


def _several(
    sized: SizedModel, sizes: Sequence[int], workload: Workload
) -> Iterator[tuple[int, RankedModel] | Impossible]:
    for size in sizes:
        for parallel in WAYS:
            try:
                yield size, ranked(sized, Ranks(size, parallel))
            except (InputError, UnsupportedError) as error:
                yield Impossible(machines=size, parallel=parallel, reason=str(error))


def _choice(shared: RankedModel, machines: int, workload: Workload) -> RankChoice:
    tightest = shared.tightest(workload)
    need = tightest.requirement(workload)
    distinct = {id(each): each for each in shared.ranks}.values()
    contexts = [recommended_context(each, workload) for each in distinct]
    fitting = [tokens for tokens in contexts if tokens]
    runtime_model, server = tightest.runtime_model, server_flags(tightest, workload)
    return RankChoice(
        machines=machines,
        parallel=shared.parallel,
        verdict=tightened(judge(need, tightest.device)[0], run_limits(runtime_model, workload)),
        needed_bytes=need.peak_bytes,
        weights_bytes=tightest.resident_bytes,
        longest_context=min(fitting) if len(fitting) == len(contexts) else None,
        commands=tuple(
            converting(tightest, lambda model: runtime_model.commands(workload, model, server))
        ),
    )
