"""Weights after a real load by mlx-lm, for every layout and format of a checkpoint."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="the oracle is mlx-lm itself")
import mlx.core as mx

from memfit.estimators.arch.registry import row_or_default
from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.sizing.opening import size
from memfit.estimators.weights.footprint import WeightFootprint
from tests.selection import FEW_CONFIGS, quick
from tests.weights.hub_layout import Tensors, hub_layout
from tests.weights.loads import (
    CASES,
    check,
    config_of,
    converted,
    loaded_arrays,
    plain,
    predicted_weights,
    save,
)

every_case = pytest.mark.parametrize("case", quick(CASES, FEW_CONFIGS), ids=lambda case: case.stem)


@every_case
def test_unquantised_weights_load_to_the_predicted_arrays(case: Path, tmp_path: Path) -> None:
    config = config_of(case)
    assert check(save(tmp_path, config, plain(config))).basis == "exact"


@every_case
def test_4_bit_weights_load_to_the_predicted_arrays(case: Path, tmp_path: Path) -> None:
    assert check(save(tmp_path, *converted(config_of(case), 4, 32))).basis == "exact"


@every_case
def test_the_hub_layout_loads_to_the_predicted_arrays(case: Path, tmp_path: Path) -> None:
    # Classes that stack experts leave their biases unstacked: no published model has both.
    config = config_of(case)
    config.update({key: False for key in ("use_bias", "mlp_bias") if key in config})
    tensors = hub_layout(plain(config), config)
    saved = save(tmp_path, config, tensors)
    if row_or_default(config["model_type"]).keeps_shapes:
        assert loaded_arrays(saved) is None
        assert predicted_weights(saved).refusal
        return
    predicted = check(saved)
    assert predicted.basis == "exact"
    # The same bytes by part as under the class's own names, except for dropped masks.
    own = tmp_path / "own"
    own.mkdir()
    parts = predicted_weights(save(own, config, plain(config))).by_part
    assert predicted.by_part | {"attention": 0} == parts | {"attention": 0}


_UNKNOWN_TENSORS = (
    "lm_head.weight",
    "language_model.lm_head.weight",
    "model.layers.0.self_attn.rotary_emb.inv_freq",
    "model.layers.1.attention.rope.inv_freq",
    "mtp.fc.weight",
    "model.mtp.x.weight",
    "model.layers.61.eh_proj.weight",
    "vision_tower.x.weight",
    "model.visual.x.weight",
    "model.embed_vision.a.weight",
    "foo.weight",
    "model.layers.0.self_attn.q_proj.weight_scale",
)


@pytest.mark.parametrize("case", quick(CASES, FEW_CONFIGS), ids=lambda case: case.stem)
def test_a_tensor_unknown_to_the_class_is_dropped_or_rejected_as_in_mlx_lm(
    case: Path, tmp_path: Path
) -> None:
    config = config_of(case)
    tensors = plain(config)
    embedding = next(v for k, v in tensors.items() if "embed" in k or "wte" in k)
    for name in {*_UNKNOWN_TENSORS} - {*tensors}:
        unknown = embedding if "lm_head" in name else mx.zeros((8,), mx.bfloat16)
        check(save(tmp_path, config, {**tensors, name: unknown}))


@pytest.mark.parametrize(
    "quantization",
    [(4, 32, "mxfp4"), (4, 16, "nvfp4"), (8, 32, "mxfp8"), (3, 128), (2, 32), (5, 64), (8, 64)],
    ids=str,
)
@pytest.mark.parametrize("case", ["llama", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_a_config_alone_gives_the_bytes_of_its_conversion(
    case: str, quantization: tuple[Any, ...], tmp_path: Path
) -> None:
    config, tensors = converted(config_of(case), *quantization)
    predicted = check(save(tmp_path, config, tensors))
    (tmp_path / "model.safetensors").unlink()
    alone = predicted_weights(tmp_path)
    assert (alone.basis, alone.sizes, alone.parameters) == (
        "derived",
        predicted.sizes,
        predicted.parameters,
    )
    assert alone.by_part == predicted.by_part


def _mixed(path: str, _: object) -> bool | dict[str, object]:
    formats: dict[str, bool | dict[str, object]] = {
        "v_proj": {"group_size": 32, "bits": 8},
        "o_proj": False,
        "q_proj": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
        "embed_tokens": {"bits": 6, "group_size": 64},
    }
    return formats.get(path.rpartition(".")[2], True)


@pytest.mark.parametrize("case", ["llama", "qwen3_moe", "granite"])
def test_mixed_precisions_are_read_from_the_config_or_from_the_headers(
    case: str, tmp_path: Path
) -> None:
    config, tensors = converted(config_of(case), 4, 32, predicate=_mixed)
    block = config["quantization"]
    block.update({k.removesuffix(".weight"): False for k in tensors if "o_proj.weight" in k})
    listed = check(save(tmp_path, config, tensors))
    (tmp_path / "model.safetensors").unlink()
    alone = predicted_weights(tmp_path)
    assert (alone.sizes, alone.parameters) == (listed.sizes, listed.parameters)
    block = {key: value for key, value in block.items() if key in ("bits", "group_size", "mode")}
    unlisted = check(save(tmp_path, {**config, "quantization": block}, tensors))
    assert (unlisted.sizes, unlisted.parameters) == (listed.sizes, listed.parameters)
    assert unlisted.plan is not None
    assert unlisted.plan.overrides["model.layers.0.self_attn.o_proj"] is None


_Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("override", "loads"),
    [
        ({"bits": 8, "group_size": 64}, False),
        (False, False),
        ({}, False),
        (True, True),
        ({"bits": 4}, True),
    ],
)
def test_an_override_must_match_the_headers(override: object, loads: bool, tmp_path: Path) -> None:
    config, tensors = converted(config_of("llama"), 4, 64)
    config["quantization"][_Q_PROJ] = override
    assert (check(save(tmp_path, config, tensors)).basis == "exact") is loads


@pytest.mark.parametrize(
    ("changes", "without", "named"),
    [
        ({"vocab_size": 352}, "", "model.embed_tokens.weight: its shape"),
        ({"hidden_size": 256}, "", "its shape in the header is not the config's"),
        ({"num_hidden_layers": 4}, "", "model.layers.3.self_attn.q_proj: in the model class"),
        ({"num_hidden_layers": 2}, "", "model.layers.2."),
        ({"quantization": None}, "", "model.embed_tokens.scales: in a header"),
        ({}, f"{_Q_PROJ}.biases", f"{_Q_PROJ}.biases: in the model class and in no header"),
        ({}, f"{_Q_PROJ}.scales", f"{_Q_PROJ}.weight: its shape"),
        ({}, "model.norm.weight", "model.norm: in the model class and in no header"),
    ],
)
def test_headers_that_contradict_the_config_are_rejected_by_name(
    changes: dict[str, Any], without: str, named: str, tmp_path: Path
) -> None:
    config, tensors = converted(config_of("llama"), 4, 64)
    config.pop("quantization_config")
    tensors.pop(without, None)
    predicted = check(save(tmp_path, {**config, **changes}, tensors))
    assert predicted.basis == "bound"
    assert named in predicted.notes[0].message


def test_a_quantization_config_without_a_method_is_not_enough_for_mlx_lm(tmp_path: Path) -> None:
    config, tensors = converted(config_of("llama"), 4, 64)
    config.pop("quantization")
    predicted = check(save(tmp_path, config, tensors))
    assert predicted.loaded_bytes == predicted.nbytes


@pytest.mark.parametrize("case", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_float32_norms_of_a_bf16_model_stay_float32(case: str, tmp_path: Path) -> None:
    config = config_of(case)
    tensors = {
        name: value.astype(mx.float32 if "norm" in name else mx.bfloat16)
        for name, value in hub_layout(plain(config), config).items()
    }
    assert check(save(tmp_path, config, tensors)).basis == "exact"


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_the_type_comes_from_headers_and_not_from_the_config(dtype: str, tmp_path: Path) -> None:
    config = config_of("qwen3", torch_dtype="bfloat16")
    predicted = check(save(tmp_path, config, plain(config, dtype)))
    assert predicted.nbytes == predicted.parameters * (2 if dtype == "F16" else 4)


@pytest.mark.parametrize("dtype", ["F64", "F8_E5M2", "F8_E4M3", "F8_E8M0", "BOOL", "U16", "C64"])
@pytest.mark.parametrize("name", [f"{_Q_PROJ}.weight", "a.self_attn.rotary_emb.inv_freq"])
def test_a_file_with_a_type_mlx_cannot_read_is_rejected_even_if_dropped(
    dtype: str, name: str, tmp_path: Path
) -> None:
    config = config_of("llama")
    tensors = plain(config)
    shape = tensors[name].shape if name in tensors else (8,)
    stored = {"F64": mx.int64, "C64": mx.complex64, "U16": mx.uint16}.get(dtype, mx.uint8)
    predicted = check(
        save(tmp_path, config, {**tensors, name: mx.zeros(shape, stored)}, {name: dtype})
    )
    assert (predicted.basis == "bound") is (dtype in ("F64", "F8_E5M2"))
    if predicted.basis == "bound":
        assert f"{name}: MLX has no type {dtype}" in predicted.notes[0].message


def _fp8(case: str, tmp_path: Path, scale: int | None = 128, **block: Any) -> Path:
    """Projections in FP8 with one scale per block, or a single scale."""
    config, tensors, dtypes = config_of(case), Tensors(), {}
    for name, value in hub_layout(plain(config), config).items():
        tensors[name] = value
        if value.ndim == 2 and name.endswith("proj.weight"):
            tensors[name] = mx.zeros(value.shape, mx.uint8)
            dtypes[name] = "F8_E4M3"
            blocks = [-(-extent // scale) for extent in value.shape] if scale else []
            tensors[f"{name}_scale_inv"] = mx.ones(blocks, mx.float32 if scale else mx.bfloat16)
            if not scale:
                tensors[name.replace(".weight", ".activation_scale")] = mx.ones([], mx.bfloat16)
    config["quantization_config"] = {"quant_method": "fp8", **block}
    return save(tmp_path, config, tensors, dtypes)


@pytest.mark.parametrize(
    "case", ["deepseek_v3", "kimi_k2", "deepseek_v32", "glm_moe_dsa", "minimax_m2", "mimo_v2_flash"]
)
def test_fp8_in_blocks_is_dequantised_by_the_classes_that_support_it(
    case: str, tmp_path: Path
) -> None:
    predicted = check(_fp8(case, tmp_path))
    assert predicted.basis == "exact"
    assert predicted.loaded_bytes > predicted.nbytes
    assert [note.code for note in predicted.notes] == ["rewritten-at-load"]


@pytest.mark.parametrize("case", ["ministral3", "mistral3"])
def test_fp8_with_one_scale_gets_the_type_of_the_scale(case: str, tmp_path: Path) -> None:
    assert check(_fp8(case, tmp_path, scale=None)).basis == "exact"


@pytest.mark.parametrize("case", ["qwen3", "glm4_moe", "mistral3_llama"])
def test_fp8_of_other_classes_is_bounded_by_the_dequantised_model(
    case: str, tmp_path: Path
) -> None:
    predicted = check(_fp8(case, tmp_path))
    assert predicted.loaded_bytes == sum(v.nbytes for v in plain(config_of(case)).values())


def test_fp8_in_unsupported_block_sizes_is_rejected(tmp_path: Path) -> None:
    block = {"scale_fmt": "ue8m0", "weight_block_size": [32, 32]}
    assert check(_fp8("deepseek_v3", tmp_path, scale=32, **block)).basis == "bound"


def test_a_quantization_config_in_the_text_section_is_used(tmp_path: Path) -> None:
    block = {"quant_method": "awq", "bits": 4, "group_size": 32}
    config = config_of("mistral3_llama")
    config["text_config"]["quantization_config"] = block
    prefix = "language_model.model.layers."
    assert check(save(tmp_path, config, _awq(plain(config), prefix))).basis == "exact"


def _awq(
    tensors: Tensors,
    prefix: str = "model.layers.",
    dtype: mx.Dtype = mx.float16,
    zeros: bool = True,
) -> Tensors:
    """Matrices of the layers packed along the outputs, as by AutoAWQ (gemm)."""
    result = Tensors()
    for name, value in tensors.items():
        if value.ndim != 2 or not name.startswith(prefix) or not name.endswith("proj.weight"):
            result[name] = value
            continue
        base, (outputs, inputs) = name.removesuffix("weight"), value.shape
        result[f"{base}qweight"] = mx.zeros((inputs, outputs // 8), mx.int32)
        result[f"{base}scales"] = mx.zeros((inputs // 32, outputs), dtype)
        if zeros:
            result[f"{base}qzeros"] = mx.zeros((inputs // 32, outputs // 8), mx.int32)
    return result


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "gemma2", "mistral", "glm4"])
def test_awq_is_loaded_in_mlxs_layout(case: str, tmp_path: Path) -> None:
    config = config_of(case, quantization_config=_AWQ)
    predicted = check(save(tmp_path, config, _awq(plain(config))))
    assert predicted.basis == "exact"
    assert predicted.parameters == sum(value.size for value in plain(config).values())
    (tmp_path / "model.safetensors").unlink()
    assert predicted_weights(tmp_path).sizes == predicted.sizes


@pytest.mark.parametrize("scales", [mx.float16, mx.float32], ids=str)
@pytest.mark.parametrize("zeros", [True, False], ids=["zero points", "symmetric"])
def test_awq_casts_every_float_to_the_type_of_the_scales(
    scales: mx.Dtype, zeros: bool, tmp_path: Path
) -> None:
    config = config_of("llama", quantization_config=_AWQ)
    tensors = _awq(plain(config, "F32"), dtype=scales, zeros=zeros)
    assert check(save(tmp_path, config, tensors)).basis == "exact"


def test_awq_with_other_bits_than_four_gives_a_bound(tmp_path: Path) -> None:
    config = config_of("llama", quantization_config={**_AWQ, "bits": 8})
    assert check(save(tmp_path, config, _awq(plain(config)))).basis == "bound"


@pytest.mark.parametrize(("bits", "g_idx"), [(4, True), (4, False), (8, True)])
def test_gptq_is_rejected_with_any_bits(bits: int, g_idx: bool, tmp_path: Path) -> None:
    config, tensors = config_of("llama"), Tensors()
    for name, value in plain(config).items():
        if not name.endswith("proj.weight"):
            tensors[name] = value
            continue
        base, (outputs, inputs) = name.removesuffix("weight"), value.shape
        tensors[f"{base}qweight"] = mx.zeros((inputs * bits // 32, outputs), mx.int32)
        tensors[f"{base}qzeros"] = mx.zeros((inputs // 32, outputs * bits // 32), mx.int32)
        tensors[f"{base}scales"] = mx.zeros((inputs // 32, outputs), mx.float16)
        if g_idx:
            tensors[f"{base}g_idx"] = mx.zeros((inputs,), mx.int32)
    config["quantization_config"] = {"quant_method": "gptq", "bits": bits, "group_size": 32}
    predicted = check(save(tmp_path, config, tensors))
    assert predicted.parameters == sum(value.size for value in plain(config).values())
    assert predicted.loaded_bytes == 2 * predicted.parameters


def _packed_experts(config: dict[str, Any]) -> Tensors:
    """Experts packed by compressed-tensors, eight integers in an int32."""
    tensors = Tensors()
    for name, value in hub_layout(plain(config), config).items():
        if ".experts." not in name:
            tensors[name] = value
            continue
        rows, columns = value.shape
        tensors[f"{name}_packed"] = mx.zeros((rows, columns // 8), mx.int32)
        tensors[f"{name}_scale"] = mx.zeros((rows, columns // 32), mx.bfloat16)
        tensors[f"{name}_shape"] = mx.array([rows, columns], mx.int32)
    return tensors


@pytest.mark.parametrize(
    ("case", "basis"),
    [("deepseek_v3", "exact"), ("kimi_k2", "exact"), ("deepseek_v32", "bound"), ("olmoe", "bound")],
)
def test_packed_integers_are_read_only_by_the_deepseek_v3_class(
    case: str, basis: str, tmp_path: Path
) -> None:
    block = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    config = config_of(case, quantization_config=block, mlp_bias=False)
    predicted = check(save(tmp_path, config, _packed_experts(config)))
    assert predicted.basis == basis
    assert predicted.parameters == sum(value.size for value in plain(config).values())
    (tmp_path / "model.safetensors").unlink()
    alone = predicted_weights(tmp_path)
    assert (alone.basis, alone.loaded_bytes) == ("bound", predicted.loaded_bytes)


@pytest.mark.parametrize(
    ("method", "leaves"),
    [
        ("modelopt", ("", "_scale", "_scale_2")),
        ("compressed-tensors", ("_packed", "_scale", "_global_scale")),
        ("mxfp8", ("", "_scale_inv")),
        ("bitsandbytes", ("", ".absmax", ".quant_map")),
    ],
)
def test_formats_that_no_class_reads_give_a_bound_with_a_reason(
    method: str, leaves: tuple[str, ...], tmp_path: Path
) -> None:
    config = config_of("llama")
    tensors = Tensors()
    for name, value in plain(config).items():
        if name.endswith("proj.weight"):
            packed = 1 if method == "mxfp8" else 2
            shape = (value.shape[0], value.shape[1] // packed)
            tensors[f"{name}{leaves[0]}"] = mx.zeros(shape, mx.uint8)
            tensors |= {f"{name}{leaf}": mx.ones((1,), mx.uint8) for leaf in leaves[1:]}
        else:
            tensors[name] = value
    block = {"quant_method": method, "quant_algo": "NVFP4", "format": "nvfp4-pack-quantized"}
    predicted = check(save(tmp_path, {**config, "quantization_config": block}, tensors))
    assert predicted.notes[0].code == "dequantised"
    assert predicted.parameters == sum(value.size for value in plain(config).values())
    assert predicted.loaded_bytes == 2 * predicted.parameters


@pytest.mark.parametrize(
    ("method", "quantization"),
    [("mxfp4", (4, 32, "mxfp4")), ("mxfp8", (8, 32, "mxfp8")), ("modelopt", (4, 16, "nvfp4"))],
)
def test_foreign_methods_with_mlxs_own_names_load(
    method: str, quantization: tuple[Any, ...], tmp_path: Path
) -> None:
    config, tensors = converted(config_of("llama"), *quantization)
    config.pop("quantization")
    config["quantization_config"] = {"quant_method": method, "quant_algo": "NVFP4"}
    assert check(save(tmp_path, config, tensors)).basis == "exact"


@pytest.mark.parametrize(
    ("block", "quantization", "basis"),
    [
        ({"format": "nvfp4-pack-quantized"}, (4, 16, "nvfp4"), "exact"),
        ({"format": "mxfp4-pack-quantized"}, (4, 32, "mxfp4"), "exact"),
        ({"format": "pack-quantized"}, (4, 32, "affine"), "exact"),
        ({"format": "float-quantized"}, (4, 32, "affine"), "bound"),
        ({"quant_algo": "FP8"}, (8, 32, "mxfp8"), "bound"),
        ({"quantization": {"quant_algo": "NVFP4"}}, (4, 16, "nvfp4"), "exact"),
        ({"quantization": {"quant_algo": "FP8"}}, (4, 16, "nvfp4"), "bound"),
    ],
)
def test_compressed_tensors_and_modelopt_with_mlxs_names_load_by_format(
    block: dict[str, Any], quantization: tuple[Any, ...], basis: str, tmp_path: Path
) -> None:
    method = "compressed-tensors" if "format" in block else "modelopt"
    config, tensors = converted(config_of("llama"), *quantization)
    config.pop("quantization")
    config["quantization_config"] = {"quant_method": method, **block}
    assert check(save(tmp_path, config, tensors)).basis == basis


def _gpt_oss() -> tuple[dict[str, Any], Tensors]:
    config = config_of("gpt_oss")
    own = plain(config)
    tensors = {name: value for name, value in own.items() if ".experts." not in name}
    for layer in range(config["num_hidden_layers"]):
        path = f"model.layers.{layer}.mlp.experts"
        experts, width, hidden = own[f"{path}.gate_proj.weight"].shape
        for name, rows, columns in (
            ("gate_up_proj", 2 * width, hidden),
            ("down_proj", hidden, width),
        ):
            groups = (experts, rows, columns // 32)
            tensors[f"{path}.{name}_blocks"] = mx.zeros((*groups, 16), mx.uint8)
            tensors[f"{path}.{name}_scales"] = mx.zeros(groups, mx.uint8)
            tensors[f"{path}.{name}_bias"] = mx.zeros((experts, rows), mx.bfloat16)
    return config, tensors


def test_gpt_oss_as_published_loads_to_the_predicted_arrays(tmp_path: Path) -> None:
    config, tensors = _gpt_oss()
    config["quantization_config"] = {"quant_method": "mxfp4"}
    predicted = check(save(tmp_path, config, tensors))
    assert predicted.basis == "exact"
    (tmp_path / "model.safetensors").unlink()
    alone = predicted_weights(tmp_path)
    assert (alone.basis, alone.sizes) == ("derived", predicted.sizes)
    assert (alone.by_part, alone.parameters) == (predicted.by_part, predicted.parameters)


def test_gpt_oss_without_its_quantization_config_is_rejected(tmp_path: Path) -> None:
    assert check(save(tmp_path, *_gpt_oss())).basis == "bound"


def test_bitnet_is_loaded_packed_four_to_a_byte(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The kernel is for Metal only, and is created when mlx-lm imports the layer.
    monkeypatch.setattr(mx.fast, "metal_kernel", lambda **_: None)
    config = config_of("llama", mlp_bias=False, attention_bias=False)
    config["quantization_config"] = {
        "quant_method": "bitnet",
        "modules_to_not_convert": ["lm_head"],
    }
    tensors = plain(config)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        outputs, inputs = tensors[name].shape
        tensors[name] = mx.zeros((outputs // 4, inputs), mx.uint8)
        tensors[f"{name}_scale"] = mx.zeros((1,), mx.bfloat16)
    predicted = check(save(tmp_path, config, tensors))
    assert predicted.basis == "exact"
    assert predicted.parameters == sum(value.size for value in plain(config).values())


@pytest.mark.parametrize(("case", "path"), [("gemma3", "language_model."), ("gemma3_text", "")])
def test_a_separate_head_is_kept_by_the_classes_that_look_for_one(
    case: str, path: str, tmp_path: Path
) -> None:
    config = config_of(case)
    tensors = plain(config)
    head = {f"{path}lm_head.weight": tensors[f"{path}model.embed_tokens.weight"]}
    predicted = check(save(tmp_path, config, {**tensors, **head}))
    assert predicted.basis == "exact"
    assert predicted.by_part["head"] == predicted.by_part["embedding"]


def test_a_missing_expert_is_rejected(tmp_path: Path) -> None:
    config = config_of("qwen3_moe")
    tensors = hub_layout(plain(config), config)
    kept = {name: value for name, value in tensors.items() if ".experts.2." not in name}
    assert loaded_arrays(save(tmp_path, config, kept)) is None
    assert "switch_mlp" in _bound_reason(predicted_weights(tmp_path))


def _bound_reason(predicted: WeightFootprint) -> str:
    assert predicted.basis == "bound"
    return predicted.notes[0].message


@every_case
def test_a_conversion_is_what_mlx_lm_writes(case: Path, tmp_path: Path) -> None:
    from mlx_lm.utils import load_model, quantize_model, save_model

    config = config_of(case)
    model, _ = load_model(save(tmp_path, config, plain(config)))
    model, _ = quantize_model(model, config, 32, 4)
    save_model(tmp_path / "written", model)
    arrays = mx.load(str(tmp_path / "written" / "model.safetensors"))
    assert isinstance(arrays, dict)
    written = sum(array.nbytes for array in arrays.values())
    sized = size(open_checkpoint(str(tmp_path)), device=None, quantize=Quantization(4, 32))
    predicted = sized.footprint
    assert predicted.nbytes == sum(predicted.by_part.values()) == written
    assert predicted.unloaded_bytes == 0
