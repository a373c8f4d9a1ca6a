"""The guard: never over the limit, and no refusal, wait or eviction that is not needed."""

import re
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.checkpoint.opening import open_sample
from memfit.estimators.guard.call_tables import CallTables, card_tables, model_tables
from memfit.estimators.guard.guard import Admit, Decision, Evict, Guard, Refuse, Wait
from memfit.estimators.guard.replay import served_requests
from memfit.estimators.guard.schedule import GuardedSchedule
from memfit.estimators.guard.state import Entry, Request, Row, State
from memfit.estimators.guard.tabulate import make_card
from memfit.estimators.guard.traffic import Traffic, generated
from memfit.estimators.machine.devices import find_device
from memfit.estimators.mlx.arrivals import ClosedLoop, ServedRequest
from memfit.estimators.mlx.batch_schedule import BatchSchedule
from memfit.estimators.mlx.kv_cache import BatchBuffer
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.sized_model import SizedModel
from tests.selection import quick

GB = 10**9
LONGEST = 12_000
MODELS = ("qwen3-0.6b", "gpt-oss-20b", "lfm2.5-8b-a1b-4bit")


def sized(name: str) -> SizedModel:
    catalog = Catalog()
    return catalog.sized(catalog.add(open_sample(name)), device=find_device("m4-max-64"))


@pytest.fixture(scope="module")
def tables() -> Callable[[str], CallTables]:
    """The tables of models without a stated error, which would hide a fault of the proof."""
    known: dict[str, CallTables] = {}

    def of(name: str) -> CallTables:
        if name not in known:
            known[name] = model_tables(sized(name)).without_error()
        return known[name]

    return of


@pytest.fixture(scope="module")
def small(tables: Callable[[str], CallTables]) -> CallTables:
    return tables("qwen3-0.6b")


def guard(tables: CallTables, above: int, **settings: int) -> Guard:
    return Guard(tables=tables, limit_bytes=tables.weights_bytes + above, **settings)


def stream(
    tables: CallTables, kind: Traffic, seed: int, schedule: type[GuardedSchedule] = GuardedSchedule
) -> GuardedSchedule:
    """Return random requests before a guard with random settings."""
    random = Random(seed)
    requests = generated(kind, random, random.choice((12, 30)), LONGEST)
    most = tables.row_bytes(LONGEST, 512)
    guarded = guard(
        tables,
        int(most * random.uniform(1, 6)) + tables.chunk_bytes(1, 512, LONGEST),
        prompt_concurrency=random.choice((1, 3, 8)),
        decode_concurrency=random.choice((1, 8, 16)),
        prefill_step=random.choice((256, 512)),
    )
    served, longest = served_requests(requests)
    return schedule(served, longest, guarded, ClosedLoop(random.choice((2, 8, 24))))


def peak_of(schedule: GuardedSchedule) -> int:
    return max((schedule.bytes_of(moment) for moment in schedule.moments()), default=0)


def is_over(schedule: GuardedSchedule) -> bool:
    return peak_of(schedule) > schedule.limit_bytes


@pytest.mark.parametrize("name", quick(MODELS, {"qwen3-0.6b"}))
@pytest.mark.parametrize("kind", ["agents", "uniform"])
def test_what_is_admitted_is_never_over_the_limit(
    tables: Callable[[str], CallTables], name: str, kind: Traffic
) -> None:
    served = 0
    for seed in range(30):
        schedule = stream(tables(name), kind, seed)
        assert not is_over(schedule), seed
        assert not schedule.queue.waiting
        served += len(schedule.waits)
    assert served


class _StoresLate(GuardedSchedule):
    """Rows join the batch while the replies that ended in the call before still keep it."""

    def _end(self, buffer: BatchBuffer) -> None:
        BatchSchedule._end(self, buffer)


class _WithoutEntries(GuardedSchedule):
    def state(self, *, exact: bool = False) -> State:
        return replace(super().state(exact=exact), entries=(), other_bytes=0)


