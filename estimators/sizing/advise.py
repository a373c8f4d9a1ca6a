"""What follows from an estimate: the grid, each setting, and what to do, cheapest first."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from memfit.estimators.base.units import Units, format_bytes, open_size
from memfit.estimators.base.workload import ServerSettings, Workload
from memfit.estimators.machine.device import wired_limit
from memfit.estimators.results.advice import (
    Action,
    Advice,
    FirstToken,
    Grid,
    PartialExperts,
    Recommendation,
    Recommended,
    ServerRun,
    impossible,
    no_recommendation,
    not_applicable,
)
from memfit.estimators.results.result import both_units
from memfit.estimators.runtimes.facets import (
    Commands,
    HeadDrafting,
    MlxLmPrograms,
    NvidiaOnly,
    OnMlx,
    loaded_weights,
)
from memfit.estimators.runtimes.mlx_lm_commands import convert_command, draft_flags
from memfit.estimators.runtimes.runtime import judge
from memfit.estimators.runtimes.source import Interpolated
from memfit.estimators.sizing.grid import (
    NO_GRID,
    NO_MACS,
    mac_grid,
    prompt_grid,
    with_server,
    with_traces,
)
from memfit.estimators.sizing.joint import JointSearch, Longest, RequestSettings, macs, smallest_mac
from memfit.estimators.sizing.opening import weight_bits_of
from memfit.estimators.sizing.prefill_speed import first_tokens
from memfit.estimators.sizing.recommend import recommend, with_changes
from memfit.estimators.sizing.run_limits import prompt_verdict
from memfit.estimators.sizing.search import (
    CONTEXT_STEP,
    is_accepted,
    longest_context,
    longest_prompt,
)
from memfit.estimators.sizing.serving import Serving, not_served, served_here
from memfit.estimators.sizing.sized_model import SizedModel, is_loadable


class Advised(Struct, frozen=True):
    """What follows from an estimate, in fields of `Estimate`."""

    recommendation: Recommendation
    actions: tuple[Action, ...]
    best_action: int | None
    recommended: Recommended
    partial_experts: PartialExperts | UnsetType
    grid: Grid


NOT_RECOMMENDED = Recommended(context_tokens=None, wired_limit_bytes=None, expert_capacity=None)
NO_ADVICE = Advised(no_recommendation("not searched"), (), None, NOT_RECOMMENDED, UNSET, NO_GRID)
"""Where nothing is searched."""


class Solution(Struct, frozen=True):
    """What makes a request fit."""

    settings: tuple[RequestSettings, ...] = ()
    """On its own machine: the cheapest that fit, after cheaper ones that fit tightly."""
    unchanged: tuple[JointSearch, RequestSettings] | None = None
    """The smallest Mac on which nothing else has to change."""
    smallest: tuple[JointSearch, RequestSettings] | None = None
    """The smallest Mac on which any settings fit, with the cheapest of them."""


def solve(search: JointSearch, ladder: Callable[[], Sequence[JointSearch]]) -> Solution:
    """Return what makes a request fit; ``ladder`` gives the Macs to take instead of its own."""
    settings = search.cheapest() if search.sized.device else ()
    if settings and settings[0] == search.requested and search.verdict(settings[-1]) == "fits":
        return Solution(settings)
    larger = ladder()
    unchanged = smallest_mac(larger, lambda on_mac: on_mac.best([search.requested]))
    if settings:
        return Solution(settings, unchanged)
    return Solution((), unchanged, smallest_mac(larger, JointSearch.cheapest))


def advise(sized: SizedModel, workload: Workload) -> Advised:
    """Return what follows from a workload on a model.

    By trace, which takes long, settings are searched for the request alone; grid, other weights
    and other machines are by formula.
    """
    search = search_of(sized, workload)
    shown = search.by_formula()
    ladder = cache(partial(macs, shown))
    solution = solve(search, ladder)
    advice = recommend(search, solution.settings, memory=memory_advice(search, solution))
    # By formula in addition to traces, rows of other weights are shown where they are an answer.
    if search.formula and solution.settings and not solution.settings[-1].weight_bits:
        shown = replace(shown, weight_bits=())
    grid = _grid(shown, ladder)
    if isinstance(shown.sized.runtime_model.source, Interpolated) and sized.device:
        grid = with_traces(grid, search, advice.context_tokens.value or 0)
    every = actions(search, solution)
    best = best_action(every)
    chosen = None if best is None else every[best]
    if is_here := chosen is not None and "memory_bytes" not in chosen.settings:
        grid = with_server(grid, shown, chosen)
    partial_experts = None if is_here else _partial_experts(shown)
    what_to_set = recommended(search, chosen, partial_experts)
    return Advised(advice, every, best, what_to_set, partial_experts or UNSET, grid)


def memory_advice(search: JointSearch, solution: Solution) -> Advice:
    """Return the memory that a machine must have."""
    device = search.sized.device
    is_off_macs = search.sized.runtime_model.facet(NvidiaOnly)
    if is_off_macs or (device and device.backend != "metal"):
        return not_applicable("only Macs are looked through")
    if device and solution.settings:
        assumes = solution.settings[-1].changes(search.requested)
        text = f"the memory of this machine is enough{with_changes(assumes)}"
        return Advice("keep", device.memory_bytes, text, assumes)
    if solution.smallest is None or (mac := solution.smallest[0].sized.device) is None:
        return impossible("no Mac is large enough")
    on_mac, settings = solution.smallest
    need, assumes = on_mac.need(settings), settings.changes(search.requested)
    why = f"the smallest Mac that fits{with_changes(assumes)} has"
    why += f" {format_bytes(mac.memory_bytes, Units.GIB)}"
    why += f", for {open_size(max(need.peak_bytes, need.shared_bytes))}"
    return both_units(Advice("change", mac.memory_bytes, why, assumes))


def _partial_experts(search: JointSearch) -> PartialExperts | None:
    if not search.sized.model.experts():
        return None
    # What is published about them, which no other model needs.
    from memfit.estimators.sizing.partial_experts import partial_experts

    return partial_experts(search)


def search_of(sized: SizedModel, workload: Workload) -> JointSearch:
    """Return the search for settings of a workload."""
    formula = sized.formula_view() if sized.runtime_model.source.method == "trace" else None
    return JointSearch(sized, workload, weight_bits_of(sized), formula)


def _grid(search: JointSearch, ladder: Callable[[], Sequence[JointSearch]]) -> Grid:
    if search.sized.device:
        return prompt_grid(search)
    is_off_macs = search.sized.runtime_model.facet(NvidiaOnly)
    return NO_MACS if is_off_macs else mac_grid(search, ladder())


def recommended(
    search: JointSearch, best: Action | None, partial: PartialExperts | None
) -> Recommended:
    """Return what to set for the best action on the machine of the search.

    Where there is none, these are the experts of a ``partial`` model.
    """
    if best is None or "memory_bytes" in best.settings:
        return replace(NOT_RECOMMENDED, expert_capacity=partial.experts if partial else None)
    sized = search.model(best.settings.get("weight_bits"))
    is_divided = best.host_bytes is not UNSET
    if best.server:
        return _of_server(sized, best.server, search.workload)
    if not best.context_tokens or is_divided:
        return _recommended(sized, search.workload, best.context_tokens, None)
    chosen = replace(search.requested, **best.settings)
    needed_bytes = search.need(chosen, best.context_tokens).peak_bytes
    return _recommended(sized, search.workload, best.context_tokens, needed_bytes)


def recommended_here(sized: SizedModel, workload: Workload) -> Recommended:
    """Return what to set for a workload on the model's device, without other settings."""
    if server := served_here(sized, workload):
        return _of_server(sized, server, workload)
    tokens = longest_context(sized, workload, longest_prompt(sized))
    need = sized.requirement(workload.prompt_only(tokens)) if tokens else None
    return _recommended(sized, workload, tokens, need.peak_bytes if need else None)


