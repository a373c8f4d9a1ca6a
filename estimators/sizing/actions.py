"""What to do: settings that make a request fit or allow a longer prompt, cheapest first."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.server_settings import ServerSettings
from memfit.estimators.results.estimate import Action
from memfit.estimators.runtimes.budget import judge
from memfit.estimators.runtimes.facets import Commands, MlxLmPrograms, OnMlx
from memfit.estimators.runtimes.mlx_lm_commands import convert_command, draft_flags
from memfit.estimators.runtimes.source import Interpolated
from memfit.estimators.sizing.joint import JointSearch, Longest, Settings
from memfit.estimators.sizing.macs import smallest_mac
from memfit.estimators.sizing.search import is_accepted
from memfit.estimators.sizing.serving import Serving, not_served
from memfit.estimators.sizing.sized_model import SizedModel, is_loadable


class Answer(Struct, frozen=True):
    """What makes a request fit."""

    settings: tuple[Settings, ...] = ()
    """On its own machine: the cheapest that fit, after cheaper ones that fit tightly."""
    as_asked: tuple[JointSearch, Settings] | None = None
    """The smallest Mac on which nothing else has to change."""
    smallest: tuple[JointSearch, Settings] | None = None
    """The smallest Mac on which any settings fit, with the cheapest of them."""


def find_answer(search: JointSearch, ladder: Callable[[], Sequence[JointSearch]]) -> Answer:
    """Return what makes a request fit; ``ladder`` gives the Macs to take instead of its own."""
    settings = search.cheapest() if search.sized.device else ()
    if settings and settings[0] == search.asked and search.verdict(settings[-1]) == "fits":
        return Answer(settings)
    larger = ladder()
    as_asked = smallest_mac(larger, lambda on_mac: on_mac.best([search.asked]))
    if settings:
        return Answer(settings, as_asked)
    return Answer((), as_asked, smallest_mac(larger, JointSearch.cheapest))


def actions(search: JointSearch, answer: Answer) -> tuple[Action, ...]:
    """Return what to do: for the request, then for longer prompts, each cheapest first."""
    found = [_action(search, settings) for settings in answer.settings]
    found += [_on_mac(*each) for each in dict.fromkeys((answer.smallest, answer.as_asked)) if each]
    device = search.sized.device
    if device and device.has_host and search.asked not in answer.settings:
        # Few machines have two memories.
        from memfit.estimators.sizing.divide import divided

        found += divided(search)
    if answer.settings and search.searches_prompts:
        found += _for_longer_prompts(search, answer.settings[-1])
    return tuple(found)


def best_action(found: Sequence[Action]) -> int | None:
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
        (each, place) for place, action in enumerate(found) if (each := rank(action)) is not None
    ]
    return min(ranked)[1] if ranked else None


def _for_longer_prompts(search: JointSearch, settings: Settings) -> Iterator[Action]:
    """Other prefill steps, then fewer bits of the cache, then of the weights."""
    fewer = [bits for bits in search.weight_bits if bits < (settings.weight_bits or 16)]
    ladder: list[list[Settings]] = [
        [settings],
        [replace(settings, kv_bits=bits) for bits in search.kv_bits() if bits != settings.kv_bits],
        [replace(settings, weight_bits=bits) for bits in fewer],
    ]
    # The recommendation has that of the request's own settings. A request that fits tightly may be
    # longer than all that fit.
    known = (search.longest_with(settings), search.longest_with(search.asked))
    best = max(*known, search.workload.total_tokens)
    for candidates in ladder:
        found = max(
            (search.longest(each) for each in candidates if is_accepted(search.converts, each)),
            key=lambda longest: longest.tokens,
            default=Longest(0, settings),
        )
        if found.tokens > best:
            best = found.tokens
            yield _action(search, found.settings, "longer_prompt", found.tokens)


def _on_mac(on_mac: JointSearch, settings: Settings) -> Action:
    mac = on_mac.sized.device
    assert mac is not None
    action = _action(on_mac, settings, is_here=False)
    return replace(
        action, settings={**action.settings, "memory_bytes": mac.memory_bytes}, cost="hardware"
    )


def _action(
    search: JointSearch,
    settings: Settings,
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
    return Action(
        goal=goal,
        settings=settings.changes(search.asked),
        commands=tuple(_commands(search, settings, longer, flags)),
        cost=settings.cost(search.asked),
        verdict=verdict,
        peak_bytes=need.peak_bytes - search.sized.margin_bytes,
        needed_bytes=need.peak_bytes,
        context_tokens=longest,
        server=server,
        no_server=no_server,
    )


def _commands(
    search: JointSearch,
    settings: Settings,
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
        return converting(
            sized.draft,
            lambda name: (each + draft_flags(name, sized.draft_tokens) for each in commands),
        )

    return converting(sized, run)


def _runs_alone(search: JointSearch, settings: Settings, prompt_tokens: int | None) -> bool:
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
    asked, printed = (judge(view.requirement(each), view.device)[0] for each in both)
    return asked == printed


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
