"""What batches, servers and drafts hold, compared with mlx-lm's own loops on the CPU.

Between two calls of mx.clear_cache nothing is given back while less than 32 MiB are kept, so that
what is held just before each is the most.
"""

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="the loops that are run are mlx-lm's")

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, speculative_generate_step

from memfit.estimators.base.workload import ServerSettings, Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.devices import find_device
from memfit.estimators.sizing.opening import size
from memfit.estimators.sizing.server_bound import ServerBound
from memfit.estimators.sizing.sized_model import held_of, peak_of, with_draft
from tests.mlx_memory import settled_bytes
from tests.oracle import Oracle
from tests.runtimes.test_batch_groups import CPU, case, sized
from tests.selection import quick

STEP = 256


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None], list[Any]], int]:
    """Return the most bytes that MLX holds while something runs, its models included."""
    clear, tops = mx.clear_cache, [0]

    def note() -> None:
        mx.synchronize()
        tops[0] = max(tops[0], mx.get_active_memory() + mx.get_cache_memory())

    def noted() -> None:
        note()
        clear()

    def measure(run: Callable[[], None], models: list[Any]) -> int:
        mx.eval([model.parameters() for model in models])
        own = sum(array.nbytes for model in models for array in _arrays(model))
        others = max(0, settled_bytes() - own)
        clear()
        monkeypatch.setattr(mx, "clear_cache", noted)
        run()
        note()
        return tops[0] - others

    return measure


def _arrays(model: Any) -> Iterator[mx.array]:
    from mlx.utils import tree_flatten

    return (array for _, array in tree_flatten(model.parameters()))


@pytest.mark.parametrize(
    ("name", "clients", "prompt", "reply"),
    quick(
        (("qwen3", 1, 400, 300), ("qwen3", 4, 300, 200), ("llama", 8, 200, 150)),
        (("qwen3", 1, 400, 300),),
    ),
)
def test_no_traffic_makes_a_server_hold_more(
    held: Any, name: str, clients: int, prompt: int, reply: int
) -> None:
    model, draw = Oracle(case(name), "BF16").model, Random(clients)
    generator = BatchGenerator(model, prefill_step_size=STEP)

    def insert() -> None:
        most = (draw.choice((each, draw.randint(1, each))) for each in (prompt, reply))
        tokens, generated = most
        generator.insert([[1] * tokens], max_tokens=[generated])

    def serve() -> None:
        left = 3 * clients
        for _ in range(clients):
            insert()
        while True:
            prompts, replies = generator.next()
            if not prompts and not replies:
                return
            for _ in [each for each in replies if each.finish_reason and left]:
                left -= 1
                insert()

    most = held(serve, [model])
    flags = ServerSettings(
        prefill_step=STEP, prompt_concurrency=8, decode_concurrency=32, prompt_cache_size=0
    )
    workload = Workload(prompt_tokens=prompt, max_tokens=reply, prefill_step=STEP)
    bound = ServerBound(sized(name, "formula"), workload, clients)
    kept = bound.kept_bytes(flags)
    assert kept
    peak_bytes = bound.moment(flags).needed_bytes
    assert most <= peak_bytes + kept
    # The caches that nobody gives back are what is beyond the peak: the bound is not of air.
    assert clients > 1 or most > peak_bytes


def test_a_draft_keeps_every_cache_that_has_grown() -> None:
    """Its loop clears after the prompt alone (generate.py, speculative_generate_step)."""
    workload = Workload(prompt_tokens=300, max_tokens=700, prefill_step=STEP)
    models = [Oracle(case("qwen3"), "BF16").model for _ in range(2)]
    kept = [mx.get_cache_memory()]
    for _ in speculative_generate_step(
        mx.array([1] * workload.prompt_tokens),
        *models,
        max_tokens=workload.max_tokens,
        prefill_step_size=STEP,
    ):
        kept.append(mx.get_cache_memory())
    # 512, then 768 tokens of 1,536 B in both models; the CPU keeps its scores too.
    expected = 2 * 1536 * (512 + 768)
    assert kept[-1] > expected

    def on(device: Device) -> int | None:
        config = case("qwen3")
        checkpoint = Checkpoint(id="m", source="config", config=config, config_name="config.json")
        one = size(checkpoint, device=device)
        both = with_draft(one, one, 2)
        nbytes = held_of(both, workload)
        return None if nbytes is None else nbytes - peak_of(both, workload)

    assert (on(find_device("m4-max-64")), on(CPU)) == (expected, 32 * 2**20)


@pytest.mark.parametrize(("batch", "prompt", "generated"), [(2, 260, 300)])
def test_a_batch_holds_what_it_copies_and_outgrows(
    held: Any, batch: int, prompt: int, generated: int
) -> None:
    model = Oracle(case("qwen3"), "BF16").model
    workload = Workload(prompt_tokens=prompt, max_tokens=generated, batch=batch, prefill_step=STEP)

    def run() -> None:
        generator = BatchGenerator(model, prefill_step_size=STEP)
        generator.insert([[1] * prompt] * batch, max_tokens=[generated] * batch)
        while generator.next_generated():
            pass

    most = held(run, [model])
    estimated = held_of(sized("qwen3", "formula"), workload)
    assert estimated is not None
    assert most <= estimated <= 1.25 * most