def _of_server(sized: SizedModel, server: ServerRun, workload: Workload) -> Recommended:
    """What to set for a server: for its longest prompt or, if none was searched, the request's."""
    if server.context_tokens is None:
        return _recommended(sized, workload, workload.prompt_tokens, server.needed_bytes)
    return _recommended(sized, workload, server.context_tokens, server.context_needed_bytes)


def _recommended(
    sized: SizedModel, workload: Workload, tokens: int | None, needed_bytes: int | None
) -> Recommended:
    """The longest prompt, and what follows from it."""
    device, counts = sized.device, {moe.experts for moe in sized.model.experts().values()}
    kept = loaded_weights(sized.runtime_model).experts
    is_wired = device and device.backend == "metal" and sized.runtime_model.facet(OnMlx)
    return Recommended(
        context_tokens=tokens,
        context_verdict=prompt_verdict(sized, workload, tokens or 0),
        wired_limit_bytes=(
            wired_limit(needed_bytes, device).nbytes
            if device and is_wired and needed_bytes
            else None
        ),
        expert_capacity=kept.experts if kept else max(counts, default=None),
        experts=kept.of if kept and kept.experts < kept.of else UNSET,
    )


def actions(search: JointSearch, solution: Solution) -> tuple[Action, ...]:
    """Return what to do: for the request, then for longer prompts, each cheapest first."""
    every = [_action(search, settings) for settings in solution.settings]
    on_macs = dict.fromkeys((solution.smallest, solution.unchanged))
    every += [_on_mac(*each) for each in on_macs if each]
    device = search.sized.device
    if device and device.has_host and search.requested not in solution.settings:
        # Few machines have two memories.
        from memfit.estimators.sizing.divide import divided

        every += divided(search)
    if solution.settings and search.searches_prompts:
        every += _for_longer_prompts(search, solution.settings[-1])
    return tuple(every)


