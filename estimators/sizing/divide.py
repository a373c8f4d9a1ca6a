"""A model that is too large for a GPU, divided between it and its host as llama.cpp does it."""

from collections.abc import Iterator

from msgspec import UNSET, Struct
from msgspec.structs import replace

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.results.advice import Action
from memfit.estimators.runtimes.facets import Commands, SplitMemory
from memfit.estimators.runtimes.registry import get_runtime
from memfit.estimators.runtimes.runtime import Runtime, judge
from memfit.estimators.sizing.joint import JointSearch
from memfit.estimators.sizing.search import first_fitting, longest_context, longest_prompt
from memfit.estimators.sizing.sized_model import SizedModel, with_runtime

_DIVIDES = "llama.cpp"
"""The runtime that keeps a part of a model on the host."""


class _Divided(Struct, frozen=True):
    """A model in two memories, and the request under its runtime."""

    sized: SizedModel
    workload: Workload
    settings: dict[str, int]


def divided(search: JointSearch) -> Iterator[Action]:
    """Yield the division with the most on the GPU that fits it, if the host has the room.

    Where the size of the host is not known, the verdict of the action is not either.
    """
    sized, device = search.sized, search.sized.device
    # A rank is a part of a model already; the command of a draft model is not described.
    if device is None or not device.has_host or sized.runtime_model.subject.rank or sized.draft:
        return
    try:
        chosen = _most_on_gpu(*_under(sized, search.workload))
    except UnsupportedError:  # the runtime does not run this model, or not this request
        return
    if chosen is None:
        return
    sized, workload = chosen.sized, chosen.workload
    need = sized.requirement(workload)
    verdict, _ = judge(need, device)
    if verdict == "exceeds" or need.host is None:
        return
    most, is_known = longest_prompt(sized), verdict != "unknown"
    program = sized.runtime_model.facet(Commands)
    commands = program.commands(workload, sized.checkpoint.to_load, None) if program else ()
    yield Action(
        goal="request",
        settings=chosen.settings,
        commands=commands,
        cost="speed",
        verdict=verdict,
        peak_bytes=need.peak_bytes - sized.margin_bytes,
        needed_bytes=need.peak_bytes,
        context_tokens=(longest_context(sized, workload, most) or 0) if is_known else None,
        host_bytes=need.host.nbytes,
        host_memory_bytes=need.host.least_memory_bytes,
        runtime=UNSET if sized.runtime == search.sized.runtime else sized.runtime,
    )


def _under(sized: SizedModel, workload: Workload) -> tuple[SizedModel, Workload]:
    """The model under the runtime that divides it, with that one's own prefill step."""
    if sized.runtime == _DIVIDES:
        return sized, workload
    runtime = get_runtime(_DIVIDES)
    if workload.prefill_step != sized.runtime_model.runtime.prefill_step:
        return with_runtime(sized, runtime), workload
    step = runtime.prefill_step
    return with_runtime(sized, runtime), replace(workload, prefill_step=step)


def _most_on_gpu(sized: SizedModel, workload: Workload) -> _Divided | None:
    """The first division that fits the GPU."""

    def under(runtime: Runtime) -> SizedModel:
        return with_runtime(sized, runtime)

    def fits(division: tuple[dict[str, int], Runtime]) -> bool:
        need = replace(under(division[1]).requirement(workload), host=None)
        return judge(need, sized.device)[0] == "fits"

    split = sized.runtime_model.facet(SplitMemory)
    for ladder in split.divisions() if split else ():
        if chosen := first_fitting(ladder, fits, monotone=True):
            return _Divided(under(chosen[1]), workload, chosen[0])
    return None
