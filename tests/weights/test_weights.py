"""Weights from shapes and headers: parts, packed parameters, formats, and rejected inputs."""

from collections import Counter
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit.estimators.arch.model import Model, Part
from memfit.estimators.arch.registry import build_model
from memfit.estimators.base import dtypes
from memfit.estimators.base.dtypes import Quantization, nbytes
from memfit.estimators.base.errors import CheckpointError, ConfigError
from memfit.estimators.checkpoint.manifest import Checkpoint, Tensor
from memfit.estimators.mlx.kernels import allocated
from memfit.estimators.runtimes.source import MethodSetting
from memfit.estimators.sizing.opening import size
from memfit.estimators.weights.conversion import convert
from memfit.estimators.weights.derived import QuantizationPlan, derive, part_of, tensor_groups
from memfit.estimators.weights.footprint import WeightFootprint, load_footprint
from memfit.estimators.weights.headers import COMPANIONS
from memfit.estimators.weights.quantization_plan import Declared, declared
from tests.models import QWEN3_4B, QWEN3_4B_4BIT, QWEN3_NEXT_80B

QWEN3_NEXT_4BIT = {**QWEN3_NEXT_80B, "quantization": {"group_size": 64, "bits": 4}}
# mlx-lm's own conversion writes the 8-bit routers of its predicate next to the defaults.
_ROUTERS = {
    f"model.layers.{layer}.mlp.{name}": {"group_size": 64, "bits": 8}
    for layer in range(48)
    for name in ("gate", "shared_expert_gate")
}


def footprint_of_config(
    config: dict[str, Any], tensors: tuple[Tensor, ...] | None = None
) -> WeightFootprint:
    model = build_model(config, "config.json")
    checkpoint = Checkpoint("m", "local", config, "config.json", tensors)
    return load_footprint(checkpoint, model, declared(config, model, "config.json"))


def tensor(name: str, dtype: str, *shape: int) -> Tensor:
    return Tensor(name, dtype, shape, nbytes(prod(shape), dtype))


def resident(footprint: WeightFootprint) -> int:
    return sum(count * allocated(size, "metal") for size, count in footprint.sizes.items())


