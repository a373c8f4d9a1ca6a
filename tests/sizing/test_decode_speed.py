"""The bound of decode speed: above every published run, and never above the bytes a step reads."""

from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.decode_speed import runs
from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.devices import find_device, list_devices, memory_device
from memfit.estimators.runtimes.registry import get_runtime
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.decode_speed import decode_speed, weight_bytes_read
from memfit.estimators.sizing.sized_model import SizedModel, with_runtime

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_configs"
PUBLISHED = ROOT.parent / "shared" / "published"
CATALOG = Catalog()


def sized(sample: str, bits: int | None = None, device: str = "m5-max-128") -> SizedModel:
    quantize = Quantization(bits, 64) if bits else None
    path = str(SAMPLES / f"{sample}.yaml")
    return CATALOG.sized(path, quantize=quantize, device=find_device(device))


# Tokens a second of mlx_lm on an M5 Max with 128 GB, published by the ax-engine project.
@pytest.mark.parametrize(
    ("sample", "bits", "prompt", "measured"),
    [
        ("qwen3-4b-4bit", None, 4096, 152.1),
        ("gemma-4-26b-a4b", 4, 128, 127.6),
        ("gemma-4-26b-a4b", 6, 2048, 96.8),
        ("qwen3.5-35b-a3b", 8, 128, 105.1),
        ("qwen3-next-80b-a3b-4bit", None, 128, 100.9),
    ],
)
def test_published_runs_stay_below_the_bound(
    sample: str, bits: int | None, prompt: int, measured: float
) -> None:
    model = sized(sample, bits)
    speed = decode_speed(model, Workload(prompt_tokens=prompt))
    assert speed
    assert measured < speed.most_tokens_per_second < 4 * measured


# mlx-lm's BENCHMARKS.md, 2,048 tokens on an M4 Max: from these the constants were read.
FITTED: list[tuple[str, str, int | None, float]] = [
    ("m4-max-64", "qwen3-4b-4bit", 8, 86.907),
    ("m4-max-64", "qwen3-4b-4bit", 4, 134.52),
    *(
        ("m4-max-64", "qwen3-30b-a3b-4bit", bits, speed)
        for bits, speed in ((8, 83.16), (4, 113.33))
    ),
]
# Not from these: mlx-lm pull request 1569, and Rapid-MLX's submissions of an M3 Ultra with 60 cores
# of June 2026, a server on mlx-lm's classes: prompts of 512 tokens.
OTHERS: list[tuple[str, str, int | None, float]] = [
    ("m3-pro-18", "qwen3-4b-4bit", 4, 44.62),
    ("m3-ultra-256", "qwen3-0.6b", 4, 387.64),
    ("m3-ultra-256", "qwen3-8b-4bit", None, 112.89),
    ("m3-ultra-256", "llama-3.1-8b", 4, 119.39),
    ("m3-ultra-256", "phi-4-mini", 4, 167.38),
    ("m3-ultra-256", "gemma-3-27b", 4, 35.19),
]


@pytest.mark.parametrize(("device", "sample", "bits", "measured"), FITTED + OTHERS)
def test_what_to_expect_is_near_published_runs(
    device: str, sample: str, bits: int | None, measured: float
) -> None:
    prompt = 512 if "ultra" in device else 2048
    speed = decode_speed(sized(sample, bits, device), Workload(prompt_tokens=prompt))
    assert speed
    assert speed.expected_tokens_per_second
    least, expected, most = speed.expected_tokens_per_second
    assert speed.range_tokens_per_second == (least, most)
    assert least <= measured <= most <= speed.most_tokens_per_second
    close = 0.03 if (device, sample, bits, measured) in FITTED else 0.15
    assert abs(expected / measured - 1) <= close, expected / measured


