"""Search for requests that take more of mlx_lm.server than the bound of `memfit plan server`.

    python -m benchmarks.server_bound                  # 10,000 per setting
    python -m benchmarks.server_bound 500 "8b 8/32/5"

Requests are within the lengths that the bound is for: crafted, random, and climbed to from the
largest of these. Nothing found may pass the bound, and with a prompt cache the bound is at most
1.26 times the largest found, but for convolution states and several prompts together
(docs/server.md).
"""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.units import round_down
from memfit.estimators.base.workload import ServerSettings, Workload
from memfit.estimators.machine.devices import memory_device
from memfit.estimators.mlx.arrivals import ClosedLoop, ServedRequest
from memfit.estimators.plans.server.simulation import simulated
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.server_bound import ServerBound
from memfit.estimators.sizing.sized_model import SizedModel

SAMPLES = Path(__file__).parents[1] / "sample_configs"
COUNT = 10_000
MOST = 1.26


class Sent(NamedTuple):
    """A request, and the calls that its client waits before it."""

    prompt: int
    reply: int
    pause: int = 0


class Question(NamedTuple):
    """The limits that are searched within."""

    prompt: int
    reply: int
    clients: int
    settings: ServerSettings


def flags(together: int, decode: int, kept: int, step: int = 2048) -> ServerSettings:
    """Return settings by their numbers."""
    return ServerSettings(
        prefill_step=step,
        prompt_concurrency=together,
        decode_concurrency=decode,
        prompt_cache_size=kept,
    )


_DENSE = ((8, 32, 10), (8, 32, 5), (1, 32, 10), (2, 4, 4), (1, 4, 4), (1, 4, 2), (1, 2, 4),
          (1, 2, 2), (1, 1, 4), (1, 1, 0), (1, 4, 0), (8, 32, 0))  # fmt: skip
_MOE = ((8, 32, 10), (2, 32, 5), (1, 6, 2), (1, 4, 2), (1, 3, 2), (1, 2, 4), (1, 2, 2), (1, 6, 0),
        (1, 1, 10), (1, 1, 4))  # fmt: skip
_WINDOWS = ((8, 32, 10), (1, 1, 8), (1, 1, 4), (1, 1, 2), (1, 1, 0), (1, 1, 2, 512))
_STATES = ((8, 32, 10), (1, 4, 4), (1, 2, 2), (1, 1, 4), (1, 4, 0))
MODELS = {
    "8b": ("qwen3-8b-4bit", 64, (8192, 512, 4), _DENSE),
    "30b": ("qwen3-30b-a3b-4bit", 96, (32768, 512, 6), _MOE),
    "gemma": ("gemma-3-27b", 32, (4096, 512, 1), _WINDOWS),
    "delta": ("qwen3.6-35b-a3b", 64, (8192, 512, 4), _STATES),
    "mamba": ("granite-4.0-h-tiny", 32, (8192, 512, 4), _STATES),
    "convolution": ("lfm2-1.2b", 16, (8192, 512, 4), _STATES),
}


def sized_sample(name: str, gibibytes: int) -> SizedModel:
    """Return a sample with 4 bits."""
    quantize = None if "4bit" in name else Quantization(bits=4, group_size=64)
    device = memory_device(gibibytes * 2**30)
    path = str(SAMPLES / f"{name}.yaml")
    return Catalog().sized(path, device=device, method="formula", quantize=quantize)


