"""mlx-vlm as a runtime: the tower is resident; compared with mlx-vlm where it is installed."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.images import Images, ImageSize
from memfit.estimators.base.units import open_size
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.versions import Version
from memfit.estimators.runtimes.facets import loaded_weights
from memfit.estimators.runtimes.registry import get_runtime, with_versions
from memfit.estimators.runtimes.source import MethodSetting
from memfit.estimators.sizing.opening import size, with_weight_bits
from memfit.estimators.sizing.sized_model import SizedModel, with_runtime
from tests.checkpoints import CASES, save_weights
from tests.mlx_memory import settled_bytes

SAMPLES = Path(__file__).parents[2] / "sample_configs"
CPU = Device("CPU", "cpu", 2**34, 2**34, None, "flag")
MLX_VLM = get_runtime("mlx-vlm")


def under_mlx_vlm(reference: Path, device: Device | None = None) -> SizedModel:
    return with_runtime(size(open_checkpoint(str(reference)), device=device), MLX_VLM)


def test_the_tower_counts_as_loaded_and_resident() -> None:
    text = size(open_checkpoint(str(SAMPLES / "gemma-3-27b.yaml")), device=None)
    whole = with_runtime(text, MLX_VLM)
    tower = whole.footprint.by_part["vision"]
    assert tower > 0
    assert (
        loaded_weights(whole.runtime_model).loaded_bytes
        == loaded_weights(text.runtime_model).loaded_bytes + tower
    )
    assert whole.resident_bytes >= text.resident_bytes + tower
    assert loaded_weights(whole.runtime_model).unloaded_bytes == 0
    workload = Workload(prompt_tokens=4096)
    more = whole.figures_for(workload).moment.nbytes - text.figures_for(workload).moment.nbytes
    embeddings = 4096 * text.model.hidden_size * 2
    assert more == whole.resident_bytes - text.resident_bytes + embeddings


def test_a_text_model_needs_the_embeddings_of_the_whole_prompt_besides() -> None:
    text = size(open_checkpoint(str(SAMPLES / "qwen3-4b-4bit.yaml")), device=None)
    workload = Workload(prompt_tokens=4096)
    figures, lm = with_runtime(text, MLX_VLM).figures_for(workload), text.figures_for(workload)
    assert figures.kv == lm.kv
    assert figures.moment.nbytes == lm.moment.nbytes + 4096 * 2560 * 2


@pytest.mark.exhaustive
@pytest.mark.skipif(importlib.util.find_spec("mlx_vlm") is None, reason="mlx-vlm is not installed")
@pytest.mark.parametrize("name", ["qwen3-vl-4b", "gemma-4-e4b"])
def test_long_texts_by_formula_are_near_mlx_vlms_class(name: str) -> None:
    opened = open_checkpoint(str(SAMPLES / f"{name}.yaml"))
    formula = with_runtime(size(opened, device=None), MLX_VLM)
    traced = with_runtime(size(opened, device=None, method="trace"), MLX_VLM)
    for tokens in (4096, 131_072):
        workload = Workload(prompt_tokens=tokens)
        bytes_of = [each.figures_for(workload).moment.nbytes for each in (formula, traced)]
        assert abs(bytes_of[0] - bytes_of[1]) * 50 < bytes_of[1]


def test_a_conversion_leaves_towers_as_they_are_and_packs_a_tied_head_again() -> None:
    gemma = open_checkpoint(str(SAMPLES / "gemma-3-4b.yaml"))
    plain = with_runtime(size(gemma, device=None), MLX_VLM)
    text = size(gemma, device=None, quantize=Quantization(4, 64))
    converted = with_runtime(text, MLX_VLM)
    head = 262208 * 2560 * 9 // 16  # 4 bits, and a scale and a bias of 16 for each 64 elements
    tower = plain.footprint.by_part["vision"]
    assert (
        loaded_weights(converted.runtime_model).loaded_bytes
        == text.footprint.loaded_bytes + tower + head
    )
    assert with_weight_bits(plain, 4).resident_bytes == converted.resident_bytes


@pytest.mark.skipif(importlib.util.find_spec("mlx_vlm") is None, reason="mlx-vlm is not installed")
@pytest.mark.parametrize(
    "case", [pytest.param("mistral3", marks=pytest.mark.exhaustive), "qwen3_vl"]
)
def test_figures_equal_those_of_mlx_vlm(case: str, tmp_path: Path) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_vlm.generate import generate_step
    from mlx_vlm.utils import load_model

    save_vision_model(case, tmp_path)
    workload = Workload(prompt_tokens=600, max_tokens=3, prefill_step=256)
    sized = under_mlx_vlm(tmp_path, CPU)
    mx.set_default_device(mx.cpu)
    before = settled_bytes()
    model = load_model(tmp_path, lazy=False)
    parameters: Any = tree_flatten(model.parameters())
    assert loaded_weights(sized.runtime_model).loaded_bytes == sum(
        array.nbytes for _, array in parameters
    )
    mx.reset_peak_memory()
    ids = mx.array([[index % 200 + 1 for index in range(workload.prompt_tokens)]])
    steps = generate_step(
        ids, model, None, None, max_tokens=workload.max_tokens, prefill_step_size=256
    )
    for _ in zip(range(workload.max_tokens), steps, strict=False):
        pass
    measured = mx.get_peak_memory() - before
    moment = sized.figures_for(workload).moment
    _, percent = sized.runtime_model.basis("workspace", workload)
    assert abs(measured - moment.nbytes) * 100 <= percent * moment.workspace_bytes


def save_vision_model(case: str, directory: Path) -> None:
    """Save a model of mlx-vlm's own class with random weights."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_vlm.utils import get_model_and_args, update_module_configs

    config: dict[str, Any] = json.loads((CASES / f"{case}.json").read_text())
    config |= {"torch_dtype": "bfloat16"}
    module, _ = get_model_and_args(config=config)
    parts = ["text", "vision", "perceiver", "projector"]
    built = update_module_configs(module.ModelConfig.from_dict(config), module, config, parts)
    mx.random.seed(0)
    parameters: Any = tree_flatten(module.Model(built).parameters())
    save_weights(directory, {name: array.astype(mx.bfloat16) for name, array in parameters})
    (directory / "config.json").write_text(json.dumps(config))