def small(**changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    return {**QWEN3_4B, **sizes, **heads, "vocab_size": 320, **changes}


def headers_of(config: dict[str, Any], dtype: str = "BF16") -> tuple[Tensor, ...]:
    """The headers of an unquantised checkpoint under the class's own names."""
    model = build_model(config, "config.json")
    return tuple(tensor(f"{p}.weight", dtype, *m.shape) for p, m in model.all_modules())


def test_qwen3_4b_has_the_measured_bytes() -> None:
    footprint = footprint_of_config(QWEN3_4B_4BIT)
    # nbytes measured, and active memory predicted, by mlx-swift-lm's "Observed deltas".
    assert (footprint.nbytes, resident(footprint)) == (2_262_535_712, 2_264_333_312)
    assert footprint.basis == "derived"


def test_qwen3_next_has_the_measured_bytes() -> None:
    block = {"group_size": 64, "bits": 4, **_ROUTERS}
    footprint = footprint_of_config({**QWEN3_NEXT_80B, "quantization": block})
    # The same source; experts 43,486,543,872 of it.
    assert (footprint.nbytes, resident(footprint)) == (44_844_060_160, 44_844_092_928)
    assert footprint.by_part["experts"] == 43_486_543_872


def test_a_router_has_8_bits_after_conversion_and_its_own_type_before() -> None:
    # Without the routers' entries a published config says 4 bits of them, too.
    assert footprint_of_config(QWEN3_NEXT_4BIT).nbytes == 44_818_845_184
    model = build_model(QWEN3_NEXT_80B, "config.json")
    plan = QuantizationPlan(Quantization(4, 64), converting=True)
    assert convert({}, model, plan, Declared(), ())[1].nbytes == 44_844_060_160


@pytest.mark.parametrize(
    ("mode", "bits", "group", "numerator"),
    [("affine", 4, 64, 18), ("mxfp4", 4, 32, 17), ("nvfp4", 4, 16, 18), ("mxfp8", 8, 32, 33)],
)
def test_each_mode_takes_its_bytes_per_element(
    mode: str, bits: int, group: int, numerator: int
) -> None:
    # b/8 + 4/g for affine; 0.53125, 0.5625 and 1.03125 for the floating modes (mlx ops.cpp).
    packed = Quantization(bits, group, mode).tensors(4096 * 512, 2)
    assert sum(packed) == 4096 * 512 * numerator // 32


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization": 4}, "quantization: expected an object, got int"),
        ({"quantization": {}}, "quantization.bits: expected an integer, found none"),
        ({"quantization": {"bits": 4}}, "quantization.group_size: expected an integer"),
        ({"quantization": {"bits": "4", "group_size": 64}}, "bits: expected an integer, got '4'"),
        ({"quantization": {"bits": True, "group_size": 64}}, "bits: expected an integer, got True"),
        ({"quantization": {"bits": 7, "group_size": 64}}, "MLX has no such format"),
        ({"quantization": {"bits": 4, "group_size": 64, "mode": "gguf"}}, "mode 'gguf'"),
        ({"quantization": {"bits": 4, "group_size": 64, "mode": 1}}, "mode: expected a string"),
        (
            {"quantization": {"bits": 4, "group_size": 64, "lm_head": {"bits": 9}}},
            "quantization.lm_head",
        ),
        ({"quantization_config": [1]}, "quantization_config: expected an object, got list"),
        ({"quantization_config": {"quant_method": 3}}, "quant_method: expected a string, got 3"),
    ],
)
def test_a_malformed_quantization_block_is_rejected_with_its_key(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        footprint_of_config(small(**changes))
    assert words in str(caught.value)
    assert str(caught.value).startswith("config.json: ")
    assert len(str(caught.value).splitlines()) == 1


def test_an_override_uses_the_defaults_of_its_own_mode() -> None:
    # mlx nn/layers/quantized.py: a path's entry does not inherit missing values from the block.
    block = {"bits": 4, "group_size": 32, "mode": "mxfp4", "lm_head": {"bits": 8}}
    config = small(tie_word_embeddings=False, quantization=block)
    plan = declared(config, build_model(config, "c"), "c").plan
    assert plan is not None
    assert plan.overrides["lm_head"] == Quantization(8, 64, "affine")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["bits", "group_size", "mode", "quant_method", "format", "x"]), inner
        )
    ),
    max_leaves=8,
)
_METHODS = st.sampled_from(
    ["awq", "gptq", "fp8", "mxfp4", "compressed-tensors", "modelopt", "bitnet", "hqq", ""]
)


@given(_JSON, _METHODS)
def test_any_quantization_block_is_read_or_rejected(value: Any, method: str) -> None:
    block = {**value, "quant_method": method} if isinstance(value, dict) else value
    for key, content in (("quantization", value), ("quantization_config", block)):
        with suppress(ConfigError):
            assert footprint_of_config(small(**{key: content})).parameters > 0


@pytest.mark.parametrize(
    "method", ["gptq", "fp8", "bitnet", "modelopt", "hqq", "compressed-tensors", "mxfp4"]
)
def test_a_format_mlx_lm_does_not_load_is_bounded_by_the_unquantised_model(method: str) -> None:
    footprint = footprint_of_config(small(quantization_config={"quant_method": method, "bits": 4}))
    assert (footprint.basis, footprint.nbytes) == ("bound", footprint_of_config(small()).nbytes)
    assert [note.code for note in footprint.notes] == ["dequantised"]
    assert "does not load" in footprint.notes[0].message


def test_fp8_dequantised_at_load_gives_a_note_that_files_are_smaller() -> None:
    config = small(model_type="ministral3", rope_parameters={"rope_theta": 1e6})
    footprint = footprint_of_config({**config, "quantization_config": {"quant_method": "fp8"}})
    assert (footprint.basis, footprint.nbytes) == ("derived", footprint_of_config(config).nbytes)
    assert [note.code for note in footprint.notes] == ["dequantised-at-load"]


