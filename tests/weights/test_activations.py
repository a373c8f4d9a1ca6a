"""The type of activations and caches, compared with mlx-lm's caches after a real load."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="the oracle is mlx-lm itself")
import mlx.core as mx

from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.sizing.opening import size
from tests.oracle import cache_bytes
from tests.weights.hub_layout import Tensors, hub_layout
from tests.weights.loads import config_of, converted, plain, save

TOKENS = 5


def _cast(tensors: Tensors, part: str, dtype: mx.Dtype) -> Tensors:
    changed = {
        name: value.astype(dtype)
        for name, value in tensors.items()
        if part in name and mx.issubdtype(value.dtype, mx.floating)
    }
    assert changed
    return {**tensors, **changed}


def _predicted_cache(directory: Path) -> tuple[int, int]:
    figures = size(open_checkpoint(str(directory)), device=None).figures_for(
        Workload(prompt_tokens=TOKENS)
    )
    return figures.kv.nbytes, figures.ssm_bytes


def _measured_cache(directory: Path) -> tuple[int, int]:
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    model, _ = load_model(directory, lazy=True)
    caches: list[Any] = make_prompt_cache(model)
    for tokens in (TOKENS - 1, 1):
        model(mx.zeros((1, tokens), mx.int32), cache=caches)
    return cache_bytes(caches)


PROMOTING = [
    ("llama", "norm", mx.float32),
    ("llama", "embed", mx.float16),
    ("qwen3", "layers", mx.float16),
    ("gemma3_text", "layernorm", mx.float32),
    ("deepseek_v3", "embed", mx.float32),
    ("mamba2", "embed", mx.float32),
    ("qwen3_next", "input_layernorm", mx.float32),
]
KEEPING = [
    ("qwen3_next", "linear_attn.norm", mx.float32),
    ("qwen3_moe", "mlp.gate.", mx.float32),
    ("llama", "model.norm", mx.float32),
]


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize(("case", "part", "dtype"), PROMOTING + KEEPING)
def test_a_parameter_of_another_type_promotes_the_cache_as_in_mlx_lm(
    case: str, part: str, dtype: mx.Dtype, bits: int | None, tmp_path: Path
) -> None:
    config = config_of(case)
    if bits is None:
        tensors = plain(config)
    else:
        config, tensors = converted(config, bits, 32)
    plain_cache = _measured_cache(save(tmp_path, config, tensors))
    assert _predicted_cache(tmp_path) == plain_cache
    save(tmp_path, config, _cast(tensors, part, dtype))
    assert _predicted_cache(tmp_path) == _measured_cache(tmp_path)
    assert (_predicted_cache(tmp_path) == plain_cache) is ((case, part, dtype) in KEEPING)


@pytest.mark.parametrize("case", ["qwen3_vl", "qwen3_5", "gpt2", "gemma4"])
def test_the_embedding_is_found_under_its_hub_name(case: str, tmp_path: Path) -> None:
    config = config_of(case)
    text = config.get("text_config", config)
    text["dtype"] = config["torch_dtype"] = "bfloat16"
    tensors = hub_layout(plain(config, "F32"), config)
    assert _predicted_cache(save(tmp_path, config, tensors)) == _measured_cache(tmp_path)
