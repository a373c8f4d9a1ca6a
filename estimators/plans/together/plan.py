"""The sets of models that fit one machine at once, each model in a server process of its own."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from string import ascii_lowercase

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.workload import ServerSettings, Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.arrivals import ServedRequest
from memfit.estimators.plans.server.plan import check_lengths
from memfit.estimators.results.estimate import Note
from memfit.estimators.results.terms import Verdict
from memfit.estimators.results.together import ModelSet, ServedModel, TogetherPlan, Unloading
from memfit.estimators.runtimes.facets import Commands, MlxLmPrograms
from memfit.estimators.runtimes.runtime import Need, judge
from memfit.estimators.sizing.estimate import device_summary
from memfit.estimators.sizing.run_limits import run_limits, tightened
from memfit.estimators.sizing.search import CONTEXT_STEP, largest_within, longest_prompt
from memfit.estimators.sizing.server_bound import ServerBound
from memfit.estimators.sizing.sized_model import SizedModel, error_bytes_of, held_of, peak_of

MOST_MODELS = 12  # every subset is looked at
FIRST_PORT = 8080  # the default of mlx_lm.server and of llama-server
ONE_CLIENT = ServerSettings(prompt_concurrency=1, decode_concurrency=1, prompt_cache_size=1)
"""The flags of mlx_lm.server for one user: one request at a time, and its conversation kept."""

_AT_ONCE = (
    "every model may be in its largest moment at the same time: each serves one request at a time"
    " of at most this length, and keeps one conversation"
)
_KEPT = (
    "what a process keeps of freed buffers is out of reach for the others, so that it counts here"
)
# mostlygeek/llama-swap, docs/kb/guides/routing/groups-and-matrix.md at 1130cf05: subsets of a set
# are permitted; a model in no set runs alone.
_MATRIX = "the matrix is for llama-swap; its models must have these names in its configuration"


class Served(Struct, frozen=True):
    """A model and what its process takes for a prompt of a length."""

    sized: SizedModel
    workload: Workload

    @property
    def name(self) -> str:
        """What the command line and the matrix call it."""
        return self.sized.checkpoint.id

    def need(self, prompt_tokens: int) -> tuple[int, int | None, int]:
        """Return the peak, what is held or None, and the stated error, bytes, without the margin.

        Raises:
            InputError: when the prompt is longer than the model's context.
            UnsupportedError: when the runtime cannot run it.
        """
        workload, sized = replace(self.workload, prompt_tokens=prompt_tokens), self.sized
        if sized.runtime_model.facet(MlxLmPrograms):
            bound = ServerBound(sized, workload, 1)
            moment = bound.moment(ONE_CLIENT)
            held = bound.held_bytes(ONE_CLIENT)
            return moment.needed_bytes - sized.margin_bytes, held, moment.prefill_error_bytes
        peak = peak_of(sized, workload)
        return peak, held_of(sized, workload), error_bytes_of(sized, workload)

    def needed_bytes(self, prompt_tokens: int) -> int:
        """Return what the others must leave to it, with the margin."""
        peak, held, _ = self.need(prompt_tokens)
        return self._needed(peak, held)

    def _needed(self, peak_bytes: int, held_bytes: int | None) -> int:
        return max(peak_bytes, held_bytes or 0) + self.sized.margin_bytes

    def served(self, device: Device, port: int) -> ServedModel:
        """Return its figures at the workload's prompt, and its command with a port of its own."""
        prompt, sized = self.workload.prompt_tokens, self.sized
        peak, held, error = self.need(prompt)
        verdict, _ = judge(Need(peak + sized.margin_bytes, 0, error_bytes=error), device)
        limits = run_limits(sized, self.workload, serving=True)
        ends = any(limit.verdict == "exceeds" for limit in limits)
        program = sized.runtime_model.facet(Commands)
        to_load = sized.checkpoint.to_load
        commands = program.commands(self.workload, to_load, ONE_CLIENT) if program else ()
        return ServedModel(
            name=self.name,
            runtime=sized.runtime,
            weights_bytes=sized.resident_bytes,
            peak_bytes=peak,
            held_bytes=held,
            needed_bytes=self._needed(peak, held),
            fits_alone=verdict != "exceeds" and not ends,
            limits=tuple(limit for limit in limits if limit.verdict != "fits"),
            commands=tuple(f"{command} --port {port}" for command in commands),
        )


