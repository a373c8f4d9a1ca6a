"""The peak of a run, on calls small enough to count by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit.estimators.base.workload import CallPhase, Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.versions import MlxVersions
from memfit.estimators.runtimes.mlx_lm_trace import ClassTrace
from memfit.estimators.sizing.opening import size
from memfit.estimators.trace.graph_format import Call
from memfit.estimators.trace.layouts import Allocation
from memfit.estimators.trace.memory import Allocator
from memfit.estimators.trace.peak import RunPeak, peak
from tests.selection import quick
from tests.trace.calls import Sketch, trace_of

CPU = Device("this host", "cpu", 0, 0, None, "flag")
MAX = Device("a Max", "metal", 0, 0, None, "flag", "s", 16)
MEBI = 1 << 20


def chunk(capacity: int, position: int, tokens: int = 4) -> Call:
    """A chunk that writes one cache of ``capacity`` tokens of a MiB, and grows it if needed."""
    sketch = Sketch()
    new = sketch.given(1, 1, tokens, MEBI // 4)
    if position:
        cache = sketch.given(1, 1, capacity, MEBI // 4, role="cache")
    else:
        zero = sketch.given(1, role="constant")
        cache = sketch.run("Full", (zero,), 1, 1, capacity, MEBI // 4)
    update = sketch.run("Exp", (new,), 1, 1, tokens, MEBI // 4)
    written = sketch.run("SliceUpdate", (cache, update), 1, 1, capacity, MEBI // 4)
    return sketch.call(
        written, tokens=tokens, position=position, phase="last_chunk" if position else "first_chunk"
    )


def test_the_peak_is_weights_plus_arrays_alive_at_the_same_time() -> None:
    found = peak(trace_of(chunk(16, 0), weights=5 * MEBI), CPU)
    # Weights, the chunk's input, its exponential and the cache.
    assert found.nbytes == (5 + 4 + 4 + 16) * MEBI
    assert found.top.part == "first_chunk"


def test_a_cache_that_is_large_enough_is_written_in_place() -> None:
    grown = peak(trace_of(chunk(16, 0), chunk(16, 4)), CPU)
    assert grown.nbytes == (4 + 4 + 16) * MEBI
    assert grown.workspace_bytes == 8 * MEBI


def test_a_cache_that_python_still_holds_is_copied() -> None:
    call = chunk(16, 4)
    held = Call(
        call.phase,
        call.tokens,
        call.position,
        call.arrays,
        call.nodes,
        call.evaluated,
        (*call.held, 1),
    )
    assert peak(trace_of(held), CPU).nbytes == (4 + 4 + 16 + 16) * MEBI


def test_caches_after_a_jump_are_not_counted_with_earlier_ones() -> None:
    jumped = peak(trace_of(chunk(16, 0), chunk(64, 32), weights=5 * MEBI), CPU)
    assert jumped.nbytes == (5 + 4 + 4 + 64) * MEBI
    assert jumped.top.part == "last_chunk"


def token(phase: CallPhase, position: int) -> Call:
    """A step that samples: the log-probabilities are a MiB."""
    sketch = Sketch()
    logprobs = sketch.run("Gather", (sketch.given(1),), MEBI // 4)
    return sketch.call(logprobs, phase=phase, tokens=1, position=position)


def test_a_step_finds_the_log_probabilities_of_two_earlier_tokens_held() -> None:
    # generate_step holds those of the last token, its caller those of the one before.
    last, first, later = token("last_token", 9), token("growing", 10), token("decode", 29)
    skipped = token("growing", 20)
    runs = ((last,), (last, first), (last, later), (last, first, later), (last, skipped, later))
    assert [peak(trace_of(*calls), CPU).nbytes // MEBI for calls in runs] == [1, 2, 3, 3, 3]
    assert dict(peak(trace_of(last, later), CPU).alive)["log-probabilities"] == 3 * MEBI


def test_the_peak_is_attributed_to_an_operation() -> None:
    first, second = chunk(16, 0), chunk(16, 4)
    held = replace(second, held=(*second.held, 1))
    assert peak(trace_of(first), CPU).top.operation == "Full"
    # The copy's buffer becomes a cache; the operation allocated it.
    assert peak(trace_of(held), CPU).top.operation == "SliceUpdate"


def test_a_peak_at_the_start_of_a_call_belongs_to_its_first_operation() -> None:
    sketch = Sketch()
    start = sketch.given(MEBI, role="tokens")
    call = sketch.call(sketch.run("StopGradient", (start,), MEBI))
    assert peak(trace_of(call), CPU).top.operation == "StopGradient"


def test_a_freed_buffer_is_held_until_it_is_used_again_or_given_back() -> None:
    memory = Allocator("metal")

    def used(nbytes: int) -> Allocation:
        buffer = memory.allocate(nbytes)
        buffer.references = 1
        return buffer

    memory.release(used(4 * MEBI))
    # Less than twice as large and near in size: the kept one is in use again.
    memory.release(used(4 * MEBI - 16384))
    assert (memory.active, memory.peak, memory.held) == (0, 4 * MEBI, 4 * MEBI)
    memory.release(used(8 * MEBI))
    assert (memory.peak, memory.held) == (8 * MEBI, 12 * MEBI)
    memory.clear_cache()
    memory.begin("")
    assert memory.held == 0


def test_a_cache_that_grows_leaves_the_old_one_held() -> None:
    found = peak(trace_of(chunk(16, 0)), CPU)
    assert max(found.held.values()) == found.nbytes
    sketch = Sketch()
    cache = sketch.given(1, 1, 16, MEBI // 4, role="cache")
    more = sketch.run("Full", (sketch.given(1, role="constant"),), 1, 1, 4, MEBI // 4)
    larger = sketch.run("Concatenate", (cache, more), 1, 1, 20, MEBI // 4)
    # What is as large as the old cache would take its place; nothing is.
    call = sketch.call(larger, position=16)
    grown = peak(trace_of(call), MAX)
    assert grown.nbytes // MEBI == max(grown.held.values()) // MEBI == 16 + 4 + 20


def test_the_arrays_alive_add_up_to_the_peak() -> None:
    found = peak(trace_of(chunk(16, 0), weights=3 * MEBI), CPU)
    assert sum(nbytes for _, nbytes in found.alive) == found.nbytes
    assert dict(found.alive)["weights"] == 3 * MEBI


def test_metal_rounds_each_allocation_up_to_a_page() -> None:
    sketch = Sketch()
    start = sketch.given(5000, role="tokens")
    found = peak(trace_of(sketch.call(sketch.run("Exp", (start,), 5000))), MAX)
    assert found.nbytes == 2 * 2 * 16384


def test_running_work_keeps_its_inputs_alive() -> None:
    def highest(count: int) -> int:
        sketch = Sketch()
        last = sketch.given(MEBI)
        for _ in range(count):
            # A cast cannot write over its input, which lives until the device has run it.
            last = sketch.run("AsType", (last,), MEBI, dtype="BF16")
            last = sketch.run("AsType", (last,), MEBI, dtype="F32")
        return peak(trace_of(sketch.call(last)), MAX).nbytes

    assert highest(10) == (4 + 10 * 6) * MEBI
    # Eleven command buffers of 26 such pairs at most: beyond, nothing is added.
    assert highest(400) == highest(500)


@given(st.integers(1, 40), st.integers(1, 40))
def test_more_operations_never_lower_the_peak(few: int, more: int) -> None:
    def highest(count: int) -> RunPeak[CallPhase]:
        sketch = Sketch()
        return peak(trace_of(sketch.call(sketch.chain("Cumsum", sketch.given(64), count, 64))), CPU)

    few, more = sorted((few, more))
    assert highest(few).nbytes <= highest(more).nbytes
    assert [len(call.curve) for call in highest(more).calls] == [more]


CASES = Path(__file__).parents[1] / "arch" / "cases"
MEASURED = ("llama", "gpt_oss", "deepseek_v2", "qwen2_moe")


# Small except for its caches, which grow by 256 tokens at a time.
GROWING: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 16,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": 256,
}


@pytest.mark.parametrize("name", quick(MEASURED, ("gpt_oss",)))
def test_the_cpu_peak_of_small_models_equals_mlxs_measurement(name: str) -> None:
    config = json.loads((CASES / f"{name}.json").read_text())
    check_against_mlx(name, config, tokens=700, step=256, generated=2)


@pytest.mark.exhaustive(daily=True)
@pytest.mark.parametrize("generated", [1, 8])
def test_the_peak_of_a_large_vocabulary_equals_mlxs_measurement(generated: int) -> None:
    config = json.loads((CASES / "llama.json").read_text()) | {"vocab_size": 256_000}
    # Logits and log-probabilities are nearly all of it, and their number does not vary.
    check_against_mlx("llama", config, tokens=32, step=64, generated=generated, percent=1)


@pytest.mark.exhaustive
def test_the_peak_of_a_generation_that_grows_caches_equals_mlxs_measurement() -> None:
    check_against_mlx("grown by generation", GROWING, tokens=250, step=64, generated=14)


@pytest.mark.exhaustive
def test_the_peak_of_a_chunk_before_the_last_that_grows_caches_equals_mlxs_measurement() -> None:
    # Of chunks of 128 tokens every second one makes the caches grow; the last is of one token.
    wide = {**GROWING, "hidden_size": 512, "num_hidden_layers": 2, "intermediate_size": 512}
    wide |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128}
    check_against_mlx("grown by a chunk", wide, tokens=2050, step=128, generated=1)


def test_on_metal_formula_and_trace_agree_on_a_generation_that_grows() -> None:
    pytest.importorskip("mlx_lm", reason="the class that is traced is mlx-lm's")
    checkpoint = Checkpoint(id="grown", source="config", config=GROWING, config_name="grown.json")
    workload = Workload(prompt_tokens=200_000, max_tokens=1000)
    formula = size(checkpoint, device=None, method="formula")
    wanted = formula.on(MAX).figures_for(workload).moment
    trace = ClassTrace(checkpoint, None, "BF16")
    traced = trace.run(workload, MAX, MlxVersions()).peak
    assert traced is not None
    assert traced.top.part == "growing"
    assert wanted.decode_bytes is not None
    assert 0.99 * wanted.decode_bytes <= traced.parts["growing"] <= 1.01 * wanted.decode_bytes


def check_against_mlx(
    name: str, config: dict[str, Any], *, tokens: int, step: int, generated: int, percent: int = 10
) -> None:
    pytest.importorskip("mlx_lm", reason="the models that run are mlx-lm's")
    from benchmarks.accuracy import Case, in_child

    case = Case(name, config, "F32", tokens, step, generated)
    predicted, measured = in_child("predict", case), in_child("measure", case)
    assert predicted is not None
    assert measured is not None
    assert predicted.caches == measured.caches
    # The device's progress at an allocation varies from run to run.
    for found, runs in ((predicted.peaks, measured.peaks), (predicted.held, measured.held)):
        middle = sorted(runs)[1]
        assert abs(found[0] - middle) * 100 <= percent * middle