def test_converting_a_quantised_checkpoint_notes_that_mlx_lm_would_not() -> None:
    model = build_model(QWEN3_4B, "config.json")
    plan = QuantizationPlan(Quantization(4, 64), converting=True)
    sources = Declared(), Declared("gptq", bound="not loaded"), Declared("fp8")
    plain, packed, fp8 = (convert({}, model, plan, source, ())[1].notes for source in sources)
    assert [note.code for note in packed] == ["already-quantised"]
    # FP8 is dequantised while mlx_lm.convert loads it.
    assert plain == fp8 == ()


def test_a_conversion_of_a_quantised_checkpoint_is_of_the_original_weights_by_trace_too() -> None:
    pytest.importorskip("mlx_lm", reason="the class is mlx-lm's")
    config = small(quantization={"group_size": 64, "bits": 4})
    checkpoint = Checkpoint(id="m", source="config", config=config, config_name="config.json")
    methods: tuple[MethodSetting, ...] = ("formula", "trace")
    formula, trace = (
        size(checkpoint, device=None, quantize=Quantization(8, 64), method=method).footprint
        for method in methods
    )
    assert trace.loaded_bytes == formula.loaded_bytes > footprint_of_config(config).loaded_bytes


def test_headers_without_a_parameter_are_rejected() -> None:
    for tensors in ((), (tensor("model.norm.weight", "BF16", 0),)):
        with pytest.raises(CheckpointError, match="hold no parameters"):
            footprint_of_config(small(), tensors)


def test_complete_headers_are_exact_and_a_missing_tensor_is_not() -> None:
    headers = headers_of(small())
    assert footprint_of_config(small(), headers).basis == "exact"
    assert footprint_of_config(small(), headers).sizes == footprint_of_config(small()).sizes
    short = footprint_of_config(small(), headers[:-1])
    assert (short.basis, short.sizes) == ("bound", footprint_of_config(small()).sizes)
    assert "in the model class and in no header" in short.notes[0].message


def test_unknown_tensor_names_are_counted_by_their_parameters() -> None:
    headers = headers_of(small())
    renamed = (headers[0]._replace(name="backbone.tokens"), *headers[1:])
    footprint = footprint_of_config(small(), renamed)
    assert (footprint.basis, footprint.sizes) == ("derived", footprint_of_config(small()).sizes)
    assert [note.code for note in footprint.notes] == ["layout"]
    assert footprint_of_config(small(), renamed[:-1]).basis == "bound"


_NAMES = st.sampled_from(
    [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_proj.scales",
        "model.layers.0.mlp.experts.3.w1.weight",
        "model.layers.0.mlp.experts.3.w1.weight_scale_inv",
        "model.layers.0.mlp.down_proj.qweight",
        "model.layers.9.mlp.down_proj.weight_packed",
        "vision_tower.blocks.1.norm.weight",
        "lm_head.weight",
        "a",
        "",
    ]
)
_TENSORS = st.lists(
    st.builds(
        lambda name, dtype, shape: tensor(name, dtype, *shape),
        st.one_of(_NAMES, st.text(max_size=20)),
        st.sampled_from(sorted(dtypes.BITS)),
        st.lists(st.integers(0, 300), max_size=3),
    ),
    max_size=12,
    unique_by=lambda made: made.name,
)
_BLOCKS = st.sampled_from(
    [
        {},
        {"quantization": {"bits": 4, "group_size": 64}},
        {"quantization_config": {"quant_method": "awq", "group_size": 32}},
        {"quantization_config": {"quant_method": "bitnet"}},
        {"quantization_config": {"quant_method": "gptq"}},
    ]
)


