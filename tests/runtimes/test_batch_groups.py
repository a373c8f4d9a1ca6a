"""Batches that mlx-lm prefills in groups, compared with its own generator on the CPU."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="the generator that is run is mlx-lm's")

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from msgspec.structs import replace

from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.call_plan import grouped_batch
from memfit.estimators.runtimes.facets import is_grouped
from memfit.estimators.runtimes.mlx_lm_commands import together
from memfit.estimators.sizing.opening import size
from memfit.estimators.sizing.sized_model import SizedModel
from tests.mlx_memory import settled_bytes
from tests.oracle import Oracle

CASES = Path(__file__).parents[1] / "arch" / "cases"
CPU = Device("this host", "cpu", 32 << 30, 24 << 30, None, "flag")


def case(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CASES / f"{name}.json").read_text())
    return config


def sized(name: str, method: Any) -> SizedModel:
    checkpoint = Checkpoint(id="m", source="config", config=case(name), config_name="config.json")
    return size(checkpoint, device=CPU, method=method, margin_bytes=0)


def measured(name: str, workload: Workload, lengths: Sequence[int] = ()) -> int:
    """The peak of mlx-lm's generator in bytes, of which its caller keeps the last responses."""
    model = Oracle(case(name), "BF16").model
    mx.eval(model.parameters())
    before = settled_bytes() - sum(array.nbytes for _, array in _arrays(model))
    generator = BatchGenerator(model, prefill_step_size=workload.prefill_step)
    prompts = [[1] * length for length in lengths or [workload.prompt_tokens] * workload.batch]
    generator.insert(prompts, max_tokens=[workload.max_tokens] * workload.batch)
    # As mlx_lm.batch_generate: the responses are a variable until the next ones are there.
    while responses := generator.next_generated():
        for response in responses:
            assert response.token >= 0
    generator.close()
    return int(mx.get_peak_memory()) - max(0, before)


def _arrays(model: Any) -> list[tuple[str, mx.array]]:
    from mlx.utils import tree_flatten

    return list(tree_flatten(model.parameters()))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "batch", "prompt", "generated"),
    [
        # Groups end while others are prefilled, or decode all together.
        ("falcon_h1", 12, 260, 12),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in (
                ("qwen3", 16, 256, 4),
                ("llama", 32, 512, 4),
                ("llama", 32, 300, 40),
                ("qwen3", 16, 512, 300),
                # More than decode together, with a window, and with states besides keys and values.
                ("qwen3", 64, 300, 24),
                ("gemma3_text", 40, 300, 20),
                ("falcon_h1", 64, 200, 24),
            )
        ),
    ],
)
def test_the_peak_of_a_batch_in_groups_is_that_of_the_real_generator(
    name: str, batch: int, prompt: int, generated: int
) -> None:
    workload = Workload(prompt_tokens=prompt, max_tokens=generated, batch=batch, prefill_step=256)
    peak = measured(name, workload)
    for method, most in (("formula", 1.16), ("trace", 1.1)):
        estimated = sized(name, method).figures_for(workload).moment.nbytes
        assert 0.95 * peak <= estimated <= most * peak, (method, estimated, peak)


def test_no_more_are_prefilled_or_decoded_together_than_mlx_lm_does() -> None:
    model = sized("qwen3", "formula").model
    workload = Workload(prompt_tokens=500, max_tokens=50, batch=100, prefill_step=128)
    batch = grouped_batch(model, workload)
    assert max(moment.prefilled.rows for moment in batch.moments if moment.prefilled) == 8
    assert (
        batch.rows == max(moment.stepped.rows for moment in batch.moments if moment.stepped) == 32
    )
    # The rest of a full batch is copied while responses refer to all of it.
    assert max(sum(each.rows for each in moment.buffers) for moment in batch.moments) >= 32 + 24


@pytest.mark.parametrize("method", ["formula", "trace"])
def test_a_batch_in_one_group_is_what_it_was(method: str) -> None:
    runtime_model = sized("qwen3", method).runtime_model
    workload = Workload(prompt_tokens=300, max_tokens=4, batch=8, prefill_step=128)
    found, alone = runtime_model.figures(workload), runtime_model.together(workload)  # type: ignore[attr-defined]
    # What the batch generator keeps beside it is of all batches.
    moment = found.moment
    kept = replace(alone.moment, held_bytes=moment.held_bytes, held_phase=moment.held_phase)
    assert moment == kept
    assert (found.kv, found.ssm_bytes) == (alone.kv, alone.ssm_bytes)
    assert not is_grouped(runtime_model, workload)


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("generated", [0, 50])
def test_prompts_without_a_chunk_are_sized_in_groups_too(tokens: int, generated: int) -> None:
    one = sized("qwen3", "formula")
    workload = Workload(prompt_tokens=tokens, max_tokens=generated, batch=40)
    moment = one.figures_for(workload).moment
    assert moment.decode_bytes
    assert one.resident_bytes <= (moment.prefill_bytes or 0) <= moment.nbytes


def test_chunks_that_are_skipped_change_no_peak() -> None:
    # Groups of 40 chunks; every chunk that begins or ends something is followed.
    one = sized("llama", "formula")
    short, long = (
        one.figures_for(Workload(prompt_tokens=tokens, max_tokens=200, batch=16, prefill_step=64))
        for tokens in (2560, 2816)
    )
    assert 0 < long.moment.nbytes - short.moment.nbytes < long.moment.nbytes // 4


def test_the_server_is_told_both_groups() -> None:
    for batch, groups in ((4, (4, 4)), (16, (8, 16)), (64, (8, 32))):
        settings = together(Workload(prompt_tokens=1, batch=batch), 1)
        assert (settings.prompt_concurrency, settings.decode_concurrency) == groups
