"""The memory of mlx_lm.convert, compared with the peak of real conversions on the CPU."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.base.dtypes import converted
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import ceil_div
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.devices import find_device
from memfit.estimators.plans.convert.plan import plan_convert
from memfit.estimators.results.advice import ConversionMemory
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.conversion import _parameters, conversion_memory
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.estimators.trace.conversion_peak import Parameter, conversion_peak
from memfit.estimators.weights.derived import TensorGroup
from tests.checkpoints import config_of, save_tokenizer
from tests.selection import quick

CPU = Device("cpu", "cpu", 0, 0, None, "flag", None, None)
SMALL = {"num_hidden_layers": 24, "hidden_size": 512, "vocab_size": 4096}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, **HEADS, "intermediate_size": 2048},
    "gemma3_text": {**SMALL, **HEADS, "intermediate_size": 2048},
    "phi3": {**SMALL, **HEADS, "num_key_value_heads": 8, "intermediate_size": 2048},
    "mamba2": {
        **SMALL,
        **{"num_heads": 16, "head_dim": 64, "intermediate_size": 1024, "state_size": 64},
    },
    "qwen3_moe": {**SMALL, **HEADS, "moe_intermediate_size": 256, "num_experts": 8},
}
FORMATS: dict[str, dict[str, Any]] = {
    "4 bits": {"quantize": True, "q_bits": 4},
    "8 bits": {"quantize": True, "q_bits": 8},
    "4 bits of float16": {"quantize": True, "q_bits": 4, "dtype": "float16"},
    "4 bits of float32": {"quantize": True, "q_bits": 4, "dtype": "float32"},
    "a cast": {"dtype": "float32"},
}
CASES = [
    *((model, "4 bits", 0) for model in MODELS),
    *(("llama", name, 0) for name in FORMATS if name != "4 bits"),
    ("qwen3_moe", "a cast", 0),
    ("llama", "4 bits", 8),
    ("gemma3_text", "a cast", 8),
]
TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@pytest.mark.parametrize(
    ("model", "name", "shard_mebibytes"),
    quick(CASES, [("qwen3_moe", "4 bits", 0), ("llama", "4 bits", 8)]),
)
def test_the_peak_is_that_of_a_real_conversion_whose_order_its_files_show(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    name: str,
    shard_mebibytes: int,
) -> None:
    pytest.importorskip("mlx_lm", reason="the oracle is mlx-lm itself")
    settings = FORMATS[name]
    config = config_of(model) | MODELS[model] | {"torch_dtype": "bfloat16"}
    source = _saved(tmp_path / "source", config)
    if shard_mebibytes:
        _divide(monkeypatch, shard_mebibytes << 20)
    # On a busy machine the CPU runs otherwise late: such a run is repeated.
    assert any(_is_near(source, tmp_path / f"out-{number}", settings) for number in range(3))
    files = list((tmp_path / "out-0").glob("*.safetensors"))
    assert len(files) > 1 or not shard_mebibytes


def _is_near(source: Path, target: Path, settings: dict[str, Any]) -> bool:
    """Convert a model, and return whether the peak in the order of its files is near the real one.

    Followed as if the CPU ran as late as it may; docs/accuracy.md has larger models.
    """
    peak = _peak_of(lambda: _convert(source, target, settings))
    files = sorted(target.glob("*.safetensors"))
    parameters = _read_back(source, files, settings.get("dtype", "bfloat16"))
    followed = conversion_peak(parameters, [_order(path) for path in files], CPU)
    return -0.05 * peak <= followed - peak <= 0.06 * peak


def _saved(path: Path, config: dict[str, Any]) -> Path:
    """Write a small random model with a tokenizer, experts one by one as on the Hub."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    model.set_dtype(mx.bfloat16)
    path.mkdir()
    save_tokenizer(path, has_chat_template=False)
    (path / "config.json").write_text(json.dumps(config))
    arrays: dict[str, Any] = {}
    for key, value in tree_flatten(model.parameters()):
        parent, stacked, leaf = key.partition(".switch_mlp.")
        if stacked:
            arrays |= {f"{parent}.experts.{i}.{leaf}": each for i, each in enumerate(value)}
        else:
            arrays[key] = value
    mx.save_safetensors(str(path / "model.safetensors"), arrays, metadata={"format": "pt"})
    return path


