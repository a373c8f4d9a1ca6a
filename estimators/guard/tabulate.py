"""Makes a memory card: tables of what a call takes, from the figures of many calls.

A call of L tokens that ends at ``keys`` takes its caches, which are exact, a part in proportion to
tokens x keys where attention holds its scores, and the rest: a sawtooth in both, because a command
buffer ends every 50 operations. A row has the rest of all lengths between two, by keys, as a line
above the samples. What lies between samples is bounded by their neighbours and by a pad, which
random questions decide; the card says how many of others were below.
"""

from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import pairwise
from math import floor, inf, log2
from random import Random
from typing import Any, NamedTuple

from msgspec import to_builtins
from msgspec.json import encode
from msgspec.structs import replace

from memfit.estimators.base import dtypes
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import ceil_div
from memfit.estimators.base.workload import Workload
from memfit.estimators.guard.evaluators.memory_card import SHARES, STEP, Prompt, peak
from memfit.estimators.machine.device import ANY_MAC
from memfit.estimators.mlx.call_plan import PlannedCall, merges_caches
from memfit.estimators.mlx.kernels import has_nax
from memfit.estimators.mlx.kv_cache import buffer_counts, state_bytes, view_elements
from memfit.estimators.results.card import CardCheck, CardGpu, CardRow, Knot, MemoryCard
from memfit.estimators.runtimes.facets import MlxLmPrograms, load_bytes
from memfit.estimators.runtimes.source import Formula
from memfit.estimators.sizing.sized_model import SizedModel, require_loaded
from memfit.estimators.workspace.moments import RunMoments
from memfit.estimators.workspace.peak import ERROR_PERCENT, prepared_model

UNIT = 16384
STEPS = (256, 512, 1024, 2048, 4096, 8192)
MAX_TOKENS = 2**17
# Every row has chunks then with and without tokens before them.
_LEAST_TOKENS = 4 * STEPS[-1]
# Two rows an octave, one for each whole step, and an edge where a kernel changes: 8 queries, and
# 1024 on an M5.
EDGES = tuple(
    sorted(
        {8, 16, 24, 32, 48, 64, 96, 128, 192, 384, 768, 1536, 3072, 6144}
        | {edge for step in STEPS for edge in (step - 1, step)}
    )
)
_LENGTHS = 10
"""Random lengths of each row, beside its ends and multiples of 256."""
_APART = 1.07
"""How far positions of samples are apart."""
_DECODES_APART = 1.02
_NEIGHBOURS = (300, 0.025)
"""Samples so near in keys, by tokens or a share, stand for what lies between them."""
_TOLERANCE = (32 * 10**6, 0.005)
"""How far above its samples a line may run: bytes, or a share of the peak."""
_WHOLE = 128
"""Chunks of a whole step, of which every prompt has many."""
_VECTORS = 50

Point = tuple[int, int]


class _Sample(NamedTuple):
    """A chunk of a run."""

    tokens: int
    done: int
    """New tokens before it."""
    cached: int
    step: int


class _Engine:
    """memfit's own figures of single calls, and those of whole runs."""

    def __init__(self, sized: SizedModel, card: MemoryCard) -> None:
        subject = sized.runtime_model.subject
        self._sized, self._weights_bytes = sized, card.weights_bytes
        self._prepared = prepared_model(
            subject.model,
            subject.footprint.plan,
            subject.device,
            sized.runtime_model.runtime.versions,
        )
        nothing = ((0, 0), (MAX_TOKENS, 0))
        row = CardRow(EDGES[-1], 0, nothing, nothing)
        self.known = to_builtins(replace(card, rows=(row,), decode=nothing, growing=nothing))
        self.max_tokens = card.max_tokens

    def chunk(self, sample: _Sample) -> int:
        """Return what a chunk takes beside what the card knows of it, in bytes."""
        tokens, done, cached, step = sample
        workload = Workload(
            prompt_tokens=cached + done + tokens + 1, cached_tokens=cached, prefill_step=step
        )
        call = PlannedCall("full_chunk" if done else "first_chunk", tokens, cached + done)
        moment = RunMoments(self._prepared, workload, 0).chunk(call)
        prompt = Prompt(self.known, done + tokens + 1, cached, step, 0)
        return moment.nbytes - prompt.stored() - prompt.chunk(done, tokens)

    def decode(self, prompt_tokens: int, reply: int, step: int) -> int:
        """Return what the last token takes beside what the card knows of it, in bytes."""
        workload = Workload(prompt_tokens=prompt_tokens, max_tokens=reply, prefill_step=step)
        moment = self._sized.figures_for(workload).moment
        prompt = Prompt(self.known, prompt_tokens, 0, step, reply)
        return (moment.decode_bytes or 0) - self._weights_bytes - prompt.decode()

    def peak(self, new: int, cached: int, step: int, reply: int) -> int:
        """Return the peak of a run."""
        workload = Workload(
            prompt_tokens=new + cached, cached_tokens=cached, prefill_step=step, max_tokens=reply
        )
        return self._sized.figures_for(workload).moment.nbytes


