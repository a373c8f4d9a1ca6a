"""Figures for versions of MLX and mlx-lm: what changed, compared with published peaks."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.arch.registry import FAMILIES, build_model, class_row
from memfit.estimators.base.dtypes import Quantization, converted
from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.devices import find_device
from memfit.estimators.mlx.call_plan import planned_calls
from memfit.estimators.mlx.data.changes import ADDED, CHANGES, OLDEST_MLX_LM
from memfit.estimators.mlx.data.kernels import KERNELS
from memfit.estimators.mlx.kv_cache import state_bytes
from memfit.estimators.mlx.versions import (
    MLX_VERSION,
    OLDEST_MLX,
    MlxVersions,
    Version,
    as_of,
    format_version,
    parse_version,
)
from memfit.estimators.results.estimate import Note
from memfit.estimators.runtimes.source import MethodSetting
from memfit.estimators.sizing.estimate import estimate
from memfit.estimators.sizing.opening import size
from memfit.estimators.sizing.sized_model import SizedModel
from tests.models import sample_config

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "arch" / "cases"

LLAMA_3B = sample_config("llama-3.2-3b")
# https://huggingface.co/ibm-granite/granite-4.0-h-small, config.json.
GRANITE_H_SMALL: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "hidden_size": 4096,
    "num_hidden_layers": 40,
    "layer_types": ["attention" if n in (5, 15, 25, 35) else "mamba" for n in range(40)],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "intermediate_size": 768,
    "shared_intermediate_size": 1536,
    "num_local_experts": 72,
    "num_experts_per_tok": 10,
    "embedding_multiplier": 12,
    "attention_multiplier": 0.0078125,
    "logits_scaling": 6,
    "residual_multiplier": 0.22,
    "attention_bias": False,
    "position_embedding_type": "nope",
    "vocab_size": 100352,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
GEMMA4_31B = sample_config("gemma-4-31b")["text_config"]
NVFP4 = Quantization(4, 16, "nvfp4")


def sized(
    config: dict[str, Any],
    device: str,
    versions: MlxVersions,
    *,
    quantize: Quantization | None = None,
    method: MethodSetting = "formula",
) -> SizedModel:
    """Return a config as a version runs it."""
    checkpoint = Checkpoint(id="m", source="config", config=config, config_name="config.json")
    return size(
        checkpoint,
        device=find_device(device),
        margin_bytes=0,
        quantize=quantize,
        method=method,
        versions=versions,
    )


def notes(model: SizedModel, workload: Workload, code: str) -> list[Note]:
    """Return the notes of an estimate with a code."""
    return [note for note in estimate(model, workload).notes if note.code == code]


# https://github.com/ml-explore/mlx-lm/pull/525: 61.323 GB before, 23.501 GB after.
@pytest.mark.parametrize(("mlx_lm", "published_gb"), [((0, 28, 2), 61.323), ((0, 28, 3), 23.501)])
def test_mamba2_took_a_whole_call_at_once(mlx_lm: Version, published_gb: float) -> None:
    versions = MlxVersions((0, 29, 2), mlx_lm)
    model = sized(GRANITE_H_SMALL, "m2-ultra-192", versions, quantize=converted(4))
    peak = model.figures_for(Workload(prompt_tokens=2048, max_tokens=2)).moment.nbytes
    assert peak / 1e9 == pytest.approx(published_gb, rel=0.025)


# https://github.com/ml-explore/mlx-lm/pull/396, the default before it: 3.285 GB.
@pytest.mark.parametrize(("method", "error"), [("formula", 0.02), ("trace", 0.0005)])
def test_logits_were_made_of_the_whole_last_chunk(method: MethodSetting, error: float) -> None:
    if method == "trace":
        pytest.importorskip("mlx_lm")
    workload = Workload(prompt_tokens=2048, max_tokens=128)
    before, since = (
        sized(
            LLAMA_3B,
            "m2-ultra-192",
            MlxVersions((0, 29, 2), mlx_lm),
            quantize=converted(4),
            method=method,
        ).figures_for(workload)
        for mlx_lm in ((0, 26, 4), (0, 27, 0))
    )
    assert before.moment.nbytes / 1e9 == pytest.approx(3.285, rel=error)
    # The logits of 2047 more tokens, in bfloat16, and no more than two of them.
    logits = 2047 * 128256 * 2
    assert logits * 0.8 < before.moment.nbytes - since.moment.nbytes < 2 * logits
    assert before.moment.phase == "prefill"


def test_the_last_chunk_of_older_versions_has_the_last_token() -> None:
    old = MlxVersions(mlx_lm=(0, 26, 4))
    calls = planned_calls(Workload(prompt_tokens=4096, max_tokens=2), old)
    assert [call.tokens for call in calls] == [2048, 2048, 1, 1]
    assert calls[1] == ("last_tokens", 2048, 2048)


# https://github.com/ml-explore/mlx/pull/4518 and 4487: main and the branch that was merged.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("device", "mlx", "published_gb"),
    [
        ("m3-ultra-512", (0, 32, 2), 23.952),
        ("m3-ultra-512", (0, 32, 4), 22.531),
        ("m5-max-128", (0, 32, 2), 23.9515),
        ("m5-max-128", (0, 32, 3), 22.0368),
    ],
)
def test_attention_of_width_512_has_its_published_peak(
    device: str, mlx: Version, published_gb: float
) -> None:
    pytest.importorskip("mlx_lm")
    workload = Workload(prompt_tokens=16384, max_tokens=128)
    errors: dict[MethodSetting, float] = {"trace": 0.0005, "formula": 0.015}
    for method, error in errors.items():
        model = sized(GEMMA4_31B, device, MlxVersions(mlx=mlx), quantize=NVFP4, method=method)
        peak = model.figures_for(workload).moment.nbytes
        assert peak / 1e9 == pytest.approx(published_gb, rel=error)


def test_states_had_the_type_of_the_model() -> None:
    for name in ("qwen3_next", "mamba2"):
        model = build_model(json.loads((CASES / f"{name}.json").read_text()), name)
        old = as_of(model, MlxVersions(mlx_lm=(0, 31, 1)))
        wide = sum(state.elements for state in model.states() if state.float32)
        assert wide * 2 == state_bytes(model, 1) - state_bytes(old, 1) > 0
        assert as_of(model, MlxVersions(mlx_lm=(0, 31, 2))) is model


def test_gemma4_loaded_projections_that_it_never_used() -> None:
    config = json.loads((CASES / "gemma4_text_full_shared.json").read_text())
    now, before = (
        sized(config, "m4-max-64", MlxVersions(mlx_lm=version)).footprint
        for version in ((0, 31, 3), (0, 31, 2))
    )
    unused = sum(
        module.elements * 2
        for _, module in build_model(config, "m").all_modules()
        if not module.loaded
    )
    assert before.loaded_bytes - now.loaded_bytes == unused > 0


@pytest.mark.parametrize("model_type", ["deepseek_v3", "kimi_linear"])
def test_a_class_that_was_rewritten_is_not_guessed(model_type: str) -> None:
    config = json.loads((CASES / f"{model_type}.json").read_text())
    row = class_row(model_type)
    assert row is not None
    assert row.rewritten is not None
    first, commit = row.rewritten
    sized(config, "m4-max-64", MlxVersions(mlx_lm=first))
    with pytest.raises(UnsupportedError, match=commit):
        sized(config, "m4-max-64", MlxVersions(mlx_lm=(0, 30, 4)))


def test_rules_before_the_oldest_are_not_guessed() -> None:
    with pytest.raises(UnsupportedError, match=r"mlx-lm 0\.25\.3: .* from 0\.26\.0 on"):
        sized(LLAMA_3B, "m4-max-64", MlxVersions(mlx_lm=(0, 25, 3)))


# Measured at 38.0 GB on MLX 0.32.0; the width is fused from 0.32.2 on.
def test_an_answer_names_the_version_that_needs_more() -> None:
    config = json.loads((CASES / "qwen3_next.json").read_text())
    config |= {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256}
    workload = Workload(prompt_tokens=192 * 1024)
    newest, oldest = MlxVersions(), MlxVersions(mlx=(0, 32, 0))
    (note,) = notes(sized(config, "m5-max-128", newest), workload, "mlx-version")
    assert note.level == "warning"
    there = sized(config, "m5-max-128", oldest).figures_for(workload).moment.nbytes
    shown = f"{-(-there // 10**8) / 10} GB"  # rounded up
    assert note.message == f"the peak is for MLX 0.32.2 and newer; {shown} on 0.32.0"
    (note,) = notes(sized(config, "m5-max-128", oldest), workload, "mlx-version")
    assert (note.level, "MLX before 0.32.2; " in note.message) == ("info", True)
    assert not notes(sized(config, "m4-max-64", newest), workload, "mlx-version")
    assert not notes(sized(LLAMA_3B, "m5-max-128", newest), workload, "mlx-version")


# Heads of width 96 are fused from 0.32.1 on. The cache keeps a latent of other widths.
def test_the_heads_of_a_class_without_a_description_are_known() -> None:
    pytest.importorskip("mlx_lm")
    cases = json.loads((ROOT / "tests" / "trace" / "cases.json").read_text())
    config = next(case for case in cases if case["model_type"] == "longcat_flash")
    config |= {"qk_nope_head_dim": 96, "v_head_dim": 96}
    model = sized(config, "m4-max-64", MlxVersions(), method="auto")
    (note,) = notes(model, Workload(prompt_tokens=4096), "mlx-version")
    assert note.message.startswith("the peak is for MLX 0.32.1 and newer; ")


def test_an_answer_says_which_rules_it_followed() -> None:
    model = sized(LLAMA_3B, "m4-max-64", MlxVersions((0, 33, 1), (0, 32, 0)))
    found = estimate(model, Workload(prompt_tokens=100))
    assert "by the rules of mlx-lm 0.32.0 and MLX 0.33.1" in found.assumptions
    assert [note.code for note in found.notes if note.level == "warning"] == ["newer-version"]


def test_a_trace_says_that_its_classes_are_of_another_version() -> None:
    pytest.importorskip("mlx_lm")
    workload = Workload(prompt_tokens=100)
    old = MlxVersions(mlx_lm=(0, 31, 3))
    small = {**LLAMA_3B, "num_hidden_layers": 2}
    (note,) = notes(sized(small, "m4-max-64", old, method="trace"), workload, "other-classes")
    assert "of 0.31.3 it has the loop of generate alone" in note.message
    assert not notes(sized(small, "m4-max-64", old), workload, "other-classes")


def test_a_version_is_read_from_what_packages_print() -> None:
    assert parse_version("0.29.2.dev20251008+d5b6c8c") == (0, 29, 2)
    assert parse_version("0.32") == parse_version("0.32.0rc1") == (0, 32, 0)
    for text in ("", "0", "v0.32", "0.32.1.2", "0.32.x", "new", "0.32.1 or so"):
        with pytest.raises(InputError, match="expected a version such as"):
            parse_version(text)


def test_the_oldest_supported_mlx_is_the_one_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert set(re.findall(r'"mlx(?:\[cpu\])?>=([0-9.]+)', text)) == {format_version(OLDEST_MLX[:2])}


def test_every_change_has_a_source_and_a_version_that_exists() -> None:
    for row in CHANGES.values():
        assert re.search(r"\b[0-9a-f]{8,}\b|#\d{3,}", row["source"])
        assert {"since", "until"} & row.keys()
    for rows in KERNELS.values():
        sinces = [row["since"] for row in rows]
        assert sinces == sorted(sinces, reverse=True)
        assert sinces[0] <= MLX_VERSION


def test_a_version_from_before_a_class_is_rejected() -> None:
    model = build_model(GRANITE_H_SMALL, "config.json")
    with pytest.raises(UnsupportedError, match=r"0\.27\.1 has no class for it; .* 0\.28\.0"):
        as_of(model, MlxVersions(mlx_lm=(0, 27, 1)))
    assert as_of(model, MlxVersions(mlx_lm=(0, 28, 0))).model_type == model.model_type


def test_classes_that_were_added_are_those_of_mlx_lm() -> None:
    utils = pytest.importorskip("mlx_lm.utils")
    files = {path.stem for path in (Path(utils.__file__).parent / "models").glob("*.py")}
    rows = {model_type: class_row(model_type) for model_type in FAMILIES}
    added = ADDED | {model_type: row.since for model_type, row in rows.items() if row and row.since}
    assert not ADDED.keys() & rows.keys()
    assert added.keys() <= files | utils.MODEL_REMAPPING.keys()
    assert all(OLDEST_MLX_LM < version <= MlxVersions().mlx_lm for version in added.values())
