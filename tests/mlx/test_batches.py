"""Batches, compared with mlx-lm's own batch generator."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="the generator is mlx-lm's")
import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from benchmarks.accuracy import HOST
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.runtimes.source import MethodSetting
from memfit.estimators.sizing.opening import size
from memfit.estimators.trace.kernel_stubs import TraceTarget
from memfit.estimators.trace.peak import peak
from memfit.estimators.trace.traced_model import TracedModel
from tests.mlx_memory import settled_bytes
from tests.oracle import Oracle

TESTS = Path(__file__).parents[1]
(BIGCODE,) = (
    config
    for config in json.loads((TESTS / "trace" / "cases.json").read_text())
    if config["model_type"] == "gpt_bigcode"
)


def case(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((TESTS / "arch" / "cases" / f"{name}.json").read_text())
    return config


def generates(config: dict[str, Any], sequences: int) -> bool:
    generator = BatchGenerator(
        Oracle(config, "F32").model, completion_batch_size=4, prefill_batch_size=4
    )
    try:
        generator.insert([[1, 2, 3, 4, 5]] * sequences, max_tokens=[2] * sequences)
        return any(generator.next()[1] for _ in range(4))
    except ValueError:
        return False
    finally:
        generator.close()


@pytest.mark.parametrize("sequences", [2, 3])
@pytest.mark.parametrize(
    ("config", "methods"),
    [
        (case("llama"), ("formula", "trace")),
        # Two heads of keys: a mask of two sequences is added, to the wrong scores.
        (case("gemma2"), ("formula", "trace")),
        (case("llama4"), ("formula", "trace")),
        (BIGCODE, ("trace",)),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)
def test_a_batch_that_mlx_lm_does_not_run_is_rejected_or_noted(
    config: dict[str, Any], methods: tuple[MethodSetting, ...], sequences: int
) -> None:
    workload, found = Workload(prompt_tokens=40, batch=sequences), []
    for method in methods:
        checkpoint = Checkpoint(id="m", source="config", config=config, config_name="config.json")
        sized = size(checkpoint, device=None, method=method)
        try:
            figures = sized.figures_for(workload)
        except UnsupportedError as error:
            found.append("mlx-lm's class fails on a batch" not in str(error))
        else:
            notes = sized.runtime_model.statements(workload, figures).notes
            found.append("no-batch" not in [note.code for note in notes])
    assert found == [generates(config, sequences)] * len(methods)


def test_a_decode_step_keeps_what_the_next_makes_its_states_from() -> None:
    config = case("falcon_h1") | {"num_hidden_layers": 4, "mamba_d_state": 64}
    # The second step of this prompt grows the KV caches.
    workload = Workload(prompt_tokens=256, max_tokens=20, batch=4)
    trace, _ = TracedModel(config, "cpu", dtype="F32").record(workload, TraceTarget(backend="cpu"))
    traced = {call.part: max(call.curve) for call in peak(trace, HOST).calls}
    growing, measured = 0, list[int]()
    # A busy machine may make the states before the caches grow: a tenth less in that run.
    for _ in range(6):
        measured = decode_peaks(config, workload)
        growing = max(growing, *measured)
        if traced["growing"] <= 1.02 * growing:
            break
    assert growing <= traced["growing"] <= 1.02 * growing
    assert measured[-1] == pytest.approx(traced["decode"], rel=0.02)


def decode_peaks(config: dict[str, Any], workload: Workload) -> list[int]:
    """Return what each step after the first takes above the weights at its peak, in bytes."""
    model = Oracle(config, "F32").model
    mx.eval(model.parameters())
    before = settled_bytes()
    generator = BatchGenerator(
        model, completion_batch_size=workload.batch, prefill_batch_size=workload.batch
    )
    prompt = [1 + token % 200 for token in range(workload.prompt_tokens)]
    generator.insert(
        [prompt] * workload.batch, max_tokens=[workload.max_tokens + 2] * workload.batch
    )
    found: list[int] = []
    for _ in range(workload.max_tokens + 2):
        generator.next()
        found.append(mx.get_peak_memory() - before)
        mx.reset_peak_memory()
    generator.close()
    # The first two are of the prompt and its last token.
    return found[2:]
