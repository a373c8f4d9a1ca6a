"""Every sample, compared with memfit's answer and, where mlx-lm is installed, with its classes.

A file in sample_configs/ is a case; its README explains the figures.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.registry import build_model
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.local.samples import Sample, read_sample
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.mlx.kv_cache import kv_cache, state_bytes
from memfit.estimators.weights.derived import derive
from memfit.estimators.weights.footprint import load_footprint
from memfit.estimators.weights.quantization_plan import declared
from tests.selection import QUICK_SAMPLES, quick

FOLDER = Path(__file__).parents[1] / "sample_configs"
PATHS = {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}

ONE_TOKEN = Workload(prompt_tokens=1)
PROMPT = Workload(prompt_tokens=8192)

# metadata.total_size of these models' published safetensors indexes.
PUBLISHED_BYTES = {
    "gpt-oss-120b": 65_248_815_744,
    "gpt-oss-20b": 13_761_264_768,
    "lfm2.5-8b-a1b-4bit": 4_764_197_120,
    "mamba-2.8b": 11_073_382_400,
    "minimax-m2.5-4bit": 128_666_664_960,
    "qwen3-14b-4bit": 8_307_783_680,
    "qwen3-8b-4bit": 4_607_731_712,
    "qwen3-next-80b-a3b-4bit": 44_844_060_160,
    "smollm3-3b": 6_150_197_248,
}

# Parameters of these models' safetensors as the Hugging Face Hub counts them.
PUBLISHED_PARAMETERS = {
    "gemma-3-12b": 12_187_325_040,
    "gemma-3-27b": 27_432_406_640,
    "gemma-3-4b": 4_300_079_472,
    "gemma-4-26b-a4b": 25_805_936_206,
    "gemma-4-31b": 31_273_088_876,
    "llama-4-scout": 108_641_793_536,
    "nemotron-3-nano-30b-a3b": 31_577_940_288,
    "qwen3-vl-4b": 4_437_815_808,
}

LAYER_KINDS = {
    "chunked_attention",
    "full_attention",
    "gated_delta",
    "latent_attention",
    "mamba",
    "mamba2",
    "rg_lru",
    "rwkv",
    "short_convolution",
    "sliding_attention",
    "sparse_attention",
}


@pytest.fixture(params=quick(PATHS.values(), QUICK_SAMPLES), ids=list(PATHS))
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


def _model(sample: Sample) -> Model:
    return build_model(sample.config, sample.name)


def test_a_sample_has_the_figures_memfit_gives(path: Path) -> None:
    checkpoint = open_checkpoint(str(path))
    model = build_model(checkpoint.config, checkpoint.config_name)
    block = declared(checkpoint.config, model, checkpoint.config_name)
    footprint, totals = load_footprint(checkpoint, model, block), derive(model, block.plan)
    kv = kv_cache(model, PROMPT)
    answer = {
        "parameters": footprint.parameters,
        "weights_bytes": footprint.nbytes,
        "loaded_parameters": totals.parameters - totals.unloaded_parameters,
        "loaded_bytes": footprint.loaded_bytes,
        "kv_bytes_per_token": kv.bytes_per_token,
        "kv_bytes_at_8192_tokens": kv.nbytes,
        "state_bytes": state_bytes(model, 1),
    }
    assert answer == _figures(read_sample(path))
    assert footprint.basis == "derived"
    assert not [note for note in footprint.notes if note.level == "warning"]


def test_a_sample_equals_the_model_class(path: Path) -> None:
    pytest.importorskip("mlx_lm", reason="the oracle is mlx-lm itself")
    from tests.oracle import Oracle, cache_bytes

    sample = read_sample(path)
    model, figures = _model(sample), _figures(sample)
    oracle = Oracle(sample.config, model.dtype)
    assert oracle.parameters() == figures["loaded_parameters"]
    _quantize_as_loaded(oracle.model, sample.config)
    assert oracle.weight_bytes() == figures["loaded_bytes"]
    # Recurrent layers loop over tokens in Python; their states are the same after one.
    workload = ONE_TOKEN if figures["state_bytes"] else PROMPT
    kv, state = cache_bytes(oracle.run(workload))
    assert kv == kv_cache(model, workload).nbytes
    assert state == figures["state_bytes"]


def test_published_bytes_are_reproduced() -> None:
    expected = {name: read_sample(PATHS[name]).expected for name in PUBLISHED_BYTES}
    assert {name: figures["weights_bytes"] for name, figures in expected.items()} == PUBLISHED_BYTES
    for name, nbytes in PUBLISHED_BYTES.items():
        assert f"{nbytes:,}" in expected[name]["verified"]


def test_published_parameters_are_reproduced() -> None:
    expected = {name: read_sample(PATHS[name]).expected for name in PUBLISHED_PARAMETERS}
    found = {name: figures["parameters"] for name, figures in expected.items()}
    assert found == PUBLISHED_PARAMETERS
    for name, parameters in PUBLISHED_PARAMETERS.items():
        assert f"{parameters:,}" in expected[name]["verified"]


def test_samples_cover_every_layer_kind_and_size() -> None:
    samples = [read_sample(path) for path in PATHS.values()]
    assert {kind for sample in samples for kind in _model(sample).layer_kinds()} == LAYER_KINDS
    parameters = [sample.expected["parameters"] for sample in samples]
    assert min(parameters) == 596_049_920
    assert max(parameters) > 10**12
    assert len(samples) >= 60


def test_the_readme_has_a_row_for_every_sample() -> None:
    rows = [line for line in (FOLDER / "README.md").read_text().splitlines() if ".yaml)" in line]
    assert [row.split("`")[1] for row in rows] == list(PATHS)


def _figures(sample: Sample) -> dict[str, int]:
    """The expected figures; by default all parameters are loaded."""
    figures = dict(sample.expected)
    assert figures.pop("verified")
    figures.setdefault("loaded_parameters", figures["parameters"])
    figures.setdefault("loaded_bytes", figures["weights_bytes"])
    return figures


def _quantize_as_loaded(model: Any, config: Mapping[str, Any]) -> None:
    """Quantise in place as mlx-lm's load_model (utils.py), which uses the scales it finds."""
    import mlx.nn as nn

    block = config.get("quantization")
    only = ""
    if config.get("quantization_config", {}).get("quant_method") == "mxfp4":
        block, only = {"group_size": 32, "bits": 4, "mode": "mxfp4"}, ".experts."
    if block is None:
        return
    keeps = getattr(model, "quant_predicate", None)

    def has_scales(path: str, module: Any) -> bool:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % block["group_size"]:
            return False
        return only in path and (keeps is None or keeps(path, module) is not False)

    def format_of(path: str, module: Any) -> Any:
        entry = block.get(path, has_scales(path, module))
        return dict(entry) if isinstance(entry, Mapping) else entry

    mode = block.get("mode", "affine")
    nn.quantize(model, block["group_size"], block["bits"], mode=mode, class_predicate=format_of)