def _divide(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Let mlx-lm write smaller files than of 5 GiB."""
    from importlib import import_module

    def make_shards(weights: dict[str, Any]) -> list[dict[str, Any]]:
        shards: list[dict[str, Any]] = [{}]
        for key, value in weights.items():
            if sum(each.nbytes for each in shards[-1].values()) + value.nbytes > most:
                shards.append({})
            shards[-1][key] = value
        return shards

    monkeypatch.setattr(import_module("mlx_lm.utils"), "make_shards", make_shards)


def _convert(source: Path, target: Path, settings: dict[str, Any]) -> None:
    from mlx_lm.convert import convert

    convert(str(source), str(target), **settings)


def _peak_of(run: Callable[[], None]) -> int:
    import mlx.core as mx

    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run()
    return int(mx.get_peak_memory() - before)


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return header


def _order(path: Path) -> list[str]:
    header = _header(path)
    return sorted(header, key=lambda name: header[name]["data_offsets"])


def _groups(files: list[Path]) -> dict[str, TensorGroup]:
    return {
        name: TensorGroup(name, each["dtype"], tuple(each["shape"]), 0)
        for path in files
        for name, each in _header(path).items()
    }


def _read_back(source: Path, files: list[Path], dtype: str) -> dict[str, Parameter]:
    """Return what the conversion has read and written, from both directories."""
    stored, written = _groups([source / "model.safetensors"]), _groups(files)
    parameters: dict[str, Parameter] = {}
    for name, group in written.items():
        base, _, leaf = name.rpartition(".")
        if leaf in ("scales", "biases") and f"{base}.weight" in written:
            continue
        parts = [f"{base}.{each}" for each in ("scales", "biases")] if leaf == "weight" else []
        arrays = (group, *(written[part] for part in parts if part in written))
        whole, reads = _source_of(name, stored)
        cast = whole._replace(dtype=TYPES[dtype])
        made = Parameter(whole, cast, arrays, reads)
        parameters |= {each.name: made for each in arrays}
    return parameters


def _source_of(name: str, stored: dict[str, TensorGroup]) -> tuple[TensorGroup, int]:
    if name in stored:
        return stored[name], 1
    parent, _, leaf = name.partition(".switch_mlp.")
    one = [each for key, each in stored.items() if key.startswith(f"{parent}.experts.")]
    parts = [each for each in one if each.name.endswith(leaf)]
    return parts[0]._replace(name=name, shape=(len(parts), *parts[0].shape)), len(parts)


PUBLISHED = {
    # mlx-lm issue 1121: parameters of a layer and outside of it, and the peak in 10 MB.
    "qwen3-0.6b": (dict(hidden=1024, inner=3072, layers=28, q=16, kv=8, vocab=151936), True, 99),
    "TinyLlama": (dict(hidden=2048, inner=5632, layers=22, q=32, kv=4, vocab=32000), False, 140),
    "Mistral-7B": (dict(hidden=4096, inner=14336, layers=32, q=32, kv=8, vocab=32768), False, 591),
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("device", ["m4-max-64", "m4-16"])
def test_the_upper_end_on_a_mac_is_within_12_percent_of_published_peaks(
    tmp_path: Path, name: str, device: str
) -> None:
    sizes, tied, peak = PUBLISHED[name]
    config = {
        "model_type": "qwen3" if tied else "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["inner"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["q"],
        "num_key_value_heads": sizes["kv"],
        "head_dim": 64 if name == "TinyLlama" else 128,
        "vocab_size": sizes["vocab"],
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = memory(_sized(str(tmp_path / "config.json"), find_device(device)))
    assert abs(found.peak_bytes / (peak * 10**7) - 1) <= 0.12


def _sized(reference: str, device: Device | None, bits: int = 4) -> SizedModel:
    return Catalog().sized(reference, quantize=converted(bits), device=device)


def memory(sized: SizedModel) -> ConversionMemory:
    found = conversion_memory(sized)
    assert found
    return found


def test_a_conversion_of_many_files_takes_one_file_and_what_is_read_ahead() -> None:
    found = memory(_sized("llama-3.1-70b", find_device("m4-max-64")))
    assert found.shards == ceil_div(found.output_bytes, 5 << 30)
    assert found.largest_shard_bytes < found.least_peak_bytes <= found.peak_bytes
    assert found.peak_bytes < found.output_bytes / 3
    assert (found.source_bytes > 141e9, found.verdict) == (True, "fits")


def test_experts_of_files_with_one_matrix_each_are_stacked_on_the_way() -> None:
    parameters = list(_parameters(_sized("qwen3-235b-a22b", None)))
    stacked = [each for each in parameters if each.reads > 1]
    assert {each.reads for each in stacked} == {128}
    assert len(stacked) == 3 * 94


def test_what_is_not_converted_has_no_plan() -> None:
    with pytest.raises(UnsupportedError, match="quantised already"):
        plan_convert(_sized("qwen3-4b-4bit", None))
    with pytest.raises(UnsupportedError, match="quantize"):
        plan_convert(Catalog().sized("qwen3-0.6b", device=None))
