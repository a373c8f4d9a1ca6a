"""Checkpoints that are not as their class wants them: refused exactly where mlx-lm refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="the oracle is mlx-lm itself")
import mlx.core as mx

from memfit.estimators.base.errors import ConfigError, UnsupportedError
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.sizing.opening import size, weight_bits_of
from memfit.estimators.sizing.sized_model import SizedModel, refusal_of, runtimes_that_load
from tests.selection import FEW_CONFIGS, QUICK_CONFIGS, quick
from tests.weights.hub_layout import Tensors
from tests.weights.loads import CASES, config_of, converted, loaded_arrays, save

Change = Callable[[dict[str, Any], Tensors], None]
CHANGES: dict[str, Change] = {}
TYPES = ("qwen3", "llama", "qwen3_moe", "deepseek_v3", "gemma3_text", "qwen3_5", "gpt_oss")


def change(made: Change) -> Change:
    """Name a change to a quantised checkpoint by its function."""
    CHANGES[made.__name__] = made
    return made


def _packed(tensors: Tensors) -> str:
    """The path of a packed matrix that has neither experts nor a bias."""
    return next(n for n in tensors if n.endswith("_proj.scales")).removesuffix(".scales")


def _blocks(config: dict[str, Any]) -> list[dict[str, Any]]:
    return [config[key] for key in ("quantization", "quantization_config") if key in config]


@change
def nothing(config: dict[str, Any], tensors: Tensors) -> None:
    """As mlx_lm.convert writes it."""


@change
def more_bits_than_in_the_file(config: dict[str, Any], tensors: Tensors) -> None:
    for block in _blocks(config):
        block[_packed(tensors)] = {"bits": 8, "group_size": 32, "mode": "affine"}


@change
def bits_of_the_file_undeclared(config: dict[str, Any], tensors: Tensors) -> None:
    path = _packed(tensors)
    rows, columns = tensors[f"{path}.weight"].shape
    tensors[f"{path}.weight"] = mx.zeros((rows, 2 * columns), mx.uint32)


@change
def packed_by_another_program(config: dict[str, Any], tensors: Tensors) -> None:
    path = _packed(tensors)
    rows, groups = tensors[f"{path}.scales"].shape
    for leaf in ("weight", "scales", "biases"):
        del tensors[f"{path}.{leaf}"]
    tensors[f"{path}.tq_packed"] = mx.zeros((rows, 16 * groups), mx.uint8)
    tensors[f"{path}.tq_norms"] = mx.zeros((rows, groups), mx.float16)
    tensors[f"{path}.tq_bits"] = mx.zeros((1,), mx.int32)


@change
def no_block(config: dict[str, Any], tensors: Tensors) -> None:
    for key in ("quantization", "quantization_config"):
        config.pop(key, None)


@change
def a_block_that_names_no_method(config: dict[str, Any], tensors: Tensors) -> None:
    config.pop("quantization", None)
    config["quantization_config"] = {"bits": 4, "group_size": 32}


@change
def tensors_of_other_models(config: dict[str, Any], tensors: Tensors) -> None:
    tensors["speculator.fc.weight"] = mx.zeros((8, 8), mx.bfloat16)
    tensors["image_tower.patch.weight"] = mx.zeros((8, 3, 2, 2), mx.bfloat16)


@change
def a_missing_matrix(config: dict[str, Any], tensors: Tensors) -> None:
    path = _packed(tensors)
    for leaf in ("weight", "scales", "biases"):
        del tensors[f"{path}.{leaf}"]


@change
def missing_scales(config: dict[str, Any], tensors: Tensors) -> None:
    del tensors[f"{_packed(tensors)}.scales"]


@change
def missing_biases(config: dict[str, Any], tensors: Tensors) -> None:
    del tensors[f"{_packed(tensors)}.biases"]


@change
def a_renamed_matrix(config: dict[str, Any], tensors: Tensors) -> None:
    path = _packed(tensors)
    for leaf in ("weight", "scales", "biases"):
        tensors[f"{path}_renamed.{leaf}"] = tensors.pop(f"{path}.{leaf}")


@change
def more_rows(config: dict[str, Any], tensors: Tensors) -> None:
    path = _packed(tensors)
    for leaf in ("weight", "scales", "biases"):
        rows, columns = tensors[f"{path}.{leaf}"].shape
        tensors[f"{path}.{leaf}"] = mx.zeros((rows + 8, columns), tensors[f"{path}.{leaf}"].dtype)


@change
def a_bias_that_the_class_has_not(config: dict[str, Any], tensors: Tensors) -> None:
    tensors["model.layers.0.input_layernorm.bias"] = mx.zeros((8,), mx.bfloat16)


@change
def a_layer_too_many(config: dict[str, Any], tensors: Tensors) -> None:
    tensors["model.layers.99.input_layernorm.weight"] = mx.zeros((8,), mx.bfloat16)


@change
def code_of_its_own(config: dict[str, Any], tensors: Tensors) -> None:
    config["model_file"] = "model.py"


def _sized(directory: Path) -> SizedModel | None:
    """None where there is no figure at all."""
    try:
        return size(open_checkpoint(str(directory)), device=None, method="formula")
    except (ConfigError, UnsupportedError):
        return None


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("model_type", quick(TYPES, FEW_CONFIGS))
def test_a_changed_checkpoint_is_refused_exactly_where_mlx_lm_refuses_it(
    model_type: str, name: str, tmp_path: Path
) -> None:
    config, tensors = converted(config_of(model_type), 4, 32)
    CHANGES[name](config, tensors)
    sized = _sized(save(tmp_path, config, tensors))
    is_loaded = loaded_arrays(tmp_path) is not None
    assert is_loaded == (sized is not None and not refusal_of(sized))


def test_weights_in_files_of_other_names_are_refused_by_mlx_lm_alone(tmp_path: Path) -> None:
    directory = save(tmp_path, *converted(config_of("qwen3"), 4, 32))
    (directory / "model.safetensors").rename(directory / "weights.safetensors")
    assert loaded_arrays(directory) is None
    sized = _sized(directory)
    assert sized is not None
    assert "model*.safetensors" in refusal_of(sized)
    assert runtimes_that_load(sized) == ("mlx-swift-lm",)


def test_weights_of_another_program_are_those_of_its_files(tmp_path: Path) -> None:
    config, tensors = converted(config_of("qwen3"), 4, 32)
    packed_by_another_program(config, tensors)
    sized = _sized(save(tmp_path, config, tensors))
    assert sized is not None
    assert sized.footprint.loaded_bytes == sum(array.nbytes for array in tensors.values())


def test_a_conversion_of_what_does_not_load_does_not_load_either(tmp_path: Path) -> None:
    from memfit.estimators.base.dtypes import Quantization
    from tests.weights.loads import plain

    config = config_of("llama")
    tensors = plain(config) | {"speculator.fc.weight": mx.zeros((8, 8), mx.bfloat16)}
    checkpoint = open_checkpoint(str(save(tmp_path, config, tensors)))
    assert refusal_of(size(checkpoint, device=None, quantize=Quantization(4, 64)))
    assert not weight_bits_of(size(checkpoint, device=None))


def test_every_case_as_its_class_saves_it_is_not_refused(tmp_path: Path) -> None:
    for case in (each for each in CASES if each.stem in QUICK_CONFIGS):
        directory = tmp_path / case.stem
        directory.mkdir()
        sized = _sized(save(directory, *converted(config_of(case), 4, 32)))
        assert (case.stem, sized and refusal_of(sized)) == (case.stem, "")