class Search:
    """The largest requests found within the limits of a question."""

    def __init__(self, sized: SizedModel, question: Question, seed: int = 1) -> None:
        self._question, self._random = question, random.Random(seed)
        prompt, reply, clients, _ = question
        workload = Workload(prompt_tokens=prompt, max_tokens=reply)
        self._bound = ServerBound(sized, workload, clients)
        self.bound = self._bound.moment(question.settings).peak_bytes
        step = question.settings.prefill_step
        # The last chunk is a token longer than whole steps of a cache: room is left over.
        odd = max(1, round_down(min(prompt - 1, step) - 1, 256) + 1)
        rest = round_down(prompt - 1 - odd, step) if prompt > odd else 0
        self._odd = min(prompt, odd + 1)
        self._prompts = [prompt] * 3 + [max(1, prompt - 1), max(1, prompt // 2), min(64, prompt), 1,
                         self._odd, min(prompt, rest + odd + 1)]  # fmt: skip
        parts = (1, 8, 16, 32, 48, 64, 64)
        self._replies = [min(reply, few) for few in (1, 2, 3)]
        self._replies += [max(1, reply * part // 64) for part in parts]
        self._pauses = [0, 0, 0, 0, 1, 2, 5, 20, 100, reply]

    def peak(self, sent: list[Sent], group: int = 1) -> int:
        """Return what the server takes for these requests."""
        requests = [ServedRequest(each.prompt, each.reply) for each in sent]
        arrivals = ClosedLoop(
            self._question.clients, group=group, pauses=[each.pause for each in sent]
        )
        run = simulated(self._bound.memory, requests, self._question.settings, arrivals)
        return run.largest.peak_bytes

    def run(self, count: int) -> tuple[int, list[Sent]]:
        """Return the largest of ``count`` kinds of requests, and its requests."""
        found = [(self.peak(sent), sent) for sent in list(self._crafted())[:count]]
        for _ in range((count - len(found)) // 3):
            sent = [self._one() for _ in range(self._length())]
            group = self._random.choice((1, 1, 2, self._question.clients))
            found.append((self.peak(sent, group), sent))
        found.sort(key=lambda each: -each[0])
        starts = found[:4]
        each_start = max(0, count - len(found)) // len(starts)
        return max((self._climbed(*each, each_start) for each in starts), key=lambda each: each[0])

    def _length(self) -> int:
        return 2 * self._question.clients + 2 * self._question.settings.prompt_cache_size + 8

    def _one(self) -> Sent:
        choose = self._random.choice
        return Sent(choose(self._prompts), choose(self._replies), choose(self._pauses))

    def _crafted(self) -> Iterator[list[Sent]]:
        """Long replies with short ones beside them, with and without room left over before."""
        prompt, reply, clients, settings = self._question
        kept = settings.prompt_cache_size
        odd = [Sent(self._odd, 1, number if number < clients else 0) for number in range(24)]
        for before in ([], odd):
            for short in (1, 2, 3, 8):
                ends = Sent(prompt, min(short, reply))
                for longs in range(1, clients + 1):
                    first = [Sent(prompt, reply)] * longs
                    yield before + first + [ends] * (kept + 6)
                    yield before + (first + [ends] * (kept + clients)) * 2

    def _climbed(self, peak: int, sent: list[Sent], count: int) -> tuple[int, list[Sent]]:
        choose = self._random
        for _ in range(count):
            changed = list(sent)
            for _ in range(choose.choice((1, 1, 2, 4))):
                at = choose.randrange(len(changed))
                other = choose.randrange(len(changed))
                if choose.random() < 0.2:
                    changed[at], changed[other] = changed[other], changed[at]
                else:
                    new = self._one()
                    field = choose.choice(("prompt", "reply", "pause", None))
                    only = new._asdict() if field is None else {field: getattr(new, field)}
                    changed[at] = changed[at]._replace(**only)
            found = self.peak(changed)
            if found >= peak:
                peak, sent = found, changed
        return peak, sent


def main() -> None:
    """Print a row for each setting; end with 1 where one breaks a limit."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else COUNT
    broken = False
    print("| model, flags | bound GB | largest found GB | bound / found |")
    print("|---|--:|--:|--:|")
    for short, (name, gibibytes, limits, settings) in MODELS.items():
        sized = sized_sample(name, gibibytes)
        for each in settings:
            title = f"{short} {'/'.join(map(str, each))}"
            if len(sys.argv) > 2 and title not in sys.argv[2:]:
                continue
            search = Search(sized, Question(*limits, flags(*each)))
            found, _ = search.run(count)
            share = search.bound / found
            broken |= share < 1 or (each[2] > 0 and share > MOST)
            row = f"| {title} | {search.bound / 1e9:.1f} | {found / 1e9:.1f} | {share:.3f} |"
            print(row, flush=True)
    raise SystemExit(broken)


if __name__ == "__main__":
    main()
