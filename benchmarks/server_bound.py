"""Search for requests that take more of mlx_lm.server than the bound of `memfit plan server`.

    python -m benchmarks.server_bound                  # 10,000 per setting
    python -m benchmarks.server_bound 500 "8b 8/32/5"

Requests are within the lengths that the bound is for: crafted, random, and climbed to from the
largest of these; some continue conversations, are equal, or share only a first token. Nothing found
may pass the bound, and with a prompt cache the bound is at most 1.45 times what one search finds;
docs/server.md has the largest of several.
"""

import random
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product, repeat
from pathlib import Path
from typing import NamedTuple

from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.units import ceil_div, round_down
from memfit.estimators.base.workload import ServerSettings, Workload
from memfit.estimators.machine.devices import memory_device
from memfit.estimators.mlx.arrivals import ClosedLoop, ServedRequest
from memfit.estimators.plans.server.simulation import simulated
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.server_bound import ServerBound
from memfit.estimators.sizing.sized_model import SizedModel

SAMPLES = Path(__file__).parents[1] / "sample_configs"
COUNT = 10_000
MOST = 1.45


class Sent(NamedTuple):
    """A request, the calls that its client waits before it, and the text that it is of.

    Or how many requests before it one was sent whose prompt has the same first token.
    """

    prompt: int
    reply: int
    pause: int = 0
    text: int | None = None
    after: int = 0


class Traffic(NamedTuple):
    """Requests, how many clients are waited for to send together, and all clients, where fewer."""

    sent: list[Sent]
    group: int = 1
    clients: int | None = None


