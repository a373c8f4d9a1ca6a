"""Conversions sized from a checkpoint, compared with what mlx_lm.convert really writes.

The reference is the converted directory, loaded and run by mlx-lm: files of every float type under
configs that name another one, or none.
"""

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="the oracle is mlx-lm itself")
import mlx.core as mx

from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.runtimes.source import MethodSetting
from memfit.estimators.sizing.opening import size, with_weight_bits
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.estimators.weights.conversion import conversion_type
from tests.checkpoints import config_of as any_config_of
from tests.checkpoints import save_tokenizer
from tests.oracle import cache_bytes
from tests.selection import quick
from tests.weights.hub_layout import Tensors
from tests.weights.loads import loaded_arrays, plain, save

QUANTIZE = Quantization(4, 32)
WORKLOAD = Workload(prompt_tokens=300, max_tokens=3)
TYPES = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}
NAMED = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
MIXED = "BF16 with F32 norms"
FILES = (*TYPES, MIXED)
FAMILIES = (
    *("llama", "qwen3_moe", "gemma3_text", "deepseek_v3", "qwen3_next", "mamba2", "falcon_h1"),
    *("qwen3_5", "mistral3", "gpt2", "glm4_moe", "kimi_linear"),
)


def config_of(case: str, **changes: Any) -> dict[str, Any]:
    """Return a case's config without the type that it names, with some keys changed."""
    config = copy.deepcopy(any_config_of(case))
    config.pop("torch_dtype", None)
    return config | changes


def of_files(config: dict[str, Any], kind: str) -> Tensors:
    if kind != MIXED:
        return plain(config, kind)
    tensors = plain(config, "BF16")
    return {name: v.astype(mx.float32) if "norm" in name else v for name, v in tensors.items()}


def write(directory: Path, config: dict[str, Any], tensors: Tensors) -> tuple[Path, Path]:
    """Return a checkpoint and its conversion by mlx_lm.convert."""
    from mlx_lm.convert import convert

    source, converted = directory / "source", directory / "converted"
    source.mkdir()
    save_tokenizer(source, has_chat_template=False)
    save(source, config, tensors)
    convert(
        str(source),
        str(converted),
        quantize=True,
        q_group_size=QUANTIZE.group_size,
        q_bits=QUANTIZE.bits,
    )
    return source, converted


def sized(
    path: Path, method: MethodSetting = "formula", quantize: Quantization | None = None
) -> Any:
    return size(open_checkpoint(str(path)), device=None, quantize=quantize, method=method)


def figures(model: SizedModel) -> tuple[Counter[int], int, int, int]:
    found = model.figures_for(WORKLOAD)
    return (
        model.footprint.sizes,
        found.kv.nbytes,
        found.ssm_bytes,
        found.moment.workspace_bytes,
    )


def cache_of(directory: Path) -> tuple[int, int]:
    """Return what mlx-lm's own caches hold after the workload; nothing is computed."""
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    model, _ = load_model(directory, lazy=True)
    caches: list[Any] = make_prompt_cache(model)
    for tokens in (WORKLOAD.prompt_tokens - 1, *[1] * (1 + WORKLOAD.max_tokens)):
        model(mx.zeros((1, tokens), mx.int32), cache=caches)
    return cache_bytes(caches)


@pytest.mark.parametrize("named", [None, *NAMED])
@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("case", quick(FAMILIES, ("deepseek_v3",)))
def test_a_conversion_has_the_types_that_mlx_lm_casts_to(
    case: str, files: str, named: str | None, tmp_path: Path
) -> None:
    config = config_of(case, **({"torch_dtype": named} if named else {}))
    source, converted = write(tmp_path, config, of_files(config, files))
    expected = figures(sized(converted))
    assert expected[0] == loaded_arrays(converted)
    assert expected[1:3] == cache_of(converted)
    assert figures(sized(source, quantize=QUANTIZE)) == expected
    # A config that names no type stands for files of bfloat16.
    if named or files == "BF16":
        assert figures(sized(source / "config.json", quantize=QUANTIZE)) == expected


@pytest.mark.parametrize(
    ("files", "named"), [("BF16", "float32"), ("F32", None), (MIXED, "float16")]
)
@pytest.mark.parametrize(
    "case", quick(("gemma3_text", "deepseek_v3", "afmoe", "olmoe"), ("afmoe",))
)
def test_a_conversion_by_trace_is_that_of_the_converted_directory(
    case: str, files: str, named: str | None, tmp_path: Path
) -> None:
    config = config_of(case, **({"torch_dtype": named} if named else {}))
    source, converted = write(tmp_path, config, of_files(config, files))
    whole, made = (
        figures(sized(path, "trace", quantize))
        for path, quantize in ((converted, None), (source, QUANTIZE))
    )
    assert made == whole
    assert made[0] == loaded_arrays(converted)