def test_every_mac_of_the_tables_says_what_to_expect() -> None:
    for device in list_devices():
        speed = decode_speed(sized("qwen3-4b-4bit", device=device.name), Workload(prompt_tokens=64))
        assert bool(speed and speed.expected_tokens_per_second) == (device.backend == "metal")
    batch = decode_speed(sized("qwen3-4b-4bit"), Workload(prompt_tokens=64, batch=4))
    assert batch
    # How many experts and kernels a batch takes is not described.
    assert (batch.expected_tokens_per_second, batch.range_tokens_per_second) == (None, None)


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the published measurements are not here")
def test_no_published_run_exceeds_the_bound_and_most_are_near_what_to_expect() -> None:
    """Of an M5 Max: no constant is from these."""
    found = list(runs(PUBLISHED))
    assert len(found) == 72
    assert all(run.share < 1 for run in found)
    errors = sorted(abs(run.error) for run in found)
    assert median(errors) <= 0.10
    assert errors[len(errors) * 9 // 10] <= 0.20


def test_a_dense_model_reads_all_but_its_embedding() -> None:
    footprint = sized("llama-3.1-8b").footprint
    read = weight_bytes_read(footprint, sized("llama-3.1-8b").model)
    assert read == footprint.nbytes - footprint.by_part["embedding"]


def test_a_tied_head_reads_the_embedding() -> None:
    model = sized("qwen3-0.6b")
    assert weight_bytes_read(model.footprint, model.model) == model.footprint.nbytes


def test_a_head_does_not_read_tables_of_other_inputs() -> None:
    model = sized("gemma-3n-e4b")  # 262,144 x 2,048 of the head, 262,144 x 35 x 256 of the layers
    head, layers = 2048, 35 * 256
    read = weight_bytes_read(model.footprint, model.model)
    without = sum(size for part, size in model.footprint.by_part.items() if part != "embedding")
    embedding = model.footprint.by_part["embedding"]
    assert read <= without + embedding * head // (head + layers)


def test_a_mixture_reads_the_chosen_experts() -> None:
    model = sized("qwen3-30b-a3b-4bit")  # 8 of 128 experts
    parts = model.footprint.by_part
    rest = sum(size for part, size in parts.items() if part not in ("experts", "embedding"))
    read = weight_bytes_read(model.footprint, model.model)
    assert read == rest + parts["experts"] * 8 // 128


@pytest.mark.exhaustive
@given(
    st.sampled_from(["qwen3-4b-4bit", "qwen3.5-35b-a3b", "gemma-3-27b", "deepseek-v2-lite"]),
    st.integers(1, 100_000),
    st.integers(0, 2000),
    st.integers(1, 8),
)
def test_a_step_reads_no_more_than_what_is_resident(
    sample: str, prompt: int, generated: int, batch: int
) -> None:
    model = sized(sample)
    workload = Workload(prompt_tokens=prompt, max_tokens=generated, batch=batch)
    speed, figures = decode_speed(model, workload), model.figures_for(workload)
    assert speed
    most = model.resident_bytes + figures.kv.nbytes + figures.ssm_bytes
    assert 0 < speed.bytes_per_step <= most
    bound = batch * speed.bandwidth_bytes_per_second / speed.bytes_per_step
    assert bound <= speed.most_tokens_per_second <= bound + 0.1
    longer = Workload(prompt_tokens=prompt + generated, batch=batch)
    later = decode_speed(model, longer)
    assert later
    assert later.bytes_per_step >= speed.bytes_per_step


def test_without_a_chip_or_a_measured_runtime_nothing_is_made_up() -> None:
    mac = sized("qwen3-0.6b").on(memory_device(32 * 10**9))
    assert decode_speed(mac, Workload(prompt_tokens=9)) is None
    vllm = with_runtime(sized("qwen3-0.6b", device="rtx-4090"), get_runtime("vllm"))
    speed = decode_speed(vllm, Workload(prompt_tokens=9))
    assert speed
    assert speed.expected_tokens_per_second is None


def test_every_machine_of_the_tables_has_a_bandwidth() -> None:
    assert all(device.bandwidth_bytes for device in list_devices())
    # Apple, technical specifications: 68.25, 819 and 546 GB/s; NVIDIA's data sheet: 1,008 GB/s.
    rounded = {"m1-8": 68, "m3-ultra-512": 819, "m4-max-128": 546, "rtx-4090": 1008}
    for name, gigabytes in rounded.items():
        assert (find_device(name).bandwidth_bytes or 0) // 10**9 == gigabytes
