"""A batch of mlx-lm's generator by formula, compared with the trace by the CPU's rules."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="the classes that are traced are mlx-lm's")

from memfit.estimators.arch.registry import build_model
from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.call_plan import PREFILL
from memfit.estimators.mlx.versions import MlxVersions
from memfit.estimators.trace.kernel_stubs import TraceTarget
from memfit.estimators.trace.peak import peak as traced_peak
from memfit.estimators.trace.traced_model import TracedModel
from memfit.estimators.weights.derived import QuantizationPlan
from memfit.estimators.workspace.moments import RunMoments
from memfit.estimators.workspace.peak import peak
from memfit.estimators.workspace.prepared import prepare
from tests.mlx_memory import settled_bytes
from tests.oracle import Oracle
from tests.selection import quick

HOST = Device("this host", "cpu", 0, 0, None, "flag")
CASES = Path(__file__).parents[1] / "arch" / "cases"
PACKED = Quantization(4, 32)


@pytest.mark.parametrize(
    ("name", "batch"),
    # Norms of queries and keys; a state that the first token does not need yet.
    [("qwen3", 4), ("mamba2", 2)],
)
def test_both_phases_of_a_batch_are_near_the_trace(name: str, batch: int) -> None:
    config: dict[str, Any] = json.loads((CASES / f"{name}.json").read_text())
    workload = Workload(prompt_tokens=300, max_tokens=6, prefill_step=128, batch=batch)
    trace, shapes = TracedModel(config, "cpu", quantize=PACKED).record(
        workload, TraceTarget(backend="cpu")
    )
    traced = traced_peak(trace, HOST)
    derived = peak(
        build_model(config, "config.json"),
        workload,
        resident_bytes=shapes.weight_bytes,
        plan=QuantizationPlan(PACKED, converting=True),
        device=HOST,
    )
    weights = shapes.weight_bytes
    decoding = max(nbytes for part, nbytes in traced.parts.items() if part not in PREFILL)
    prefilling = max(nbytes for part, nbytes in traced.parts.items() if part in PREFILL)
    pairs = ((prefilling, derived.prefill_bytes), (decoding, derived.decode_bytes))
    for by_trace, by_formula in pairs:
        assert by_formula is not None
        by_trace, by_formula = by_trace - weights, by_formula - weights
        assert 0.97 * by_trace <= by_formula <= 1.1 * by_trace


@pytest.mark.parametrize(
    "name",
    quick(["gemma3_text", "gpt_oss", "olmo3", "cohere2", "qwen3"], ("gemma3_text", "qwen3")),
)
@pytest.mark.parametrize("window", [24, 512])
def test_masks_of_a_batch_are_as_many_as_its_class_makes(
    name: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlx.core as mx
    from mlx_lm.models import cache as caches

    made: list[Any] = []
    for kind in (caches.BatchKVCache, caches.BatchRotatingKVCache):
        monkeypatch.setattr(kind, "make_mask", _recorded(kind.make_mask, made))
    config: dict[str, Any] = json.loads((CASES / f"{name}.json").read_text())
    config |= {"sliding_window": window} if "sliding_window" in config else {}
    batch, tokens = 2, 200
    own = Oracle(config)
    batched = [
        caches.BatchRotatingKVCache(each.max_size, [0] * batch)
        if isinstance(each, caches.RotatingKVCache)
        else caches.BatchKVCache([0] * batch)
        for each in caches.make_prompt_cache(own.model)
    ]
    own.model(mx.zeros((batch, tokens), mx.int32), cache=batched)
    before = settled_bytes()
    mx.eval(made)
    measured = settled_bytes() - before
    workload = Workload(prompt_tokens=tokens + 1, max_tokens=0, batch=batch)
    moments = RunMoments(
        prepare(build_model(config, "config.json"), HOST, versions=MlxVersions()), workload, 0
    )
    chunk = next(moments.prefill())
    inputs = re.search(r"input and masks ([\d,]+)", chunk.explanation)
    assert inputs is not None
    hidden = batch * tokens * config["hidden_size"] * 2
    # What is evaluated frees scalars.
    assert int(inputs[1].replace(",", "")) - hidden == pytest.approx(measured, abs=16)


def _recorded(make_mask: Callable[..., Any], made: list[Any]) -> Callable[..., Any]:
    def record(*arguments: Any, **options: Any) -> Any:
        made.append(make_mask(*arguments, **options))
        return made[-1]

    return record