@pytest.mark.parametrize("case", ["llama", "afmoe"])
def test_rows_of_other_bits_are_conversions_of_the_same_files(case: str, tmp_path: Path) -> None:
    config = config_of(case, torch_dtype="bfloat16", max_position_embeddings=4096)
    source = save(tmp_path, config, of_files(config, "F32"))
    asked = figures(sized(source, "auto", Quantization(4, 64)).formula_view())
    eight = sized(source, "auto", Quantization(8, 64))
    for start in (sized(source, "auto"), eight):
        assert figures(with_weight_bits(start, 4)) == asked
    assert figures(sized(source, "auto"))[1] == 2 * asked[1]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"torch_dtype": "float16", "dtype": "float32"}, "F16"),
        ({"dtype": "float32"}, None),
        ({"torch_dtype": None, "text_config": {"dtype": "float32"}}, "F32"),
        ({"text_config": {"torch_dtype": "float32"}}, None),
        ({"torch_dtype": "torch.float16"}, None),
        ({"torch_dtype": "float64"}, None),
        ({"torch_dtype": "float8_e4m3fn", "text_config": {"dtype": "float32"}}, None),
        ({"torch_dtype": ["float16"], "text_config": 3}, None),
    ],
)
def test_only_two_keys_name_the_type_of_a_conversion(
    keys: dict[str, Any], expected: str | None
) -> None:
    assert conversion_type(keys) == expected


@pytest.mark.parametrize(
    "keys", [{"dtype": "float32"}, {"torch_dtype": None}, {"torch_dtype": "torch.float16"}], ids=str
)
@pytest.mark.parametrize("nested", [None, "float16"])
def test_a_type_under_another_key_casts_as_in_mlx_lm(
    keys: dict[str, Any], nested: str | None, tmp_path: Path
) -> None:
    config = config_of("mistral3") | keys
    config["text_config"] |= {"dtype": nested} if nested else {}
    source, converted = write(tmp_path, config, of_files(config, "BF16"))
    assert figures(sized(source, quantize=QUANTIZE)) == figures(sized(converted))
    assert figures(sized(source, quantize=QUANTIZE))[0] == loaded_arrays(converted)


@pytest.mark.parametrize("method", ["formula", "trace"])
@pytest.mark.parametrize("case", ["deepseek_v3", "kimi_linear", "nemotron_h"])
def test_what_a_class_never_casts_keeps_the_type_of_the_files(
    case: str, method: MethodSetting, tmp_path: Path
) -> None:
    config = config_of(case, torch_dtype="float32")
    tensors = {name: value.astype(mx.bfloat16) for name, value in plain(config).items()}
    source, converted = write(tmp_path, config, tensors)
    found = sized(source, method, QUANTIZE).footprint.sizes
    assert found == loaded_arrays(converted)


_OPTIONAL_HEADS = ("gemma3_text", "gemma3", "recurrent_gemma", "llama", "qwen3", "glm", "minicpm")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("case", quick(_OPTIONAL_HEADS, ("gemma3", "llama")))
def test_a_head_of_the_files_is_converted_where_the_class_loads_it(
    case: str, has_head: bool, tied: bool, tmp_path: Path
) -> None:
    config = config_of(case)
    text = config.get("text_config", config)
    config.pop("tie_word_embeddings", None)
    text["tie_word_embeddings"] = tied
    tensors = plain(config)
    prefix = "language_model." if case == "gemma3" else ""
    tensors.pop(f"{prefix}lm_head.weight", None)
    if has_head:
        embedding = tensors[f"{prefix}model.embed_tokens.weight"]
        tensors[f"{prefix}lm_head.weight"] = mx.zeros(embedding.shape, embedding.dtype)
    try:
        source, converted = write(tmp_path, config, tensors)
    except ValueError:  # mlx-lm loads no such files
        assert sized(tmp_path / "source").footprint.basis == "bound"
        return
    assert sized(source).footprint.sizes == loaded_arrays(source)
    for method in ("formula", "trace"):
        assert sized(source, method, QUANTIZE).footprint.sizes == loaded_arrays(converted)