@example([tensor("q_proj.scales", "BF16")], {})
@given(_TENSORS, _BLOCKS)
def test_parts_always_add_up_to_the_bytes_of_the_headers(
    tensors: list[Tensor], block: dict[str, Any]
) -> None:
    total = sum(made.nbytes for made in tensors)
    try:
        footprint = footprint_of_config(small(**block), tuple(tensors))
    except CheckpointError:
        full = [made.name for made in tensors if prod(made.shape)]
        assert all(name.endswith(COMPANIONS) for name in full)
        return
    assert sum(footprint.by_part.values()) == footprint.nbytes == total
    assert footprint.basis == "bound"


@given(st.integers(2, 9), st.integers(0, 3))
def test_stacked_experts_have_the_same_bytes(experts: int, odd: int) -> None:
    tensors = [tensor(f"l.experts.{index}.w1.weight", "BF16", 4, 8) for index in range(experts)]
    tensors += [tensor(f"l.experts.{index}.w2.weight", "U8", 4, 8) for index in range(odd)]
    found = tensor_groups(tensors)
    assert len(found) == (2 if odd else 1)
    assert sum(kind.copies * kind.nbytes for kind in found) == sum(t.nbytes for t in tensors)


def test_a_hundred_thousand_tensors_form_few_groups() -> None:
    names = (
        f"model.layers.{n // 1500}.mlp.experts.{n % 1500}.up_proj.weight" for n in range(10**5)
    )
    assert len(tensor_groups(tensor(name, "BF16", 2, 2) for name in names)) == 67


# Names from published checkpoints, each with its part.
_LINES = Path(__file__).with_name("part_names.txt").read_text().splitlines()
PART_NAMES = [line.split() for line in _LINES if not line.startswith("#")]


@pytest.mark.parametrize("part", Part, ids=lambda part: part.value)
def test_a_published_name_gives_its_part(part: Part) -> None:
    names = [name for expected, name in PART_NAMES if expected == part.value]
    assert names
    assert {name: part_of(name) for name in names} == dict.fromkeys(names, part)


@given(st.text(max_size=60))
def test_any_name_has_a_part(name: str) -> None:
    assert part_of(name) in Part


def test_a_name_has_the_part_of_the_module_it_names() -> None:
    for config in (QWEN3_4B, QWEN3_NEXT_80B):
        model: Model = build_model(config, "config.json")
        expected = {path: module.part for path, module in model.all_modules()}
        assert {path: part_of(f"{path}.weight") for path in expected} == expected


def test_the_bytes_do_not_depend_on_the_order_of_the_tensors() -> None:
    headers = headers_of(small(quantization={"bits": 4, "group_size": 64}))
    assert footprint_of_config(small(), headers) == footprint_of_config(small(), headers[::-1])


def test_dropped_tensors_are_on_disk_and_not_loaded() -> None:
    model = build_model(small(), "config.json")
    dropped = replace(model.modules[0], path="vision_tower.x", part=Part.VISION, loaded=False)
    totals = derive(replace(model, modules=(*model.modules, dropped)), None)
    assert totals.unloaded == 320 * 128 * 2
    assert totals.nbytes - totals.unloaded == totals.loaded_bytes == derive(model, None).nbytes
    assert totals.sizes == Counter(derive(model, None).sizes)


@pytest.mark.parametrize(
    ("name", "is_bound"),
    [
        ("org/Qwen3-8B-NVFP4", True),
        ("downloads/GLM-5-NVFP4.json", True),
        ("downloads/Mistral-7B-Instruct-4bit/config.json", True),
        ("Llama-3.1-8B-Instruct-quantized.w4a16", True),
        ("org/Qwen3-8B", False),
        ("fp8-tests/Qwen3-8B.json", False),
        ("org/granite-4.0-h-8b", False),
    ],
)
def test_a_name_with_a_format_that_the_config_does_not_declare_is_a_bound(
    name: str, is_bound: bool
) -> None:
    model = build_model(small(), name)
    plain = Checkpoint(id=name, source="config", config=small(), config_name="config.json")
    found = load_footprint(plain, model, Declared())
    assert (found.basis, [note.code for note in found.notes]) == (
        ("bound", ["undeclared-format"]) if is_bound else ("derived", [])
    )
    assert found.nbytes == derive(model, None).nbytes
