"""A model built once gives the same answers as one built for each workload."""

import json
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.devices import working_set_device

pytest.importorskip("mlx_lm")

from memfit.estimators.trace import call_recorder, loop_guard
from memfit.estimators.trace.kernel_stubs import TraceTarget
from memfit.estimators.trace.peak import followed_start, peak
from memfit.estimators.trace.traced_model import TracedModel
from tests.selection import THREE_CONFIGS, quick, share
from tests.trace.tracing import record

CASES = sorted((Path(__file__).parents[1] / "arch" / "cases").glob("*.json"))
SHORT = Workload(prompt_tokens=40, max_tokens=2)
LONG = Workload(prompt_tokens=300, max_tokens=5, prefill_step=128, batch=2)
# The last call allocates longer buffers: in the prompt, and in generation.
GROWING = (
    Workload(prompt_tokens=513, max_tokens=0, prefill_step=256),
    Workload(prompt_tokens=766, max_tokens=3, prefill_step=256),
    Workload(prompt_tokens=700, max_tokens=3, prefill_step=256, max_kv_size=300),
)
METAL = TraceTarget(backend="metal")


def config(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


@pytest.mark.parametrize("path", quick(CASES, THREE_CONFIGS), ids=lambda path: path.stem)
def test_the_recorded_calls_end_with_the_bytes_of_the_shapes(path: Path) -> None:
    built = TracedModel(config(path), "metal")
    for workload in (SHORT, LONG, *GROWING):
        assert built.record(workload, METAL)[1] == built.shapes(workload)


@pytest.mark.parametrize("name", ["llama", "gemma3n", "qwen3_next", "llama4", "deepseek_v3"])
def test_earlier_workloads_do_not_change_an_answer(name: str) -> None:
    case = config(next(path for path in CASES if path.stem == name))
    built = TracedModel(case, "metal")
    built.record(LONG, METAL)
    built.shapes(LONG)
    assert built.record(SHORT, METAL)[0] == record(case, SHORT, target=METAL)


@pytest.mark.parametrize(
    "path", quick(share(CASES, 0, 4), THREE_CONFIGS), ids=lambda path: path.stem
)
def test_a_run_that_begins_like_another_is_traced_as_if_it_were_alone(path: Path) -> None:
    built, device = TracedModel(config(path), "metal"), working_set_device(10**12)
    shorter, longer = (Workload(prompt_tokens=n, prefill_step=128) for n in (300, 700))
    start = followed_start(built.record(shorter, METAL)[0], device)
    again, shapes = built.record(longer, METAL)
    assert start is not None
    assert start.call is again.calls[0]
    assert built.record(longer, METAL) == (again, shapes)
    alone = TracedModel(config(path), "metal").record(longer, METAL)
    assert (again, shapes) == alone
    assert peak(again, device, start) == peak(again, device) == peak(alone[0], device)


@pytest.mark.parametrize(
    "path", quick(share(CASES, 1, 4), THREE_CONFIGS), ids=lambda path: path.stem
)
def test_runs_of_two_prefill_steps_in_turn_are_traced_as_if_alone(path: Path) -> None:
    built = TracedModel(config(path), "metal")
    for prompt, step in ((300, 128), (600, 256), (700, 128), (900, 256), (513, 128)):
        workload = Workload(prompt_tokens=prompt, max_tokens=3, prefill_step=step)
        alone = TracedModel(config(path), "metal").record(workload, METAL)
        assert built.record(workload, METAL) == alone


@pytest.mark.parametrize(
    "path", quick(share(CASES, 2, 4), THREE_CONFIGS), ids=lambda path: path.stem
)
def test_a_prompt_of_one_chunk_is_traced_alike_with_every_larger_step(path: Path) -> None:
    built = TracedModel(config(path), "metal")
    for prompt in (1, 2, 300):
        least, larger = (
            built.record(Workload(prompt_tokens=prompt, max_tokens=3, prefill_step=step), METAL)
            for step in (prompt, 512)
        )
        assert least == larger


def test_the_first_call_is_kept_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    case = config(next(path for path in CASES if path.stem == "llama"))
    built = TracedModel(case, "metal")
    shorter, longer = (Workload(prompt_tokens=n, prefill_step=128) for n in (300, 700))
    first = built.record(shorter, METAL, phases={"first_chunk"})[0].calls[0]
    monkeypatch.setattr(call_recorder, "_MAX_KEPT", len(first.nodes) + 1)
    assert built.record(longer, METAL)[0].calls[0] is first
    assert built.record(shorter, METAL)[0].calls[0] is first


@pytest.mark.parametrize(
    "path", quick(share(CASES, 3, 4), THREE_CONFIGS), ids=lambda path: path.stem
)
def test_chunks_are_traced_alike_without_a_first_that_need_not_be_recorded(path: Path) -> None:
    workload, device = Workload(prompt_tokens=700, prefill_step=128), working_set_device(10**12)
    of_whole = TracedModel(config(path), "metal").record(workload, METAL)[0]
    built = TracedModel(config(path), "metal")
    late, _ = built.record(workload, METAL, phases={"full_chunk", "last_chunk"})
    chunks = [call for call in of_whole.calls if call.phase in ("full_chunk", "last_chunk")]
    assert list(late.calls[-2:]) == chunks
    whole = TracedModel(config(path), "metal").record(
        workload, METAL, phases={"first_chunk", "full_chunk", "last_chunk"}
    )
    assert peak(late, device).calls[-2:] == peak(whole[0], device).calls[-2:]


@pytest.mark.parametrize(("name", "recorded"), [("llama", 1), ("qwen3_next", 2)])
def test_a_first_chunk_is_recorded_where_the_next_takes_on_states(name: str, recorded: int) -> None:
    case = config(next(path for path in CASES if path.stem == name))
    workload = Workload(prompt_tokens=700, prefill_step=128)
    trace, _ = TracedModel(case, "metal").record(workload, METAL, phases={"last_chunk"})
    assert len(trace.calls) == recorded


@pytest.mark.parametrize("name", ["rwkv7", "mamba", "jamba", "recurrent_gemma"])
def test_a_loop_over_tokens_is_detected_and_then_recorded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = config(next(path for path in CASES if path.stem == name))
    target = TraceTarget(backend="cpu")
    whole = record(case, SHORT, target=target)
    monkeypatch.setattr(loop_guard, "MAX_SLICES", 20)
    assert record(case, SHORT, target=target) == whole
