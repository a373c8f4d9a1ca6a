"""What states keep alive beyond their own bytes, compared with memory measured in small models."""

import json
from pathlib import Path

import pytest

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.registry import build_model
from memfit.estimators.mlx.kv_cache import view_elements

pytest.importorskip("mlx_lm", reason="the models that run are mlx-lm's")
import mlx.core as mx

from tests.mlx_memory import settled_bytes
from tests.oracle import Oracle

CASES = Path(__file__).parent / "cases"
CHUNK = 192
# Scalars and the arrays' last token; a Mac's allocator rounds arrays up to 16 KiB.
SLACK = 32768


@pytest.mark.parametrize("case", ["jamba_dense", "mamba2", "lfm2", "qwen3_5"])
def test_states_keep_the_arrays_they_are_slices_of_alive(case: str) -> None:
    config = json.loads((CASES / f"{case}.json").read_text()) | {"dtype": "float32"}
    model = build_model(config, "config.json")
    oracle = Oracle(config, "F32")
    caches = _made_caches(oracle)
    weights = settled_bytes()
    _call(oracle, caches, CHUNK)
    kept = mx.get_active_memory() - weights - _nbytes(caches)
    assert kept == pytest.approx(held(model, decoding=False), abs=SLACK)
    _call(oracle, caches, 1)
    kept = mx.get_active_memory() - weights - _nbytes(caches)
    assert kept == pytest.approx(held(model, decoding=True), abs=SLACK)


def held(model: Model, *, decoding: bool) -> int:
    """Return the float32 bytes of a chunk that its states keep alive."""
    return 4 * CHUNK * view_elements(model.states(), decoding=decoding)


def _made_caches(oracle: Oracle) -> list[object]:
    from mlx_lm.models.cache import make_prompt_cache

    mx.eval(oracle.model.parameters())
    caches: list[object] = make_prompt_cache(oracle.model)
    return caches


def _call(oracle: Oracle, caches: list[object], tokens: int) -> None:
    oracle.model(mx.zeros((1, tokens), mx.int32), cache=caches)
    mx.eval([cache.state for cache in caches])  # type: ignore[attr-defined]
    mx.synchronize()
    mx.clear_cache()


def _nbytes(caches: list[object]) -> int:
    return sum(cache.nbytes for cache in caches)  # type: ignore[attr-defined]
