"""Nineteen runs of a real mlx_lm.server, replayed with the arrivals that it saw."""

import json
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.base.workload import ServerSettings, Workload
from memfit.estimators.machine.host import detect_host
from memfit.estimators.mlx.arrivals import ServedRequest
from memfit.estimators.plans.server.simulation import simulated
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.server_bound import ServerBound, ServerMemory
from memfit.estimators.sizing.sized_model import SizedModel
from tests.plans.at_calls import AtCalls

RUNS = json.loads(Path(__file__).with_name("server_runs.json").read_text())["runs"]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "rms_norm_eps": 1e-5,
    "vocab_size": 320,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "max_position_embeddings": 32768,
}
WINDOWS = {"sliding_window": 256, "sliding_window_pattern": 2, "query_pre_attn_scalar": 256}
CONFIGS = {"llama": LLAMA, "gemma3": {**LLAMA, **WINDOWS, "model_type": "gemma3_text"}}


def sized(path: Path, model: str) -> SizedModel:
    (path / "config.json").write_text(json.dumps(CONFIGS[model]))
    host = detect_host(with_gpu=False)
    return Catalog().sized(str(path), device=host, method="formula", margin_bytes=0)


def settings_of(run: dict[str, Any]) -> ServerSettings:
    step, together, decode, kept = run["settings"]
    return ServerSettings(
        prefill_step=step,
        prompt_concurrency=together,
        decode_concurrency=decode,
        prompt_cache_size=kept,
    )


@pytest.mark.parametrize("run", RUNS, ids=lambda run: str(run["name"]))
def test_a_replay_is_near_the_real_peak_and_the_bound_above_it(
    tmp_path: Path, run: dict[str, Any]
) -> None:
    model, settings = sized(tmp_path, run["model"]), settings_of(run)
    requests = [
        ServedRequest(prompt, reply, *(hit or (None, 0)))
        for prompt, reply, _, *hit in run["requests"]
    ]
    calls = [each[2] for each in run["requests"]]
    replay = simulated(
        ServerMemory(model, Workload(prompt_tokens=1)), requests, settings, AtCalls(calls)
    )
    weights = model.resident_bytes
    has_hits = any(each.continues is not None for each in requests)
    error = 0.2 if has_hits else 0.1
    assert replay.largest.needed_bytes - weights == pytest.approx(run["peak_bytes"], rel=error)
    assert replay.idle_bytes - weights == pytest.approx(run["idle_bytes"], rel=0.03)
    longest = Workload(
        prompt_tokens=max(each.prompt_tokens for each in requests),
        max_tokens=max(each.max_tokens for each in requests),
    )
    bound = ServerBound(model, longest, run["clients"]).moment(settings)
    assert bound.needed_bytes - weights >= run["peak_bytes"]
    assert bound.needed_bytes >= replay.largest.needed_bytes
