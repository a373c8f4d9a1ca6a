"""A prompt whose beginning is in a stored cache: mlx-lm's own runs, and what the library says."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

import memfit
from memfit.estimators.arch.registry import build_model
from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.weights.derived import derive
from memfit.estimators.workspace.peak import ERROR_PERCENT, peak
from tests.selection import quick

CASES = Path(__file__).parents[1] / "arch" / "cases"
HOST = Device("this host", "cpu", 0, 0, None, "flag")
PROMPTS = [
    Workload(prompt_tokens=557, cached_tokens=300, prefill_step=128, max_tokens=2),
    # One chunk, shorter than the room that the buffers get for it.
    Workload(prompt_tokens=640, cached_tokens=600, prefill_step=512, max_tokens=2),
    # A window that is full before the first chunk, and a boundary that no step has.
    Workload(prompt_tokens=1300, cached_tokens=1000, prefill_step=128, max_tokens=2),
]


@pytest.mark.parametrize("workload", PROMPTS, ids=lambda each: str(each.cached_tokens))
@pytest.mark.parametrize(
    "case", quick(["llama", "qwen3", "gemma3_text", "lfm2", "falcon_h1"], ("gemma3_text",))
)
def test_mlx_lm_takes_the_stored_cache_again(case: str, workload: Workload) -> None:
    pytest.importorskip("mlx_lm", reason="the truth is MLX itself")
    import mlx.core as mx

    if mx.metal.is_available() or mx.default_device() == mx.gpu:
        pytest.skip("the cases are of the CPU backend")
    config = json.loads((CASES / f"{case}.json").read_text())
    measured, stored, kept = _measured(config, workload)
    model = build_model(config, case)
    weights = derive(model, None).loaded_bytes
    found = peak(model, workload, resident_bytes=weights, plan=None, device=HOST)
    # A stored window may hold a chunk more than the one here.
    stored_by_formula = found.nbytes - weights - found.workspace_bytes - kept
    workspace = measured - stored - kept
    assert stored_by_formula >= stored
    assert abs(found.workspace_bytes - workspace) * 100 < ERROR_PERCENT * workspace


def _measured(config: dict[str, Any], workload: Workload) -> tuple[int, int, int]:
    """Return bytes above the weights: the peak, those of the stored cache, and of the run's own."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    from tests.oracle import Oracle, cache_bytes

    model = Oracle(config).model
    mx.eval(model.parameters())
    entry = _stored(model, workload)
    stored, peaks, kept = sum(cache_bytes(entry)), [], 0
    new = workload.prompt_tokens - workload.cached_tokens
    # With other processes running, buffers are released sooner: the largest of three.
    for _ in range(3):
        caches, prompt = copy.deepcopy(entry), mx.arange(new) % 17
        mx.eval(prompt)
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory() - stored
        for _ in generate_step(
            prompt,
            model,
            max_tokens=workload.max_tokens,
            prompt_cache=caches,
            prefill_step_size=workload.prefill_step,
        ):
            pass
        peaks.append(mx.get_peak_memory() - before)
        kept = sum(cache_bytes(caches))
        del caches
    return max(peaks), stored, kept


def _stored(model: Any, workload: Workload) -> list[Any]:
    """Return caches as mlx-lm's batch generator gives those of a row to its server."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.cache import make_prompt_cache

    caches = make_prompt_cache(model)
    chunks = Workload(
        prompt_tokens=workload.cached_tokens + 1, prefill_step=workload.prefill_step
    ).prefill_chunks()
    for tokens in chunks:
        model(mx.zeros((1, tokens), mx.int32), cache=caches)
        mx.eval([cache.state for cache in caches])
    result = [type(cache).merge([cache]).extract(0) for cache in caches]
    arrays = [array for cache in result for _, array in tree_flatten(cache.state)]
    mx.eval([array for array in arrays if isinstance(array, mx.array)])
    mx.synchronize()
    return result


def test_a_prompt_without_new_tokens_is_refused() -> None:
    with pytest.raises(InputError, match="fewer than the 4096 tokens of the prompt"):
        Workload(prompt_tokens=4096, cached_tokens=4096)


def test_the_stored_cache_is_counted_beside_the_one_of_the_run() -> None:
    model = memfit.open("qwen3-4b-4bit").on("m4-max-64")
    whole = model.at(prompt_tokens="20k")
    cached = model.at(prompt_tokens="20k", cached_tokens="18k")
    stored = 18 * 1024 * whole.components.kv.bytes_per_token
    assert cached.components.kv.bytes - stored >= 20 * 1024 * whole.components.kv.bytes_per_token
    assert cached.peak_bytes >= whole.components.weights.resident_bytes + cached.components.kv.bytes
    # A step reads the caches of the run alone.
    assert cached.decode_speed == whole.decode_speed


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"runtime": "llama.cpp"}, "llama.cpp: prompts with a stored cache"),
        ({"method": "trace"}, "traced and measured figures are of whole prompts"),
        ({"batch": 16}, "prefilled in groups"),
    ],
)
def test_what_is_not_described_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        memfit.estimate(
            "qwen3-4b-4bit", memory="32GB", context="20k", cached_tokens="18k", **settings
        )