def test_short_prompts_name_the_logits_of_older_versions() -> None:
    sized = under_mlx_vlm(SAMPLES / "qwen3-vl-4b.yaml")

    def logits(tokens: int) -> list[str]:
        workload = Workload(prompt_tokens=tokens)
        figures = sized.figures_for(workload)
        said = sized.runtime_model.statements(workload, figures)
        return [line for line in said.assumptions if "before 0.7.0" in line]

    # 151,936 numbers of 16 bits for each of 1000 tokens.
    assert f"{open_size(303_872_000)} more" in logits(1000)[0]
    assert logits(2049) == []


def by_version(name: str, version: Version, **settings: Any) -> SizedModel:
    sized = size(open_checkpoint(str(SAMPLES / f"{name}.yaml")), device=None, **settings)
    return with_runtime(sized, with_versions(MLX_VLM, mlx_vlm=version))


# https://github.com/Blaizzy/mlx-vlm/pull/2119: 17.505 GB before, 17.013 after.
def test_an_older_version_makes_the_logits_of_a_whole_short_prompt() -> None:
    short, long = Workload(prompt_tokens=1229), Workload(prompt_tokens=2049)
    before, after = (by_version("qwen3.5-27b", each) for each in ((0, 6, 17), (0, 7, 0)))
    logits = 1229 * 248_320 * 2
    older, newer = before.figures_for(short), after.figures_for(short)
    assert older.moment.nbytes - newer.moment.nbytes == logits
    assert older.kv == newer.kv
    assert 492_000_000 < logits < 492_000_000 * 1.25
    assert before.runtime_model.basis("workspace", short)[0] == "bound"
    assert before.figures_for(long) == after.figures_for(long)


# https://github.com/Blaizzy/mlx-vlm/issues/1732: one allocation of 25,353,916,928 bytes, with
# mlx-vlm 0.6.7 and gemma-4-26B-A4B in 4 bits. It is 2 * 16 heads * 28,148 tokens squared.
@pytest.mark.parametrize("method", ["formula", pytest.param("trace", marks=pytest.mark.exhaustive)])
def test_images_of_gemma_4_are_prefilled_in_one_call(method: MethodSetting) -> None:
    if method == "trace" and importlib.util.find_spec("mlx_vlm") is None:
        pytest.skip("mlx-vlm is not installed")
    tokens = 28_148
    images = Images(images=(ImageSize(width=1024, height=768),))
    workload = Workload(prompt_tokens=tokens, images=images)
    packed = Quantization(4, 64)
    before, fixed, newest = (
        by_version("gemma-4-26b-a4b", each, quantize=packed, method=method).figures_for(workload)
        for each in ((0, 6, 7), (0, 6, 10), (0, 7, 10))
    )
    assert newest == fixed
    assert newest.moment.largest_buffer_bytes == pytest.approx(25_353_916_928, rel=1e-4)
    assert before.moment.nbytes - fixed.moment.nbytes == tokens * 262_144 * 2


def test_images_that_do_not_see_one_another_are_prefilled_in_chunks() -> None:
    images = Images(images=(ImageSize(width=1024, height=768),))
    (scores, more) = (
        by_version("gemma-4-e4b", (0, 7, 10)).figures_for(
            Workload(prompt_tokens=tokens, images=images)
        )
        for tokens in (20_000, 40_000)
    )
    assert more.moment.largest_buffer_bytes < 3 * scores.moment.largest_buffer_bytes