class _WithoutPrompts(GuardedSchedule):
    def state(self, *, exact: bool = False) -> State:
        return replace(super().state(exact=exact), prefilling=())


class _OwnWidths(GuardedSchedule):
    """Each row as wide as itself alone."""

    def state(self, *, exact: bool = False) -> State:
        found = super().state(exact=exact)
        short = (replace(row, tokens=row.tokens // 2, reply=0) for row in found.decoding)
        return replace(found, decoding=tuple(short), decode_bytes=0)


class _StoresAll(GuardedSchedule):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.queue.store = lambda tokens: True  # type: ignore[method-assign]


@pytest.mark.parametrize("fault", [_WithoutEntries, _WithoutPrompts, _OwnWidths, _StoresAll])
def test_a_guard_that_leaves_something_out_goes_over_the_limit(
    tables: Callable[[str], CallTables], fault: type[GuardedSchedule]
) -> None:
    runs = (stream(tables("qwen3-0.6b"), "agents", seed, fault) for seed in range(60))
    assert any(is_over(run) for run in runs)


def test_a_reply_that_is_stored_late_keeps_a_batch_beside_the_one_that_rows_join(
    small: CallTables,
) -> None:
    def run(kind: type[GuardedSchedule], seed: int) -> int:
        random = Random(seed)
        served = [ServedRequest(random.randint(9, 4000), random.randint(1, 9)) for _ in range(40)]
        decides = guard(small, 10**12, prompt_concurrency=4, prefill_step=256)
        longest = [each.max_tokens for each in served]
        return peak_of(kind(served, longest, decides, ClosedLoop(24)))

    late, at_once = (
        [run(kind, seed) for seed in range(4)] for kind in (_StoresLate, GuardedSchedule)
    )
    assert max(late) > 1.1 * max(at_once)


rows = st.builds(Row, st.integers(1, 9000), st.just(0), st.integers(0, 2000))
prompts = st.builds(Row, st.integers(0, 4000), st.integers(1, 6000), st.integers(1, 2000))
entries = st.builds(
    Entry, st.integers(0, 10**9), st.integers(1, GB // 4), st.integers(0, 999), st.booleans()
)
states = st.builds(
    State,
    decoding=st.lists(rows, max_size=12).map(tuple),
    prefilling=st.lists(prompts, max_size=6).map(tuple),
    entries=st.lists(entries, max_size=12, unique_by=lambda entry: entry.id).map(tuple),
    step=st.sampled_from([128, 256, 512]),
    other_bytes=st.integers(0, GB // 4),
    decode_bytes=st.integers(0, GB // 4),
)
requests = st.builds(
    Request, st.integers(1, 8000), st.integers(1, 2000), st.sampled_from([0, 0, 10, 3000])
)
above = st.integers(GB // 4, 20 * GB)
ORDER: dict[type[Decision], int] = {Refuse: 0, Wait: 1, Evict: 2, Admit: 3}
drawn = settings(max_examples=60, deadline=None)
MANY = {"prompt_concurrency": 16, "decode_concurrency": 32, "prefill_step": 512}


@drawn
@given(state=states, request=requests, limit=above, more=st.integers(0, 8 * GB))
def test_more_memory_never_turns_yes_into_no(
    small: CallTables, state: State, request: Request, limit: int, more: int
) -> None:
    less, most = (
        guard(small, each, **MANY).admit(request, state) for each in (limit, limit + more)
    )
    assert ORDER[type(less)] <= ORDER[type(most)]
    kept, chunks = zip(
        *(
            (each.store(request.new, state), each.chunk(request.new, request.cached, state))
            for each in (guard(small, limit, **MANY), guard(small, limit + more, **MANY))
        ),
        strict=True,
    )
    assert kept[0] <= kept[1]
    assert 0 <= chunks[0] <= chunks[1] <= request.new


@drawn
@given(state=states, request=requests, limit=above)
def test_no_entry_is_evicted_that_is_not_needed(
    small: CallTables, state: State, request: Request, limit: int
) -> None:
    decides = guard(small, limit, **MANY)
    found = decides.admit(request, state)
    if isinstance(found, Evict):
        gone = [entry for entry in state.entries if entry.id in found.ids]
        assert gone
        assert not any(entry.is_pinned for entry in gone)
        left = tuple(entry for entry in state.entries if entry not in gone)
        assert isinstance(decides.admit(request, replace(state, entries=left)), Admit)
        for entry in gone:
            again = replace(state, entries=(*left, entry))
            assert not isinstance(decides.admit(request, again), Admit)


@drawn
@given(state=states, request=requests, limit=above)
def test_what_fits_alone_is_never_refused(
    small: CallTables, state: State, request: Request, limit: int
) -> None:
    decides = guard(small, limit, **MANY)
    alone = State(step=decides.prefill_step, other_bytes=state.other_bytes)
    found = decides.admit(request, state)
    assert isinstance(found, Refuse) == isinstance(decides.admit(request, alone), Refuse)


@drawn
@given(request=requests, limit=above)
def test_the_largest_prompt_named_is_admitted_on_the_empty_server(
    small: CallTables, request: Request, limit: int
) -> None:
    decides = guard(small, limit // 8, **MANY)
    found = decides.preflight(request.new, request.max_tokens)
    if isinstance(found, Refuse):
        largest = found.largest_prompt
        assert largest < request.new
        if largest:
            assert isinstance(decides.preflight(largest, request.max_tokens), Admit)
        assert isinstance(decides.preflight(largest + 1, request.max_tokens), Refuse)
    else:
        assert found.ends_with == request.new + request.max_tokens


def test_a_request_waits_for_the_widest_row(small: CallTables) -> None:
    decides = guard(small, 4 * GB, **MANY)
    state = State(decoding=(Row(9000, 0, 2000, "long"), *[Row(100, 0, 90, "short")] * 7), step=512)
    found = decides.admit(Request(6000, 2000), state)
    assert isinstance(found, Wait)
    assert (found.row, found.width) == ("long", 11_000)
    assert found.excess_bytes > 0


def test_a_request_waits_for_a_row_however_much_memory_there_is(small: CallTables) -> None:
    state = State(decoding=(Row(9, 0, 9),) * 32, step=512)
    found = guard(small, 10**13, **MANY).admit(Request(5, 5), state)
    assert found == Wait(0, None, 18)


def test_the_step_falls_before_a_request_waits_or_an_entry_goes(small: CallTables) -> None:
    state, request = State(step=4096), Request(8000, 10)
    whole = guard(small, 10**12).admit(request, state)
    assert isinstance(whole, Admit)
    assert whole.step == 4096
    tight = replace(guard(small, 0), limit_bytes=whole.peak_bytes - 1).admit(request, state)
    assert isinstance(tight, Admit)
    assert (tight.step < 4096, tight.peak_bytes < whole.peak_bytes) == (True, True)


WRONG: dict[str, Callable[[CallTables], Any]] = {
    "state: other_bytes -1 is negative": lambda _: State(other_bytes=-1),
    "row: tokens -1 is negative": lambda _: Row(-1, 0, 0),
    "row: reply 2.5: expected a whole number": lambda _: Row(1, 0, 2.5),  # type: ignore[arg-type]
    "request: new nan: expected a whole number": lambda _: Request(float("nan"), 5),  # type: ignore[arg-type]
    "request: cached '3': expected": lambda _: Request(1, 5, "3"),  # type: ignore[arg-type]
    "request: new True: expected": lambda _: Request(True, 5),
    "request: it has at least one new token": lambda _: Request(0, 5),
    "entry: nbytes -5 is negative": lambda _: Entry("a", -5, 0),
    "entry: used 1.5: expected": lambda _: Entry("a", 5, 1.5),  # type: ignore[arg-type]
    "state: decoding: expected a tuple of Row": lambda _: State(decoding=(None,)),  # type: ignore[arg-type]
    "state: entries: expected a tuple of Entry": lambda _: State(entries=5),  # type: ignore[arg-type]
    "row 'a' has 5 tokens of its prompt": lambda _: State(decoding=(Row(1, 5, 1, "a"),)),
    "state: step 0: give one from 1": lambda _: State(step=0),
    "a limit of 5 bytes is below the weights": lambda small: replace(
        guard(small, 0), limit_bytes=5
    ),
    "limit nan: expected": lambda small: replace(guard(small, 0), limit_bytes=float("nan")),
    "prefill step 0: give one from 1 to 8192": lambda small: guard(small, 0, prefill_step=0),
    "prefill_step 100.5: expected": lambda small: replace(guard(small, 0), prefill_step=100.5),
    "0 replies together": lambda small: guard(small, 0, decode_concurrency=0),
    "5000 prompts and": lambda small: guard(small, 0, prompt_concurrency=5000),
    "tokens -1 is negative": lambda small: guard(small, GB).chunk(-1, 0, State()),
    "keys 100000000: ": lambda small: guard(small, GB).chunk(9, 10**8, State()),
    "tokens 1.5: expected": lambda small: guard(small, GB).store(1.5, State()),  # type: ignore[arg-type]
    "new -3 is negative": lambda small: guard(small, GB).preflight(-3, 5),
    "beyond the tables of": lambda small: guard(small, GB).admit(
        Request(1, 1), State(decoding=(Row(10**9, 0, 10),))
    ),
}


@pytest.mark.parametrize("reason", WRONG)
def test_what_no_server_can_hold_or_ask_is_refused(small: CallTables, reason: str) -> None:
    with pytest.raises(InputError, match=re.escape(reason)) as error:
        WRONG[reason](small)
    assert "\n" not in str(error.value)


def test_a_request_beyond_the_model_is_refused_with_the_largest_prompt(small: CallTables) -> None:
    found = guard(small, 10**13).preflight(10**6, 5)
    assert isinstance(found, Refuse)
    assert found.largest_prompt == small.max_tokens - 5


def test_a_model_that_the_server_does_not_batch_has_no_guard() -> None:
    with pytest.raises(UnsupportedError, match="batch"):
        model_tables(sized("llama-4-scout"))


@pytest.mark.exhaustive
def test_a_card_decides_as_safely_as_its_model() -> None:
    """The schedule takes what the model's figures say, the guard knows the card alone."""
    model = sized("qwen3-0.6b")
    of_model, of_card = model_tables(model), card_tables(make_card(model, questions=100))
    for rows, tokens, keys in ((1, 512, 9000), (4, 256, 4000), (8, 512, 9000)):
        assert of_card.chunk_bytes(rows, tokens, keys) >= of_model.without_error().chunk_bytes(
            rows, tokens, keys
        )
        assert of_card.step_bytes(rows, keys) >= of_model.without_error().step_bytes(rows, keys)
    for seed in range(10):
        assert not is_over(stream(of_card, "agents", seed))


def full() -> Iterator[State]:
    random = Random(1)
    for _ in range(5):
        yield State(
            decoding=tuple(
                Row(random.randint(100, 9000), 0, random.randint(1, 2000)) for _ in range(60)
            ),
            prefilling=tuple(Row(0, random.randint(100, 9000), 500) for _ in range(4)),
            entries=tuple(
                Entry(number, random.randint(10**6, GB), random.randint(0, 999))
                for number in range(200)
            ),
            step=512,
        )


def test_a_decision_takes_a_few_milliseconds_with_64_rows_and_200_entries(
    small: CallTables,
) -> None:
    for limit in (10**13, 200 * GB, 60 * GB):
        decides = guard(small, limit, prompt_concurrency=99, decode_concurrency=99)
        took = []
        for state in full():
            decides.admit(Request(2000, 1000, 1000), state)  # fills the tables
            begin = time.perf_counter()
            decides.admit(Request(2000, 1000, 1000), state)
            took.append(time.perf_counter() - begin)
        assert min(took) < 0.05  # the aim is 0.001; ten times 5 ms on a loaded machine
