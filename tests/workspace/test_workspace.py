"""The transient memory of a run, compared with published peaks and with MLX itself."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit.estimators.arch.registry import build_model
from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.devices import find_device
from memfit.estimators.mlx.kv_cache import kv_cache
from memfit.estimators.mlx.scheduler import BatchLimits
from memfit.estimators.mlx.versions import MlxVersions
from memfit.estimators.results.terms import PeakMoment
from memfit.estimators.weights.derived import QuantizationPlan, derive
from memfit.estimators.workspace.peak import ERROR_PERCENT, peak
from memfit.estimators.workspace.tape import Step, Tape, transient_peak
from tests.models import QWEN3_NEXT_80B, published_config
from tests.selection import quick

M4_MAX = Device("M4 Max", "metal", 64 << 30, 48 << 30, None, "flag", "s", 16)
HOST = Device("this host", "cpu", 0, 0, None, "flag")
# mlx_lm.benchmark -p 2048 -g 128
BENCHMARK = Workload(prompt_tokens=2048, max_tokens=128)

# Of Qwen/Qwen3-4B-Instruct-2507 and Qwen/Qwen3-30B-A3B-Instruct-2507, but for their rotary base.
QWEN3_4B_2507, QWEN3_30B_A3B = map(published_config, ("qwen3-4b", "qwen3-30b-a3b"))
# Peaks in MB, mlx-lm BENCHMARKS.md, M4 Max 64 GB.
PUBLISHED_WITH = MlxVersions(mlx=(0, 29, 2), mlx_lm=(0, 28, 2))
PUBLISHED: list[tuple[dict[str, Any], Quantization | None, int]] = [
    (QWEN3_4B_2507, None, 9020),
    (QWEN3_4B_2507, Quantization(8, 64), 5254),
    (QWEN3_4B_2507, Quantization(6, 64), 4250),
    (QWEN3_4B_2507, Quantization(5, 32), 4000),
    (QWEN3_4B_2507, Quantization(5, 64), 3860),
    (QWEN3_4B_2507, Quantization(4, 32), 3603),
    (QWEN3_4B_2507, Quantization(4, 64), 3350),
    (QWEN3_30B_A3B, Quantization(8, 64), 33460),
    (QWEN3_30B_A3B, Quantization(6, 64), 25820),
    (QWEN3_30B_A3B, Quantization(5, 64), 22010),
    (QWEN3_30B_A3B, Quantization(4, 64), 18200),
]


def moment(
    config: dict[str, Any],
    workload: Workload,
    *,
    quantization: Quantization | None = None,
    device: Device = M4_MAX,
    versions: MlxVersions = MlxVersions(),  # noqa: B008 - a tuple
) -> tuple[PeakMoment, int]:
    """The peak and the bytes of the weights."""
    model = build_model(config, "config.json")
    plan = QuantizationPlan(quantization, converting=True) if quantization else None
    weights = derive(model, plan).loaded_bytes
    found = peak(
        model, workload, resident_bytes=weights, plan=plan, device=device, versions=versions
    )
    return found, weights


# mlx pull request 3077: mlx_lm.benchmark -p 1024 -g 128, in bf16; peaks in MB.
@pytest.mark.parametrize(
    ("config", "gpu", "megabytes", "over"),
    [
        (QWEN3_4B_2507, "h100-80", 10_007, 1.18),
        (QWEN3_4B_2507, "b200", 9_787, 1.2),
        # More than ten graphs: MLX waits, and both GPUs had the same peak. Without cuBLAS's part.
        (QWEN3_30B_A3B, "h100-80", 64_219, 1.00001),
        (QWEN3_30B_A3B, "b200", 64_219, 1.00001),
    ],
)
def test_published_peaks_on_cuda_are_below_the_bound(
    config: dict[str, Any], gpu: str, megabytes: int, over: float
) -> None:
    workload = Workload(prompt_tokens=1024, max_tokens=128)
    versions = MlxVersions(mlx=(0, 31, 0))
    bound, _ = moment(config, workload, device=find_device(gpu), versions=versions)
    assert 1 <= bound.nbytes / (megabytes * 10**6) < over


@pytest.mark.parametrize(("config", "quantization", "megabytes"), PUBLISHED)
def test_published_peaks_are_reproduced(
    config: dict[str, Any], quantization: Quantization | None, megabytes: int
) -> None:
    found, weights = moment(config, BENCHMARK, quantization=quantization, versions=PUBLISHED_WITH)
    published = megabytes * 10**6
    kept = weights + kv_cache(build_model(config, "config.json"), BENCHMARK).nbytes
    assert abs(found.nbytes - published) * 1000 < 6 * published
    assert abs(found.workspace_bytes - (published - kept)) * 100 < 4 * (published - kept)
    assert found.phase == "prefill"


def test_larger_weights_leave_less_work_in_flight() -> None:
    plain, _ = moment(QWEN3_4B_2507, BENCHMARK)
    packed, _ = moment(QWEN3_4B_2507, BENCHMARK, quantization=Quantization(4, 64))
    assert plain.workspace_bytes < packed.workspace_bytes


def test_unfused_scores_are_heads_by_chunk_by_all_keys() -> None:
    # 16 heads of width 256, which Metal does not fuse: B*H*L*T at 16 bits, one short of 32768.
    prompt = Workload(prompt_tokens=32768)
    found, _ = moment(QWEN3_NEXT_80B, prompt, quantization=Quantization(4, 64))
    assert found.largest_buffer == "attention scores"
    assert found.largest_buffer_bytes == 16 * 2047 * 32767 * 2


def test_fused_attention_stores_no_scores() -> None:
    short, _ = moment(QWEN3_4B_2507, Workload(prompt_tokens=4097))
    long, _ = moment(QWEN3_4B_2507, Workload(prompt_tokens=8193))
    assert long.largest_buffer != "attention scores"
    assert long.workspace_bytes < 2 * short.workspace_bytes


def test_quantised_keys_need_the_scores_again() -> None:
    prompt = Workload(prompt_tokens=16385)
    plain, _ = moment(QWEN3_4B_2507, prompt)
    packed, _ = moment(QWEN3_4B_2507, replace(prompt, kv_bits=8))
    assert packed.workspace_bytes - plain.workspace_bytes > 32 * 2048 * 16384 * 2


def test_old_and_quantised_caches_are_alive_together_at_the_switch() -> None:
    prompt = Workload(prompt_tokens=4096, max_tokens=2000, prefill_step=128, kv_bits=8)
    found, weights = moment(QWEN3_4B_2507, replace(prompt, quantized_kv_start=6000))
    tokens = 6144
    before = tokens * 147456
    assert (found.phase, found.nbytes) == ("decode", weights + before + before * 17 // 32)


def test_the_switch_comes_after_the_chunk_that_reaches_its_start() -> None:
    # Chunks of 128 keep the workspace below the two caches.
    prompt = Workload(prompt_tokens=9000, prefill_step=128, kv_bits=8, quantized_kv_start=8100)
    found, weights = moment(QWEN3_4B_2507, prompt)
    # The chunk ends at 8192, where the plain buffers have that many tokens.
    before = 8192 * 147456
    assert (found.phase, found.nbytes) == ("prefill", weights + before + before * 17 // 32)


def test_a_decode_step_that_grows_the_cache_needs_old_and_new() -> None:
    model = build_model(QWEN3_4B_2507, "config.json")
    short = Workload(prompt_tokens=8192, max_tokens=0, prefill_step=32)
    inside, grown = (
        peak(model, workload, resident_bytes=0, plan=None, device=M4_MAX)
        for workload in (short, replace(short, max_tokens=1))
    )
    layer = 8192 * 147456 // 36
    assert inside.decode_bytes is not None
    assert grown.decode_bytes is not None
    assert grown.decode_bytes - inside.decode_bytes > 2 * layer


def test_a_chunk_before_the_last_can_be_the_one_that_grows_the_cache() -> None:
    # Of chunks of 128 every second one grows it; the last token of 4,098 finds room.
    found = [
        moment(QWEN3_4B_2507, Workload(prompt_tokens=tokens, prefill_step=128))[0].prefill_bytes
        for tokens in (3969, 4097, 4098)
    ]
    assert len(set(found)) == 1


def test_a_step_finds_the_log_probabilities_of_two_earlier_tokens_held() -> None:
    # The prompt is so long that no step grows the cache.
    decode = [
        moment(QWEN3_4B_2507, Workload(prompt_tokens=300, max_tokens=tokens))[0].decode_bytes or 0
        for tokens in (0, 1, 2, 3)
    ]
    row = 151936 * 2  # its vocabulary, at 16 bits
    assert [after - before for before, after in pairwise(decode)] == [row, row, 0]


def test_loading_is_the_peak_only_when_nothing_else_is_alive() -> None:
    found, weights = moment(QWEN3_4B_2507, Workload(prompt_tokens=1))
    assert found.phase == "decode"
    assert found.nbytes > weights
    assert found.largest_buffer == "weight"


def test_the_explanation_adds_up() -> None:
    found, _ = moment(QWEN3_4B_2507, BENCHMARK)
    (line,) = found.explanation
    parts, total = line.split(" = ", 1)[1].rsplit(" = ", 1)
    numbers = [int(part.rsplit(" ", 1)[1].replace(",", "")) for part in parts.split(" + ")]
    assert sum(numbers) == int(total.replace(",", "")) == found.nbytes


CASES = ["llama", "qwen3", "gemma2", "deepseek_v3", "qwen3_moe", "lfm2"]
HYBRIDS = ["falcon_h1", "granitemoehybrid", "nemotron_h"]


@pytest.mark.parametrize("case", quick(CASES + HYBRIDS, ("falcon_h1",)))
def test_the_cpu_backend_measures_the_predicted_workspace(case: str) -> None:
    pytest.importorskip("mlx_lm", reason="the truth is MLX itself")
    import mlx.core as mx

    if mx.metal.is_available() or mx.default_device() == mx.gpu:
        pytest.skip("the cases are of the CPU backend")
    from benchmarks.workspace_accuracy import CASES, measure, predict

    path = CASES / f"{case}.json"
    workload = Workload(prompt_tokens=257, max_tokens=1, prefill_step=128)
    # With other processes running, buffers are released sooner: the largest of three.
    measured = max(measure(path, workload, quantized=True) for _ in range(3))
    predicted = predict(path, workload, quantized=True)
    assert abs(predicted - measured) * 100 < ERROR_PERCENT * measured


STEPS = st.builds(
    Step,
    allocated=st.integers(0, 1000),
    released=st.just(0),
    dispatches=st.integers(0, 3),
    elements=st.integers(0, 1 << 21),
    repeated=st.just(()),
)


@given(st.lists(STEPS, max_size=60))
def test_arrays_never_released_add_up(steps: list[Step]) -> None:
    rule = BatchLimits(3, 3, 2)
    assert transient_peak([tuple(steps)], rule) == sum(step.allocated for step in steps)


def test_a_buffer_is_free_once_its_batch_and_ten_more_are_closed() -> None:
    # One batch per step: at the last of twelve, the first has run.
    steps = [Step(1, 1, 1, 0, ())] * 12
    assert transient_peak([tuple(steps)], BatchLimits(0, 50, 10)) == 11


def test_many_touched_elements_close_a_batch() -> None:
    small = [Step(1, 1, 1, 1 << 20, ())] * 40
    assert transient_peak([tuple(small)], BatchLimits(50, 1, 2)) == 6
    assert transient_peak([tuple(small)], BatchLimits(50, 3, 2)) == 12


_STEPS = st.builds(
    Step,
    *(st.integers(0, 50), st.integers(0, 50), st.integers(1, 3), st.integers(0, 3 << 20)),
    st.just(((1 << 20, 2),)),
    st.just(2),
)


@given(
    st.lists(st.lists(_STEPS, min_size=1, max_size=4), min_size=2, max_size=3),
    st.lists(st.integers(0, 2), min_size=6, max_size=12),
    st.builds(BatchLimits, st.integers(0, 2), st.integers(0, 9), st.integers(0, 4)),
)
def test_a_layer_that_begins_as_before_ends_as_before(
    loops: list[list[Step]], order: list[int], limits: BatchLimits
) -> None:
    layers = [tuple(steps * 100) for steps in loops]
    run = [layers[number % len(layers)] for number in order]
    # Layers that are equal, but not the same, are all followed.
    followed = [tuple(list(steps)) for steps in run]
    assert transient_peak(run, limits) == transient_peak(followed, limits)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 100), st.booleans()), max_size=30))
def test_every_array_is_released_exactly_once(moves: list[tuple[int, int, bool]]) -> None:
    tape = Tape("metal", 2, 10)
    arrays = [0]
    for source, elements, writes_over in moves:
        x = arrays[source % len(arrays)]
        arrays.append(tape.inplace(x) if writes_over else tape.allocate((x,), elements))
    tape.retain(arrays[-1])
    steps = tape.program().steps
    allocated = sum(step.allocated for step in steps)
    released = sum(step.released for step in steps)
    input_bytes = tape.nbytes[0] if moves else 0
    kept = tape.nbytes[arrays[-1]] if moves else 0
    assert input_bytes + allocated == released + kept