def best_action(every: Sequence[Action]) -> int | None:
    """Return the place of the cheapest action that makes the request fit, None without one.

    On the machine of the request, one that fits tightly comes before one that needs a host of
    unknown size, and that before another machine; of these the one without other changes is first.
    """
    here = ("fits", "tight", "unknown")

    def rank(action: Action) -> int | None:
        if action.goal != "request" or action.verdict not in here:
            return None
        if "memory_bytes" not in action.settings:
            return here.index(action.verdict)
        return len(here) + (set(action.settings) != {"memory_bytes"})

    ranked = [
        (each, place) for place, action in enumerate(every) if (each := rank(action)) is not None
    ]
    return min(ranked)[1] if ranked else None


def _for_longer_prompts(search: JointSearch, settings: RequestSettings) -> Iterator[Action]:
    """Other prefill steps, then fewer bits of the cache, then of the weights."""
    fewer = [bits for bits in search.weight_bits if bits < (settings.weight_bits or 16)]
    ladder: list[list[RequestSettings]] = [
        [settings],
        [replace(settings, kv_bits=bits) for bits in search.kv_bits() if bits != settings.kv_bits],
        [replace(settings, weight_bits=bits) for bits in fewer],
    ]
    # The recommendation has that of the request's own settings. A request that fits tightly may be
    # longer than all that fit.
    known = (search.longest_with(settings), search.longest_with(search.requested))
    best = max(*known, search.workload.total_tokens)
    most = longest_prompt(search.sized) // CONTEXT_STEP * CONTEXT_STEP
    for candidates in ladder:
        if best >= most:
            return
        longest = max(
            (search.longest(each) for each in candidates if is_accepted(search.converts, each)),
            key=lambda each: each.tokens,
            default=Longest(0, settings),
        )
        if longest.tokens > best:
            best = longest.tokens
            yield _action(search, longest.settings, "longer_prompt", best)


def _on_mac(on_mac: JointSearch, settings: RequestSettings) -> Action:
    mac = on_mac.sized.device
    assert mac is not None
    action = _action(on_mac, settings, is_here=False)
    return replace(
        action, settings={**action.settings, "memory_bytes": mac.memory_bytes}, cost="hardware"
    )


