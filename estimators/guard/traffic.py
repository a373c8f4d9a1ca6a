"""Generated traffic of two kinds: each finds faults of a guard that the other hides."""

from collections.abc import Iterator
from random import Random
from typing import Literal

from memfit.estimators.base.reading.request_trace import TraceRequest

Traffic = Literal["agents", "uniform"]


def generated(kind: Traffic, random: Random, count: int, longest: int) -> tuple[TraceRequest, ...]:
    """Return requests of up to ``longest`` tokens, reply included."""
    requests = _agents(random, longest) if kind == "agents" else _uniform(random, longest)
    return tuple(next(requests) for _ in range(count))


def _uniform(random: Random, longest: int) -> Iterator[TraceRequest]:
    while True:
        reply = random.randint(1, max(1, min(6000, longest // 4)))
        prompt = random.randint(1, max(1, min(40_000, longest - reply)))
        yield TraceRequest(prompt, random.randint(1, reply), max_tokens=reply)


def _agents(random: Random, longest: int) -> Iterator[TraceRequest]:
    """Yield turns of conversations, short requests, and some wide ones that stop early."""
    said: dict[int, int] = {}
    number = 0
    while True:
        kind = random.random()
        limits = (512, 2048, 4096) if kind < 0.5 else (512, 1024)
        reply = min(random.choice(limits), longest // 4) or 1
        got = max(1, int(reply * random.betavariate(1, 3)))
        number += 1
        if kind < 0.5:
            session = random.randrange(6)
            prompt = said.get(session, 0) + int(random.lognormvariate(6.5, 0.8)) + 1
            if prompt + reply > longest:  # a new conversation
                session, prompt = 6 + number, min(prompt, longest - reply) // 2 or 1
            said[session] = prompt + got
            yield TraceRequest(prompt, got, max_tokens=reply, session=str(session))
            continue
        wide = random.randint(longest // 16, longest // 3) if kind > 0.85 else 0
        prompt = wide or int(random.lognormvariate(7.5, 1)) + 1
        yield TraceRequest(max(1, min(prompt, longest - reply)), got, max_tokens=reply)
