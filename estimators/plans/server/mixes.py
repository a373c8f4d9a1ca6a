"""Four usual mixes of requests, all within the lengths that were stated."""

import random
from collections.abc import Iterator

from memfit.estimators.base.units import ceil_div
from memfit.estimators.base.workload import ServerSettings
from memfit.estimators.mlx.arrivals import ClosedLoop, ServedRequest
from memfit.estimators.plans.server.simulation import Simulated, simulated
from memfit.estimators.results.server import ServerMix
from memfit.estimators.sizing.server_bound import ServerMemory

_TURNS = 5
_NEXT = 16
_SEED = 11


def usual_mixes(
    memory: ServerMemory, prompt: int, reply: int, settings: ServerSettings, clients: int
) -> tuple[tuple[ServerMix, Simulated], ...]:
    """Return what each mix takes, with prompts of up to ``prompt`` and replies of up to ``reply``.

    The server sees requests together that arrive within half a second: each mix is followed with
    requests seen one by one, by twos, and as many as are prefilled together.
    """
    groups = sorted({1, min(2, clients), min(settings.prompt_concurrency, clients)})
    result = []
    for name, requests in _mixes(prompt, reply, settings, clients):
        runs = [
            simulated(memory, requests, settings, ClosedLoop(clients, group=group))
            for group in groups
        ]
        most = max(runs, key=lambda run: run.largest.needed_bytes)
        mix = ServerMix(
            name=name,
            requests=len(requests),
            needed_bytes=most.largest.needed_bytes,
            waited=max(run.waited for run in runs),
        )
        result.append((mix, most))
    return tuple(result)


def _mixes(
    prompt: int, reply: int, settings: ServerSettings, clients: int
) -> Iterator[tuple[str, list[ServedRequest]]]:
    count = clients + min(clients, _NEXT) + settings.prompt_cache_size + 8
    yield "equal requests", [ServedRequest(prompt, reply)] * count
    yield "growing conversations", list(_conversations(prompt, reply, clients))
    short = max(1, reply // 25)
    longs = [ServedRequest(prompt, short if number % 4 else reply) for number in range(count)]
    yield "one long reply in four", longs
    chosen = random.Random(_SEED)
    replies = [max(1, reply * part // 64) for part in (0, 1, 8, 16, 32, 48, 64)]
    mixed = [ServedRequest(prompt, chosen.choice(replies)) for _ in range(count)]
    yield "replies of mixed length", mixed


def _conversations(prompt: int, reply: int, clients: int) -> Iterator[ServedRequest]:
    """A conversation of each client, and more: a turn begins with all that was said before."""
    turn = max(reply + 1, ceil_div(prompt, _TURNS))
    turns = max(1, prompt // turn)
    for number in range(turns * (clients + min(clients, _NEXT))):
        round_ = number // clients % turns
        tokens = prompt - turn * (turns - 1 - round_)
        said = tokens - turn + reply
        yield ServedRequest(
            tokens, reply, number - clients if round_ else None, said if round_ else 0
        )