class Question(NamedTuple):
    """The limits that are searched within."""

    prompt: int
    reply: int
    clients: int
    settings: ServerSettings

    @property
    def is_near(self) -> bool:
        """Whether the bound is near the largest found: where a prompt cache is most of both."""
        return self.settings.prompt_cache_size > 0


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
        self.bound = self._bound.moment(question.settings).needed_bytes
        memory = self._bound.memory
        self._trims = not memory.has_states and min(memory.windows, default=2**62) > prompt + reply
        step = question.settings.prefill_step
        # The last chunk is a token longer than whole steps of a cache: room is left over.
        odd = max(1, round_down(min(prompt - 1, step) - 1, 256) + 1)
        rest = round_down(prompt - 1 - odd, step) if prompt > odd else 0
        self._odd = min(prompt, odd + 1)
        # The last chunk is a whole one.
        self._whole = round_down(prompt - 1, step) + 1 if prompt > step else prompt
        self._prompts = [prompt] * 3 + [max(1, prompt - 1), max(1, prompt // 2), min(64, prompt), 1]
        self._prompts += [self._odd, min(prompt, rest + odd + 1), self._whole]
        parts = (1, 8, 16, 32, 48, 64, 64)
        self._replies = [min(reply, few) for few in (1, 2, 3)]
        self._replies += [max(1, reply * part // 64) for part in parts]
        self._pauses = [0, 0, 0, 0, 1, 2, 5, 20, 100, reply]

    def peak(self, traffic: Traffic) -> int:
        """Return what the server takes for these requests."""
        shares = [each.after and number - each.after for number, each in enumerate(traffic.sent)]
        requests = [
            ServedRequest(each.prompt, each.reply, shared if shared > 0 else None, 1, each.text)
            for shared, each in zip(shares, traffic.sent, strict=True)
        ]
        arrivals = ClosedLoop(
            traffic.clients or self._question.clients,
            group=traffic.group,
            pauses=[each.pause for each in traffic.sent],
        )
        memory, settings = self._bound.memory, self._question.settings
        return simulated(memory, requests, settings, arrivals).largest.needed_bytes

    def run(self, count: int) -> tuple[int, Traffic]:
        """Return the largest of ``count`` kinds of requests, and its requests."""
        crafted = [*self._equal(), *self._crafted(), *self._again()]
        self._random.shuffle(crafted)
        found = [(self.peak(traffic), traffic) for traffic in crafted[:count]]
        for _ in range((count - len(found)) // 3):
            traffic = self._mixed()
            found.append((self.peak(traffic), traffic))
        found.sort(key=lambda each: -each[0])
        starts = found[:4]
        each_start = max(0, count - len(found)) // len(starts)
        return max((self._climbed(*each, each_start) for each in starts), key=lambda each: each[0])

    def _mixed(self) -> Traffic:
        """Random requests; some that are sent together are of one text, others of an old one."""
        clients, settings, choose = *self._question[2:], self._random.choice
        group, together, again = (
            choose((1, 1, 2, clients)),
            choose((0, 0.5, 1)),
            choose((0, 0.5, 1)),
        )
        texts = clients + self._random.randint(0, settings.prompt_cache_size + 1)
        sent = [self._one() for _ in range(2 * clients + 2 * settings.prompt_cache_size + 8)]
        for number, each in enumerate(sent):
            if group > 1 and self._random.random() < together:
                sent[number] = each._replace(text=number // group)
            elif self._random.random() < again:
                sent[number] = each._replace(**choose(self._old(number, texts)))
        return Traffic(sent, group)

    def _old(self, number: int, texts: int) -> list[dict[str, int]]:
        """Fields of a request that finds the entry of one ``texts`` before it.

        It begins with all of it, or with its first token where caches can be trimmed.
        """
        whole = {"text": -1 - number % texts}
        return [whole, {"after": texts}] if self._trims else [whole]

    def _one(self) -> Sent:
        choose = self._random.choice
        return Sent(choose(self._prompts), choose(self._replies), choose(self._pauses))

    def _equal(self) -> Iterator[Traffic]:
        """Requests of one text that end together, so that they share the entry of their batch.

        Those that are prefilled later have longer prompts; the last one may join the others at
        their last chunk. The next are of another text, or of the same one with shorter prompts,
        which find no prefix and have the same whole entry.
        """
        prompt, reply, clients, settings = self._question
        count, together = settings.prompt_cache_size + 3, settings.prompt_concurrency
        for rows, longest in product({clients, min(clients, settings.rows)}, {prompt, self._whole}):
            calls = ceil_div(longest - 1, settings.prefill_step)
            for shorter, pause in product((0, 1), {0, max(0, calls - 1)}):
                later = [number // together * calls for number in range(rows)]
                later[-1] += pause
                sent = [
                    Sent(
                        max(1, longest - later[-1] - number * shorter + each),
                        max(1, reply - (count - number) * shorter - each),
                        pause if client == rows - 1 else 0,
                        number * (1 - shorter),
                    )
                    for number in range(count)
                    for client, each in enumerate(later)
                ]
                yield Traffic(sent, clients=rows)

    def _crafted(self) -> Iterator[Traffic]:
        """Long replies with short ones beside them, with and without room left over before."""
        prompt, reply, clients, settings = self._question
        kept = settings.prompt_cache_size
        odd = [Sent(self._odd, 1, number if number < clients else 0) for number in range(24)]
        for before in ([], odd):
            for short in (1, 2, 3, 8):
                ends = Sent(prompt, min(short, reply))
                for longs in range(1, clients + 1):
                    first = [Sent(prompt, reply)] * longs
                    yield Traffic(before + first + [ends] * (kept + 6))
                    yield Traffic(before + (first + [ends] * (kept + clients)) * 2)

    def _again(self) -> Iterator[Traffic]:
        """Requests that find the entry of an earlier one, when it is about the oldest."""
        prompt, reply, clients, settings = self._question
        kept = settings.prompt_cache_size
        if not kept or clients <= settings.prompt_concurrency:
            return  # nobody waits with an entry
        oldest = range(clients + max(0, kept - 4), clients + kept + 2)
        for texts, fewer, pause in product(oldest, (0, 1, 2), (0, 1)):
            first = [
                Sent(prompt, max(1, reply - fewer * number), pause * (number < clients))
                for number in range(2 * texts + 2 * clients)
            ]
            for kind in range(len(self._old(0, texts))):
                yield Traffic(
                    [each._replace(**self._old(at, texts)[kind]) for at, each in enumerate(first)]
                )

    def _climbed(self, peak: int, traffic: Traffic, count: int) -> tuple[int, Traffic]:
        choose = self._random
        for _ in range(count):
            changed = list(traffic.sent)
            for _ in range(choose.choice((1, 1, 2, 4))):
                at = choose.randrange(len(changed))
                other = choose.randrange(len(changed))
                if choose.random() < 0.2:
                    changed[at], changed[other] = changed[other], changed[at]
                else:
                    new = self._one()
                    field = choose.choice(("prompt", "reply", "pause", "text", "after", None))
                    if choose.random() < 0.2:
                        new = new._replace(text=changed[other].text, after=changed[other].after)
                    only = new._asdict() if field is None else {field: getattr(new, field)}
                    changed[at] = changed[at]._replace(**only)
            found = self.peak(traffic._replace(sent=changed))
            if found >= peak:
                peak, traffic = found, traffic._replace(sent=changed)
        return peak, traffic


def searched(title: str, count: int) -> tuple[int, int, bool]:
    """Return the bound of a setting by its title, the largest found, and `Question.is_near`."""
    short, numbers = title.split()
    name, gibibytes, limits, _ = MODELS[short]
    question = Question(*limits, flags(*map(int, numbers.split("/"))))
    search = Search(sized_sample(name, gibibytes), question)
    return search.bound, search.run(count)[0], question.is_near


def main() -> None:
    """Print a row for each setting; end with 1 where one breaks a limit."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else COUNT
    titles = [
        f"{short} {'/'.join(map(str, each))}" for short in MODELS for each in MODELS[short][3]
    ]
    titles = [title for title in titles if title in sys.argv[2:] or len(sys.argv) <= 2]
    broken = False
    print("| model, flags | bound GB | largest found GB | bound / found |")
    print("|---|--:|--:|--:|")
    with ProcessPoolExecutor() as pool:
        for title, (bound, found, is_near) in zip(
            titles, pool.map(searched, titles, repeat(count)), strict=True
        ):
            share = bound / found
            broken |= share < 1 or (is_near and share > MOST)
            row = f"| {title} | {bound / 1e9:.1f} | {found / 1e9:.1f} | {share:.3f} |"
            print(row, flush=True)
    raise SystemExit(broken)


if __name__ == "__main__":
    main()