def plan_together(models: Sequence[Served], device: Device) -> TogetherPlan:
    """Return every set of models that fits the machine's working set at once.

    Raises:
        InputError: for fewer than two models, too many, or two of one name.
        UnsupportedError: when a runtime cannot run its workload.
    """
    for model in models:
        workload = model.workload
        check_lengths(
            model.sized, [ServedRequest(workload.prompt_tokens, workload.max_tokens)], model.name
        )
    names = [model.name for model in models]
    if not 2 <= len(models) <= MOST_MODELS:
        raise InputError(f"give from 2 to {MOST_MODELS} models")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"{twice}: is named twice")
    figures = [model.served(device, FIRST_PORT + place) for place, model in enumerate(models)]
    able = [index for index, each in enumerate(figures) if each.fits_alone]
    needs = [each.needed_bytes for each in figures]
    room = device.working_set_bytes
    sets = [
        _set(chosen, able, models, figures, device)
        for chosen in _maximal(able, lambda some: sum(needs[index] for index in some) <= room)
    ]
    return TogetherPlan(
        device=device_summary(device),
        prompt_tokens=models[0].workload.prompt_tokens,
        max_tokens=models[0].workload.max_tokens,
        models=tuple(figures),
        sets=tuple(sets),
        verdict="exceeds" if len(able) < len(models) else _verdict(figures, device),
        needed_bytes=sum(needs),
        matrix=matrix([each.models for each in sets]),
        notes=tuple(_notes(figures)),
    )


def _maximal(able: Sequence[int], fits: Callable[[Iterable[int]], bool]) -> list[tuple[int, ...]]:
    """The sets that fit and are in no larger one, those with most models first."""
    found: list[tuple[int, ...]] = []
    for size in range(len(able), 0, -1):
        for some in combinations(able, size):
            if fits(some) and not any(set(some) <= set(larger) for larger in found):
                found.append(some)
    return found


def _verdict(models: Sequence[ServedModel], device: Device) -> Verdict:
    verdict, _ = judge(Need(sum(each.needed_bytes for each in models), 0), device)
    return tightened(verdict, (limit for each in models for limit in each.limits))


def _set(
    chosen: tuple[int, ...],
    able: Sequence[int],
    models: Sequence[Served],
    figures: Sequence[ServedModel],
    device: Device,
) -> ModelSet:
    room, needs = device.working_set_bytes, [each.needed_bytes for each in figures]
    needed = sum(needs[index] for index in chosen)
    members = [models[index] for index in chosen]

    def unloaded(wanted: int) -> tuple[str, ...]:
        """The members whose end makes room, with the fewest bytes of weights."""
        ways = (
            some
            for size in range(1, len(chosen) + 1)
            for some in combinations(chosen, size)
            if needed - sum(needs[index] for index in some) + needs[wanted] <= room
        )
        best = min(ways, key=lambda some: sum(figures[index].weights_bytes for index in some))
        return tuple(figures[index].name for index in best)

    return ModelSet(
        models=tuple(figures[index].name for index in chosen),
        needed_bytes=needed,
        free_bytes=room - needed,
        verdict=_verdict([figures[index] for index in chosen], device),
        longest_prompt=_longest(members, room),
        swaps=tuple(
            Unloading(figures[wanted].name, unloaded(wanted))
            for wanted in able
            if wanted not in chosen
        ),
    )


def _longest(members: Sequence[Served], room: int) -> int:
    """The longest prompt for all at once, in steps of 256 tokens from the workload's."""
    prompt = members[0].workload.prompt_tokens
    reply = members[0].workload.max_tokens
    most = min(longest_prompt(member.sized) for member in members) - reply

    def excess(steps: int) -> int:
        tokens = max(prompt, steps * CONTEXT_STEP)
        return sum(member.needed_bytes(tokens) for member in members) - room

    steps = largest_within(excess, prompt // CONTEXT_STEP, most // CONTEXT_STEP)
    return max(prompt, steps * CONTEXT_STEP)


def matrix(sets: Sequence[Sequence[str]]) -> str:
    """Return the routing section of llama-swap for sets of models: YAML.

    >>> print(matrix([("chat", "code"), ("chat", "org/large: 8bit")]))
    routing:
      router:
        use: matrix
        settings:
          matrix:
            vars:
              a: "chat"
              b: "code"
              c: "org/large: 8bit"
            sets:
              set1: "a & b"
              set2: "a & c"
    <BLANKLINE>
    """
    names = dict.fromkeys(name for models in sets for name in models)
    letters = dict(zip(names, ascii_lowercase, strict=False))
    lines = ["routing:", "  router:", "    use: matrix", "    settings:", "      matrix:"]
    lines.append("        vars:")
    lines += [f"          {letters[name]}: {_quoted(name)}" for name in names]
    lines.append("        sets:")
    for number, models in enumerate(sets, 1):
        expression = " & ".join(letters[name] for name in models)
        lines.append(f'          set{number}: "{expression}"')
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A text as YAML reads it between double quotes, as JSON is."""
    from msgspec.json import encode

    return encode(text).decode()


def _notes(figures: Sequence[ServedModel]) -> Iterator[Note]:
    yield Note("info", "at-once", _AT_ONCE)
    yield Note("info", "held-counts", _KEPT)
    for each in figures:
        for limit in each.limits:
            yield Note("warning", limit.name, f"{each.name}: {limit.reason}")
        if each.held_bytes is None:
            text = f"{each.name}: what its process keeps is not known; its peak counts"
            yield Note("warning", "held-unknown", text)
    yield Note("info", "matrix", _MATRIX)