def make_card(sized: SizedModel, *, questions: int = 2000, seed: int = 1) -> MemoryCard:
    """Return the card of a model on a GPU, checked by twice as many random ``questions``.

    Raises:
        UnsupportedError: when the model is not under mlx-lm by formula, or the card would not be of
            its caches.
    """
    runtime_model = require_loaded(sized).runtime_model
    if not (runtime_model.facet(MlxLmPrograms) and isinstance(runtime_model.source, Formula)):
        raise UnsupportedError(
            f"{sized.checkpoint.id}: a memory card is of a model that the formulas describe under"
            " mlx-lm"
        )
    if not merges_caches(sized.model) or sized.draft or runtime_model.subject.rank:
        raise UnsupportedError(
            f"{sized.checkpoint.id}: a memory card is of one model on one machine whose caches"
            " mlx-lm stores as they are"
        )
    random, card = Random(seed), card_facts(sized)
    if card.max_tokens < _LEAST_TOKENS:
        raise UnsupportedError(
            f"{sized.checkpoint.id}: a memory card is of a model with a context of at least"
            f" {_LEAST_TOKENS} tokens, and this one has {card.max_tokens}; ask memfit estimate"
        )
    card = replace(card, window_shares=_window_shares(_Engine(sized, card), card))
    engine = _Engine(sized, card)
    still, growing = _decode(engine, card, random)
    rows = tuple(_rows(engine, card, random))
    card = replace(card, rows=rows, decode=still, growing=growing)
    card = _checked(engine, card, random, questions)
    return replace(card, sha256=card.digest())


def card_facts(sized: SizedModel) -> MemoryCard:
    """Return a card without tables: weights, rules of caches, and what it is of."""
    model, subject = sized.model, sized.runtime_model.subject
    device, runtime = subject.device or ANY_MAC, sized.runtime_model.runtime
    width = dtypes.nbytes(1, model.dtype)
    caches: dict[int, int] = {}
    for buffer, layers in buffer_counts(model, None).items():
        limit = buffer.limit or 0
        caches[limit] = caches.get(limit, 0) + layers * buffer.elements_per_token * width
    views = (
        sum(view_elements(mixer.states(), decoding=decoding) for mixer in model.mixers()) * width
        for decoding in (False, True)
    )
    return MemoryCard(
        model=sized.checkpoint.id,
        revision=sized.checkpoint.revision,
        config_sha256=sha256(encode(sized.checkpoint.config, order="sorted")).hexdigest(),
        weight_bits=round(8 * sized.footprint.nbytes / sized.footprint.parameters, 3),
        runtime=runtime.name,
        runtime_version=runtime.version,
        mlx_version=".".join(map(str, runtime.versions.mlx)),
        gpu=CardGpu(
            backend=device.backend, gpu_class=device.gpu_class, has_matrix_units=has_nax(device)
        ),
        max_tokens=min(MAX_TOKENS, model.max_context or MAX_TOKENS),
        steps=STEPS,
        unit=UNIT,
        weights_bytes=sized.resident_bytes,
        load_bytes=load_bytes(sized.runtime_model),
        state_bytes=state_bytes(model, 1),
        caches=tuple(sorted(caches.items())),
        view_bytes=next(views),
        decode_view_bytes=next(views),
        window_shares=(0, 0),
        logits_bytes=model.vocab_size * width,
        rows=(),
        decode=(),
        growing=(),
        check=CardCheck(
            questions=1,
            below=0,
            pad_bytes=0,
            excess_bytes=(0, 0, 0),
            excess_percent=(0, 0, 0),
            error_percent=ERROR_PERCENT,
        ),
        vectors=(),
    )


def _rows(engine: _Engine, card: MemoryCard, random: Random) -> Iterator[CardRow]:
    for shorter, longest in pairwise((0, *EDGES)):
        scores = _scores(engine, shorter, longest)
        first: list[Point] = []
        later: list[Point] = []
        for tokens in _row_lengths(shorter, longest, random):
            for sample in _samples(engine.max_tokens, tokens, random):
                keys = sample.cached + sample.done + tokens
                point = keys, engine.chunk(sample) - scores * tokens * keys
                (later if sample.done else first).append(point)
        yield CardRow(longest, scores, _knots(first, card), _knots(later, card))


