"""Adapters in MLX's layout and in PEFT's."""

from pathlib import Path

import pytest

from memfit.estimators.base.errors import CheckpointError, ConfigError
from memfit.estimators.checkpoint.adapters import read_adapter
from tests.sparse import Shapes, write_safetensors

LORA: Shapes = {
    "model.layers.0.self_attn.q_proj.lora_a": ("F32", (2560, 8)),
    "model.layers.0.self_attn.q_proj.lora_b": ("F32", (8, 4096)),
}


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text('{"fine_tune_type": "lora", "num_layers": 16}')
    return tmp_path


def test_an_mlx_lm_adapter_is_read_from_its_header(adapter: Path) -> None:
    write_safetensors(adapter / "adapters.safetensors", LORA)
    write_safetensors(adapter / "0000100_adapters.safetensors", LORA)
    found = read_adapter(adapter)
    assert sum(tensor.nbytes for tensor in found.tensors) == 4 * 8 * (2560 + 4096)
    assert found.file_bytes == (adapter / "adapters.safetensors").stat().st_size
    assert (found.weight_file, found.warnings) == ("adapters.safetensors", ())
    assert found.config["num_layers"] == 16


def test_a_peft_adapter_counts_with_a_warning(adapter: Path) -> None:
    write_safetensors(adapter / "adapter_model.safetensors", LORA)
    found = read_adapter(adapter)
    assert found.weight_file == "adapter_model.safetensors"
    assert "mlx-lm loads adapters.safetensors only" in found.warnings[0]


def test_an_adapter_in_both_layouts_counts_once(adapter: Path) -> None:
    write_safetensors(adapter / "adapters.safetensors", LORA)
    write_safetensors(adapter / "adapter_model.safetensors", {})
    assert len(read_adapter(adapter).tensors) == 2


def test_missing_parts_of_an_adapter_are_reported(adapter: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no adapters\.safetensors, so it is not an adapter"):
        read_adapter(adapter)
    write_safetensors(adapter / "adapters.safetensors", LORA)
    (adapter / "adapter_config.json").write_text("no")
    with pytest.raises(ConfigError, match=r"adapter_config\.json: the file is not JSON"):
        read_adapter(adapter)
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no adapter_config\.json next to adapters"):
        read_adapter(adapter)
    with pytest.raises(CheckpointError, match="no such file"):
        read_adapter(adapter / "gone")
