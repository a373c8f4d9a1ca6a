"""The most in use while mlx-lm loads a checkpoint, compared with real loads on the CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="the loads are mlx-lm's")
import mlx.core as mx
from mlx_lm.utils import load_model

from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint, Tensor
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.scheduler import BatchLimits, ReadQueue
from memfit.estimators.runtimes.mlx_lm import MlxLm
from memfit.estimators.runtimes.source import MethodSetting
from memfit.estimators.sizing.estimate import estimate
from memfit.estimators.sizing.opening import size
from memfit.estimators.weights.loading import Conversion
from memfit.estimators.workspace.peak import load_extra
from tests.mlx_memory import settled_bytes
from tests.selection import quick
from tests.weights.hub_layout import Tensors, hub_layout
from tests.weights.loads import config_of, plain, save

HOST = Device("this host", "cpu", 2**40, 2**40, None, "flag")
MAX = Device("a Max", "metal", 0, 0, None, "flag", "s", 16)
GROUP = 128
METHODS: tuple[MethodSetting, ...] = ("formula", "trace")
DTYPES = {
    **{mx.bfloat16: "BF16", mx.float16: "F16", mx.float32: "F32"},
    **{mx.uint8: "F8_E4M3", mx.int32: "I32"},
}


def published(case: str, **changes: Any) -> tuple[dict[str, Any], Tensors]:
    config = config_of(case, **changes)
    return config, hub_layout(plain(config), config)


def mixtral(layers: int) -> tuple[dict[str, Any], Tensors]:
    """Experts as separate tensors, which mlx-lm stacks."""
    widths = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
    return published("mixtral", num_hidden_layers=layers, **widths)


def many_experts() -> tuple[dict[str, Any], Tensors]:
    widths = {"hidden_size": 512, "moe_intermediate_size": 256}
    return published("qwen3_moe", num_experts=128, num_hidden_layers=4, **widths)


def awq(hidden: int = 1024, layers: int = 4) -> tuple[dict[str, Any], Tensors]:
    heads = hidden // 128
    config, tensors = published(
        "llama",
        **{"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers},
        **{"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 128},
    )
    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP}
    packed: Tensors = {}
    for name, value in tensors.items():
        base, found, _ = name.partition("_proj.weight")
        if found:
            outputs, inputs = value.shape
            packed[f"{base}_proj.qweight"] = mx.zeros((inputs, outputs // 8), mx.int32)
            packed[f"{base}_proj.qzeros"] = mx.zeros((inputs // GROUP, outputs // 8), mx.int32)
            packed[f"{base}_proj.scales"] = mx.ones((inputs // GROUP, outputs), mx.float16)
        else:
            packed[name] = value.astype(mx.float16)
    return config | {"quantization_config": settings}, packed


def fp8() -> tuple[dict[str, Any], Tensors]:
    config, tensors = published(
        "deepseek_v3",
        **{"hidden_size": 512, "moe_intermediate_size": 512, "intermediate_size": 1024},
        **{"n_routed_experts": 16, "kv_lora_rank": 128, "q_lora_rank": 128},
    )
    blocks: Tensors = {}
    for name, value in tensors.items():
        blocks[name] = value
        if name.endswith(("_proj.weight", "_mqa.weight")):
            rows, columns = value.shape
            blocks[name] = mx.zeros(value.shape, mx.uint8)
            scales = mx.ones((-(-rows // 128), -(-columns // 128)), mx.float32)
            blocks[f"{name}_scale_inv"] = scales
    return config, blocks


def baichuan_m1() -> tuple[dict[str, Any], Tensors]:
    """A head that is normalised in float32; only the class describes it."""
    config = {
        **{"model_type": "baichuan_m1", "hidden_size": 256, "intermediate_size": 512},
        **{"vocab_size": 20000, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "num_swa_attention_heads": 4, "num_swa_key_value_heads": 2},
        **{"sliding_window": 64, "sliding_window_layers": [0], "conv_window": 2},
        **{"rope_theta": 1e4, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
        **{"torch_dtype": "bfloat16", "max_position_embeddings": 4096},
    }
    return config, plain(config)


def bailing_moe() -> tuple[dict[str, Any], Tensors]:
    """A head that is normalised in float32; the formula has it too."""
    widths = {"hidden_size": 512, "head_dim": 128, "moe_intermediate_size": 256}
    changes = {"vocab_size": 80000, "num_hidden_layers": 12, "use_bias": False}
    return published("bailing_moe", **widths, **changes)


CHECKPOINTS: dict[str, Callable[[], tuple[dict[str, Any], Tensors]]] = {
    "mixtral": lambda: mixtral(4),
    "mixtral-16": lambda: mixtral(16),
    "many-experts": many_experts,
    "awq": awq,
    "fp8": fp8,
    "baichuan_m1": baichuan_m1,
    "bailing_moe": bailing_moe,
}
UNDESCRIBED = ("baichuan_m1",)


def write(name: str, directory: Path) -> Path:
    config, tensors = CHECKPOINTS[name]()
    floating = {n: "F8_E4M3" for n, value in tensors.items() if value.dtype == mx.uint8}
    return save(directory, config, tensors, floating)


def predicted(directory: Path, method: MethodSetting, device: Device = HOST) -> int:
    return load_of(open_checkpoint(str(directory)), method, device)


def load_of(checkpoint: Checkpoint, method: MethodSetting, device: Device) -> int:
    runtime_model = size(checkpoint, device=device, method=method).runtime_model
    assert isinstance(runtime_model, MlxLm)
    return runtime_model.load_bytes()


@pytest.mark.parametrize("name", quick(list(CHECKPOINTS), ("mixtral", "awq")))
def test_load_peaks_are_those_of_mlx_lm(name: str, tmp_path: Path) -> None:
    directory = write(name, tmp_path)
    peaks = []
    # With a fast disk arrays are free sooner: the largest of three.
    for _ in range(3):
        before = settled_bytes()
        model, _ = load_model(directory)
        peaks.append(mx.get_peak_memory() - before)
        del model
    traced = predicted(directory, "trace")
    assert 0.97 * max(peaks) <= traced
    # The slowest device: the measurement is below it where reads were fast.
    assert traced <= 1.35 * max(peaks)
    if name not in UNDESCRIBED:
        assert max(peaks) <= predicted(directory, "formula") <= 1.5 * max(peaks)
    for method in METHODS[name in UNDESCRIBED :]:
        sized = size(open_checkpoint(str(directory)), device=HOST, method=method)
        lowest, highest = estimate(sized, Workload(prompt_tokens=8), advises=False).peak_range_bytes
        assert lowest <= max(peaks) <= highest


@pytest.mark.parametrize("device", [HOST, MAX], ids=lambda device: device.backend)
@pytest.mark.parametrize(
    "published_as",
    quick(
        ["mixtral", "qwen3_moe", "awq", "awq-large", "fp8", "bailing_moe"],
        ("mixtral", "awq-large", "fp8", "bailing_moe"),
    ),
)
def test_the_bound_of_a_load_is_not_below_its_trace(published_as: str, device: Device) -> None:
    config, tensors = {
        "mixtral": lambda: mixtral(16),
        "qwen3_moe": lambda: published(
            "qwen3_moe", hidden_size=1024, num_experts=64, num_hidden_layers=8
        ),
        "awq": awq,
        # Larger than what a GPU has under way.
        "awq-large": lambda: awq(hidden=4096, layers=6),
        "fp8": fp8,
        "bailing_moe": bailing_moe,
    }[published_as]()
    headers = tuple(
        Tensor(name, DTYPES[array.dtype], tuple(array.shape), array.nbytes)
        for name, array in tensors.items()
    )
    checkpoint = Checkpoint("m", "local", config, "config.json", headers)
    bound, traced = (load_of(checkpoint, method, device) for method in METHODS)
    assert traced <= bound <= 2 * traced


@pytest.mark.parametrize(("arrays", "together"), [(18, 5), (10, 6), (5, 12), (40, 3)])
def test_stacks_that_are_on_the_tape_together_are_of_layers_in_a_row(
    arrays: int, together: int
) -> None:
    made = [
        Conversion(64, 64 * 1000, layer=f"model.layers.{layer}", layer_arrays=arrays)
        for layer in range(8)
        for _ in range(3)
    ]
    assert load_extra(made, backend="cpu") == together * 64 * 1000


def test_what_mlx_lm_wrote_loads_without_more_than_its_weights(tmp_path: Path) -> None:
    config = config_of("qwen3_moe")
    directory = save(tmp_path, config, plain(config))
    sized = size(open_checkpoint(str(directory)), device=MAX, method="trace")
    figures = sized.figures_for(Workload(prompt_tokens=64))
    assert predicted(directory, "formula", MAX) == sized.resident_bytes
    assert figures.moment.phase != "load"


@pytest.mark.parametrize("method", ["formula", "trace"])
def test_the_load_is_the_peak_where_it_is_the_largest_moment(
    method: MethodSetting, tmp_path: Path
) -> None:
    sized = size(open_checkpoint(str(write("mixtral", tmp_path))), device=MAX, method=method)
    moment = sized.figures_for(Workload(prompt_tokens=64)).moment
    assert (moment.phase, moment.nbytes) == ("load", predicted(tmp_path, method, MAX))
    assert moment.nbytes > 1.1 * sized.resident_bytes
    assert moment.explanation[0].startswith(f"load = {moment.nbytes:,}")
    kept = moment.nbytes - moment.workspace_bytes - sized.resident_bytes
    assert kept == sized.figures_for(Workload(prompt_tokens=64)).kv.nbytes


def test_ten_reads_are_a_task_and_end_the_gpus_open_batch() -> None:
    queue: ReadQueue[str] = ReadQueue(BatchLimits(50, 50, in_flight=1))
    assert not queue.submit("stack", 1, 0)
    first, second = [[list(queue.read()) for _ in range(10)] for _ in range(2)]
    assert first == [[]] * 10
    assert second == [*[[]] * 9, ["stack"]]
