"""agent-memory's chunks, and the two peaks that it publishes."""

from pathlib import Path

import pytest

from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.machine.devices import find_device
from memfit.estimators.results.terms import PeakMoment
from memfit.estimators.runtimes.agent_memory import AGENT_MEMORY
from memfit.estimators.sizing.opening import size
from memfit.estimators.sizing.sized_model import with_runtime
from memfit.estimators.workspace.peak import ERROR_PERCENT

SAMPLES = Path(__file__).parents[2] / "sample_configs"
# As its entrypoints/api_server.py prints them: "peak_memory_mb" is mx.get_peak_memory() / 1024**2.
# config/models/deepseek-coder-v2-lite-4bit.toml, experiment G with max_agents=1, and
# application/adaptive_config.py, DEFAULT_MEMORY_PRESSURE_MB; the Mac is not named.
PUBLISHED = {1000: 9197 << 20, 16000: 10202 << 20}


def moment(tokens: int, step: int = AGENT_MEMORY.prefill_step) -> PeakMoment:
    """Return the largest moment of DeepSeek-V2-Lite in 4 bits."""
    sized = with_runtime(
        size(
            open_checkpoint(str(SAMPLES / "deepseek-v2-lite.yaml")),
            device=find_device("m4-max-64"),
            quantize=Quantization(4, 64),
        ),
        AGENT_MEMORY,
    )
    return sized.figures_for(
        Workload(prompt_tokens=tokens, prefill_step=step, kv_bits=4, quantized_kv_start=0)
    ).moment


@pytest.mark.parametrize("target", PUBLISHED)
def test_published_peaks_are_in_the_range_of_their_prompts(target: int) -> None:
    # benchmarks/openai_benchmark.py takes 4 characters of English prose for a token; it is up to 6.
    fewest, most = moment(target * 4 // 6), moment(target)
    assert fewest.nbytes - fewest.workspace_bytes * ERROR_PERCENT // 100 <= PUBLISHED[target]
    assert PUBLISHED[target] <= most.nbytes + most.workspace_bytes * ERROR_PERCENT // 100
    # Between the two it is near the middle, whatever the prompt was.
    assert (fewest.nbytes + most.nbytes) / 2 == pytest.approx(PUBLISHED[target], rel=0.02)


def test_large_first_chunks_do_not_meet_the_cache_of_a_long_prompt() -> None:
    # 2,048 tokens at once are done before 14,000 more are in the cache.
    long = moment(16000)
    assert long == moment(16000, step=1024)
    assert long.workspace_bytes < moment(2049).workspace_bytes
