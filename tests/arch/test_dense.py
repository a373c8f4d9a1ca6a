"""Dense transformers: rejected configs, their messages, and notes for the reader."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.registry import FAMILIES, build_model
from memfit.estimators.arch.specs import Attention, DenseMLP, Growth
from memfit.estimators.base.errors import ConfigError, MemfitError, UnsupportedError

CASES = Path(__file__).parent / "cases"
DENSE = [each for each, file in FAMILIES.items() if file in ("dense_models", "dense_other_names")]
HOSTILE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2**70),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.sampled_from(["full_attention", "sliding_attention", "", 7]), max_size=6),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def build(case: str, **changes: Any) -> Model:
    """Build a case's model with some keys changed; ``...`` takes a key away."""
    config = {**json.loads((CASES / f"{case}.json").read_text()), **changes}
    return build_model({k: v for k, v in config.items() if v is not ...}, "config.json")


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads: 4 is not a multiple of"),
        ("llama", {"num_attention_heads": 256, "head_dim": None}, "256 heads in a hidden_size"),
        ("llama", {"hidden_size": 10**30}, "hidden_size: expected 1 to"),
        ("llama", {"num_hidden_layers": 10**6}, "num_hidden_layers: expected 1 to"),
        ("llama", {"mlp_bias": "no"}, "mlp_bias: expected true or false"),
        ("llama_sliding", {"layer_types": ["full_attention"]}, "layer_types: expected 3 entries"),
        ("llama_sliding", {"layer_types": ["sliding_attention"] * 3}, "no layer is full_attention"),
        ("llama_sliding", {"layer_types": ["full_attention"] * 2 + ["x"]}, "layer_types[2]"),
        ("llama_sliding", {"sliding_window": None}, "sliding_window: missing"),
        ("olmo3", {"layer_types": ["full_attention"] * 5}, "no layer is sliding_attention"),
        ("cohere2", {"sliding_window_pattern": 6}, "sliding_window_pattern: 6 leaves none"),
        ("cohere2", {"head_dim": 64}, "4 heads of 64 are not hidden_size 128"),
        ("exaone4", {"sliding_window_pattern": "LLLLG"}, "sliding_window_pattern: expected L and"),
        ("exaone4", {"sliding_window_pattern": 4}, "sliding_window_pattern: expected a string"),
        ("qwen2", {"head_dim": 64}, "head_dim: 64, but mlx-lm's model class takes 32"),
        ("qwen2", {"num_key_value_heads": ...}, "num_key_value_heads: missing"),
        ("qwen3", {"head_dim": ...}, "head_dim: missing"),
        ("gpt2", {"n_inner": 100}, "n_inner: 100, but mlx-lm's model class takes 384"),
        ("phi", {"vocab_size": None}, "vocab_size: missing"),
        ("stablelm", {"num_attention_heads": 10**6}, "num_attention_heads: expected 1 to 256"),
    ],
)
def test_a_value_the_class_cannot_build_gives_a_one_line_error_with_its_key(
    case: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(case, **changes)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias", "num_experts"])
def test_a_key_that_changes_other_runtimes_but_not_this_class_is_rejected(key: str) -> None:
    with pytest.raises(UnsupportedError, match=key):
        build("qwen3", **{key: True})


def test_a_null_flag_is_off_even_if_the_class_default_is_on() -> None:
    def head(**changes: Any) -> bool:
        return not build("starcoder2", **changes).tied_head

    assert not head()
    assert head(tie_word_embeddings=None)


def test_a_window_that_the_runtime_ignores_gives_a_note() -> None:
    assert "ignores the sliding window" in build("gemma2").notes[0]
    assert "ignores the sliding window" in build("mistral").notes[0]
    assert build("qwen2").notes == ()  # use_sliding_window is false
    assert build("llama_sliding").notes == ()


def test_smollm3_masks_its_window_but_keeps_every_token() -> None:
    mixer = build("smollm3").layers[0].mixers[0]
    assert isinstance(mixer, Attention)
    assert (mixer.window, mixer.growth) == (24, Growth.STEPS)


def test_an_mlp_without_a_gate_is_recognised() -> None:
    assert build("nemotron").layers[0].feed_forward == DenseMLP(intermediate=224, gated=False)
    assert build("phi3").layers[0].feed_forward == DenseMLP(intermediate=224)


@given(st.sampled_from(DENSE), st.data())
def test_hostile_values_raise_nothing_but_memfit_errors(case: str, data: st.DataObject) -> None:
    keys = sorted(json.loads((CASES / f"{case}.json").read_text()).keys() - {"model_type"})
    keys += ["head_dim", "layer_types", "tie_word_embeddings", "use_sliding_window"]
    changes = data.draw(st.dictionaries(st.sampled_from(keys), HOSTILE, max_size=3))
    with suppress(MemfitError):
        build(case, **changes)
