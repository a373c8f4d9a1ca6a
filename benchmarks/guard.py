"""Random streams before a guard: calls over the limit, refusals of what fits alone, waits, time.

``python benchmarks/guard.py STREAMS``: 10,000 of them are an hour or two of one core. A stream
is of one of ten models, with a random limit and settings; the figures in the guard and in the
schedule are the same, without the stated error, which would hide a fault of the proof.
"""

import sys
import time
from collections import Counter
from random import Random

from memfit.estimators.checkpoint.opening import open_sample
from memfit.estimators.guard.call_tables import CallTables, model_tables
from memfit.estimators.guard.guard import Guard
from memfit.estimators.guard.replay import replay
from memfit.estimators.guard.state import Entry, Request, Row, State
from memfit.estimators.guard.traffic import generated
from memfit.estimators.machine.devices import find_device
from memfit.estimators.sizing.catalog import Catalog

MODELS = (
    *("qwen3-0.6b", "qwen3-4b-4bit", "qwen3-8b-4bit", "llama-3.1-8b", "gemma-3-4b"),
    *("gpt-oss-20b", "lfm2.5-8b-a1b-4bit", "qwen3-30b-a3b-4bit", "qwen3.5-35b-a3b", "falcon-h1-7b"),
)
LONGEST = 16_000


def main(streams: int) -> None:
    """Print a line for each model, and the time of a decision."""
    catalog = Catalog()
    for name in MODELS:
        reference = catalog.add(open_sample(name))
        sized = catalog.sized(reference, device=find_device("m4-max-64"))
        tables = model_tables(sized).without_error()
        begin, found = time.perf_counter(), Counter[str]()
        for seed in range(streams // len(MODELS)):
            found.update(_stream(tables, seed))
        took = time.perf_counter() - begin
        shares = {
            each: f"{found[each] / found['requests']:.1%}"
            for each in ("waited", "in vain", "refused", "cached")
        }
        print(
            name,
            {each: found[each] for each in ("streams", "requests", "calls", "over", "wrong")},
            shares,
            f"{took:.0f} s, admit {_decision_ms(tables):.2f} ms",
            flush=True,
        )


def _stream(tables: CallTables, seed: int) -> dict[str, int]:
    random = Random(seed)
    requests = generated(("agents", "uniform")[seed % 2], random, random.choice((8, 24)), LONGEST)
    room = int(tables.row_bytes(LONGEST, 2048) * random.uniform(1, 8))
    guard = Guard(
        tables=tables,
        limit_bytes=tables.weights_bytes + room + tables.chunk_bytes(1, 512, LONGEST),
        prompt_concurrency=random.choice((1, 3, 8)),
        decode_concurrency=random.choice((1, 8, 32)),
        prefill_step=random.choice((256, 512, 2048)),
    )
    result = replay(guard, requests, traffic="", clients=random.choice((2, 8, 24)))
    return {
        "streams": 1,
        "requests": result.requests,
        "calls": result.calls,
        "over": result.over,
        "wrong": result.refused_though_fits,
        "refused": len(result.refused),
        "waited": result.waited,
        "in vain": result.waited_in_vain,
        "cached": result.cached,
    }


def _decision_ms(tables: CallTables) -> float:
    """Return the median time of a decision with 64 rows and 200 entries, at limits of any kind."""
    random = Random(1)
    state = State(
        decoding=tuple(
            Row(random.randint(100, 9000), 0, random.randint(1, 4000)) for _ in range(60)
        ),
        prefilling=tuple(Row(0, random.randint(100, 9000), 500) for _ in range(4)),
        entries=tuple(Entry(each, random.randint(10**6, 10**9), each) for each in range(200)),
    )
    took = []
    for limit in (10**13, 4 * 10**11, 2 * 10**11, 5 * 10**10 + tables.weights_bytes):
        guard = Guard(
            tables=tables, limit_bytes=limit, prompt_concurrency=99, decode_concurrency=99
        )
        for _ in range(9):
            begin = time.perf_counter()
            guard.admit(Request(2000, 1000, 8000), state)
            took.append(time.perf_counter() - begin)
    return sorted(took)[len(took) // 2] * 1000


if __name__ == "__main__":
    main(int(sys.argv[1]))