def _row_lengths(shorter: int, longest: int, random: Random) -> list[int]:
    lengths = {
        shorter + 1,
        longest,
        *(random.randint(shorter + 1, longest) for _ in range(_LENGTHS)),
    }
    multiples = range(shorter // 256 * 256 + 256, longest, 256)
    for multiple in random.sample(multiples, min(3, len(multiples))):
        lengths |= {multiple - 1, multiple, multiple + 1} & {*range(shorter + 1, longest + 1)}
    return sorted(lengths)


def _samples(most: int, tokens: int, random: Random) -> Iterator[_Sample]:
    """Yield chunks of a length: the first after cached tokens, and later ones."""
    steps = [step for step in STEPS if step >= tokens]
    if tokens in STEPS:  # the whole chunks of every prompt
        last = (most - 1) // tokens
        for number in range(1, last):
            # One more token is the last of the prompt.
            room = min(tokens, most - (number + 1) * tokens)
            for cached in (0, *(random.randrange(room) for _ in range(_WHOLE // last))):
                yield _Sample(tokens, number * tokens, cached, tokens)
    for position in _positions(most - tokens - 1, random):
        yield _Sample(tokens, 0, position, tokens if tokens in STEPS else random.choice(steps))
        step = tokens if tokens in STEPS else random.choice(steps)
        done = position // step * step
        if done:
            yield _Sample(tokens, done, random.choice((0, position - done)), step)


def _positions(most: int, random: Random, apart: float = _APART) -> Iterator[int]:
    position = 0
    while position <= most:
        yield position
        following = max(position + 256, int(position * apart) // 256 * 256)
        position = following + random.choice((0, 0, random.randint(-255, 255)))


def _scores(engine: _Engine, shorter: int, longest: int) -> int:
    """Return bytes for each token and key, rather too few: the table has what is left."""
    most = engine.max_tokens - longest - 1
    ends = [most * part // 16 for part in (2, 4, 8, 15)]
    step = next(step for step in STEPS if step >= longest)
    slopes = sorted(
        (
            engine.chunk(_Sample(tokens, 0, right, step))
            - engine.chunk(_Sample(tokens, 0, left, step))
        )
        // (tokens * (right - left))
        for tokens in {shorter + 1, (shorter + longest + 1) // 2, longest}
        for left, right in pairwise(ends)
    )
    return max(0, slopes[len(slopes) // 4])


def _window_shares(engine: _Engine, card: MemoryCard) -> tuple[int, int]:
    """Return the parts of what windows hold beyond their limits that count in a decode step.

    RotatingKVCache cuts a window to its limit when a layer decodes its first token: in the layers
    before it the rest is gone (workspace/moments.py follows the last of each kind).
    """
    shares = [0, 0]
    limits = {limit: own for limit, own in card.caches if limit}
    for tokens in range(STEPS[-1], card.max_tokens - 2 * STEP, card.max_tokens // 8):
        for reply in (0, STEP + 1):
            known = {
                step: Prompt(engine.known, tokens, 0, step, reply) for step in (STEPS[0], STEPS[-1])
            }
            few, many = (engine.decode(tokens, reply, step) for step in known)
            least, most = (
                sum(own * (prompt.room(limit, tokens - 1) - limit) for limit, own in limits.items())
                for prompt in known.values()
            )
            if most > least:
                share = ceil_div(SHARES * (many - few), most - least)
                shares[reply > 0] = max(shares[reply > 0], share)
    return shares[0], shares[1]


def _decode(
    engine: _Engine, card: MemoryCard, random: Random
) -> tuple[tuple[Knot, ...], tuple[Knot, ...]]:
    """Return the last tokens for which there is room, and those for which caches grew."""
    still: list[Point] = []
    growing: list[Point] = []
    for position in _positions(engine.max_tokens - 2, random, _DECODES_APART):
        step = random.choice(STEPS)
        for prompt in {max(1, position - reply) for reply in (0, 1, 300, random.randint(1, 600))}:
            reply = position + 1 - prompt
            point = (position + 1, engine.decode(prompt, reply, step))
            room = prompt - 1 + (-(prompt - 1) % 256 if (prompt - 1) % step else 0)
            (growing if position + 1 > room else still).append(point)
    return _knots(still, card), _knots(growing, card)


def _knots(points: Sequence[Point], card: MemoryCard) -> tuple[Knot, ...]:
    """Return a line above all points and their neighbours that never falls with the caches."""
    near, share = _NEIGHBOURS
    flat, relative = _TOLERANCE
    ordered = sorted(points)
    line = []
    first = last = 0
    per_token = sum(own for limit, own in card.caches if not limit)
    for keys, _ in sorted(dict(ordered).items()):
        reach = max(near, keys * share)
        while ordered[first][0] < keys - reach:
            first += 1
        while last < len(ordered) and ordered[last][0] <= keys + reach:
            last += 1
        highest = max(value for _, value in ordered[first:last])
        whole = card.weights_bytes + per_token * keys + max(0, highest)
        line.append((keys, highest, int(max(flat, whole * relative))))
    return _monotone(_envelope(line), per_token, card.max_tokens)


def _envelope(line: Sequence[tuple[int, int, int]]) -> list[Point]:
    """Return the corners of few straight lines above values, each by at most its tolerance.

    >>> _envelope([(0, 0, 2), (10, 10, 2), (20, 20, 2), (21, 90, 2)])
    [(0, 2), (20, 22), (21, 92)]
    """
    keys, value, room = line[0]
    corners, index = [(keys, value + room / 2)], 1
    while index < len(line):
        start, height = corners[-1]
        low, high, reached = -inf, inf, 0
        while index < len(line):
            keys, value, room = line[index]
            lower = max(low, (value - height) / (keys - start))
            upper = min(high, (value + room - height) / (keys - start))
            if lower > upper:
                break
            low, high, reached, index = lower, upper, keys, index + 1
        if reached:
            corners.append((reached, height + (low + high) / 2 * (reached - start)))
        else:  # a jump
            corners.append((keys, value + room / 2))
            index += 1
    return [(at, floor(height) + 1) for at, height in corners]


def _monotone(corners: Sequence[Point], per_token: int, most: int) -> tuple[Knot, ...]:
    """Return knots in units with which calls of more keys take no less: the last counts."""
    knots: list[Knot] = []
    highest = -inf
    for keys, value in corners:
        highest = max(highest, value + per_token * keys)
        knots.append((keys, ceil_div(int(highest) - per_token * keys, UNIT)))
    last, units = knots[-1]
    if last < most:
        knots.append((most, units))
    return tuple(knots)


def _checked(engine: _Engine, card: MemoryCard, random: Random, count: int) -> MemoryCard:
    """Return the card with a pad that random questions ask for, checked by others."""
    shortfalls = [true - card_peak for card_peak, true, _ in _answers(engine, card, random, count)]
    units = ceil_div(max(0, *shortfalls), UNIT)
    card = replace(
        card,
        rows=tuple(
            replace(row, first=_padded(row.first, units), later=_padded(row.later, units))
            for row in card.rows
        ),
        decode=_padded(card.decode, units),
        growing=_padded(card.growing, units),
    )
    answers = list(_answers(engine, card, random, count))
    excess = sorted(own - true for own, true, _ in answers)
    percent = sorted(100 * (own - true) / true for own, true, _ in answers)
    return replace(
        card,
        check=replace(
            card.check,
            questions=count,
            below=sum(each < 0 for each in excess),
            pad_bytes=units * UNIT,
            excess_bytes=_quantiles(excess),
            excess_percent=tuple(round(max(0.0, each), 2) for each in _quantiles(percent)),
        ),
        vectors=tuple((*question, own) for own, _, question in answers[:_VECTORS]),
    )


def _padded(knots: tuple[Knot, ...], units: int) -> tuple[Knot, ...]:
    return tuple((keys, value + units) for keys, value in knots)


def _quantiles(values: Sequence[Any]) -> tuple[Any, Any, Any]:
    return values[len(values) // 2], values[len(values) * 95 // 100], values[-1]


Question = tuple[int, int, int, int]


def _answers(
    engine: _Engine, card: MemoryCard, random: Random, count: int
) -> Iterator[tuple[int, int, Question]]:
    """Yield the card's peak, memfit's own, and the question."""
    plain = to_builtins(card)
    for question in random_questions(card, random, count):
        yield peak(plain, *question), engine.peak(*question), question


def random_questions(card: MemoryCard, random: Random, count: int) -> Iterator[Question]:
    """Yield new tokens, cached tokens, step and reply: a third with a cached prefix."""
    while count:
        step = random.choice(card.steps)
        new = int(2 ** random.uniform(0, log2(card.max_tokens)))
        cached = random.choice((0, 0, int(2 ** random.uniform(4, log2(card.max_tokens)))))
        reply = random.choice((0, random.randint(1, 2000)))
        # Thousands of chunks take the engine seconds, and are like hundreds.
        if new + cached + reply <= card.max_tokens and new <= 64 * step:
            count -= 1
            yield new, cached, step, reply