def _action(
    search: JointSearch,
    settings: RequestSettings,
    goal: Literal["request", "longer_prompt"] = "request",
    context_tokens: int | None = None,
    *,
    is_here: bool = True,
) -> Action:
    need = search.need(settings)
    longest = search.longest_with(settings) if context_tokens is None else context_tokens
    # The longest prompts are those of one run: a server has no room for them.
    programs = search.sized.runtime_model.facet(MlxLmPrograms)
    is_request = goal == "request" and programs is not None
    no_server = not_served(search) if is_request else ""
    server = None
    if is_request and not no_server:
        # A bound of many rows takes dozens of figures: their longest prompt is not searched.
        reach = longest if is_here and search.workload.batch == 1 else None
        fits = search.verdict(settings) == "fits"
        server = Serving(search).run(settings, reach) if fits else None
        no_server = "" if server else "has no room for a prompt cache beside this prompt"
    longer = context_tokens if goal == "longer_prompt" else None
    verdict = search.stated_verdict(settings, longer)
    flags = server.settings if server else None
    conversion = search.conversion(settings.weight_bits)
    # A conversion that the machine has no room for is not printed to be pasted.
    converts = conversion is None or conversion.verdict != "exceeds"
    return Action(
        goal=goal,
        settings=settings.changes(search.requested),
        commands=tuple(_commands(search, settings, longer, flags)) if converts else (),
        cost=settings.cost(search.requested),
        verdict=verdict,
        peak_bytes=need.peak_bytes - search.sized.margin_bytes,
        needed_bytes=need.peak_bytes,
        context_tokens=longest,
        server=server,
        no_server=no_server,
        conversion=conversion or UNSET,
        first_token=next(iter(_first(search, settings, longer)), UNSET),
    )


def _first(
    search: JointSearch, settings: RequestSettings, prompt_tokens: int | None
) -> tuple[FirstToken, ...]:
    workload = search.workload_with(settings, prompt_tokens)
    return first_tokens(search.model(settings.weight_bits), workload)


def _commands(
    search: JointSearch,
    settings: RequestSettings,
    prompt_tokens: int | None,
    server: ServerSettings | None,
) -> Iterator[str]:
    """The conversion, where the weights change, and the run, for a prompt of that length."""
    sized = search.model(settings.weight_bits)
    workload = search.workload_with(settings, prompt_tokens)
    if server is None and not _runs_alone(search, settings, prompt_tokens):
        return iter(())

    def run(model: str) -> Iterable[str]:
        program = sized.runtime_model.facet(Commands)
        commands = program.commands(workload, model, server) if program else ()
        if sized.draft is None:
            return commands
        is_head = sized.runtime_model.facet(HeadDrafting) is not None
        flags = partial(draft_flags, is_head=is_head)
        return converting(
            sized.draft,
            lambda name: (each + flags(name, sized.draft_tokens) for each in commands),
        )

    return converting(sized, run)


def _runs_alone(search: JointSearch, settings: RequestSettings, prompt_tokens: int | None) -> bool:
    """Whether a program runs the request without a server, under the same verdict.

    Its reply is the one that the program generates by itself, where the request has none.
    """
    workload = search.workload_with(settings, prompt_tokens)
    view = search.model(settings.weight_bits).formula_view()
    programs = view.runtime_model.facet(MlxLmPrograms)
    if workload.batch > 1 and programs:
        return False  # mlx_lm.generate runs one prompt
    program = view.runtime_model.facet(Commands)
    reply_tokens = workload.max_tokens or (program.reply_tokens if program else 0)
    # Between traces each reply would be a trace of its own.
    if isinstance(view.runtime_model.source, Interpolated):
        return True
    # The longest prompts are searched without a reply.
    stated = workload.prompt_only(prompt_tokens) if prompt_tokens else workload
    both = (stated, replace(workload, max_tokens=reply_tokens))
    stated_verdict, printed_verdict = (
        judge(view.requirement(each), view.device)[0] for each in both
    )
    return stated_verdict == printed_verdict


def converting(sized: SizedModel, run: Callable[[str], Iterable[str]]) -> Iterator[str]:
    """Yield the command of a conversion, if there is one, then those that ``run`` its result.

    There are none for a checkpoint that mlx-lm can neither load nor convert.
    """
    # Nor for an assumed type, of which the library has no class or another one.
    if not is_loadable(sized) or sized.checkpoint.assumed_from:
        return
    model, plan = sized.checkpoint.to_load, sized.footprint.plan
    # No other runtime loads what is made.
    mlx = sized.runtime_model.facet(OnMlx)
    if plan and plan.converting and mlx:
        directory = f"{os.path.basename(model.rstrip('/'))}-{plan.default.bits}bit"
        yield convert_command(model, directory, plan.default, mlx.converter)
        model = directory
    yield from run(model)
