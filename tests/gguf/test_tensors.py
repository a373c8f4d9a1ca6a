"""A GGUF file whose tensors are not those of its metadata has no figures."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from memfit.estimators.base.errors import CheckpointError
from memfit.estimators.checkpoint.manifest import Tensor
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.sizing.opening import size
from tests.cli.running import Memfit
from tests.gguf.writing import recorded, tensor, write

MODELS = recorded()


def _fault(path: Path, name: str, tensors: Sequence[Tensor]) -> str:
    entry = MODELS[name]
    file = write(path / "model.gguf", entry.metadata, tensors)
    with pytest.raises(CheckpointError) as found:
        size(open_checkpoint(str(file)), device=None)
    return str(found.value)


@pytest.mark.parametrize("name", MODELS)
def test_a_file_of_any_architecture_without_a_layer_is_rejected(name: str, tmp_path: Path) -> None:
    tensors = MODELS[name].tensors
    for block in ("blk.0.", "blk.1."):
        rest = [t for t in tensors if not t.name.startswith(block)]
        assert f"{block.rstrip('.')}: no tensor of it" in _fault(tmp_path, name, rest)


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3moe"])
def test_a_layer_has_attention_and_a_feed_forward_block(name: str, tmp_path: Path) -> None:
    for beginning, said in (("attn_", "its attention"), ("ffn_", "its feed-forward block")):
        rest = [t for t in MODELS[name].tensors if not t.name.startswith(f"blk.1.{beginning}")]
        assert f"blk.1: no tensor of {said}" in _fault(tmp_path, name, rest)


@pytest.mark.parametrize("place", ["blk.1.attn_k.weight", "blk.0.attn_v.weight"])
def test_keys_and_values_have_the_widths_of_the_metadata(place: str, tmp_path: Path) -> None:
    tensors = [
        tensor(t.name, (t.shape[0], 2 * t.shape[1])) if t.name == place else t
        for t in MODELS["llama"].tensors
    ]
    assert f"{place}: shape" in _fault(tmp_path, "llama", tensors)


def test_the_embedding_has_the_width_of_the_metadata(tmp_path: Path) -> None:
    tensors = [
        tensor(t.name, (2 * t.shape[0], t.shape[1])) if t.name == "token_embd.weight" else t
        for t in MODELS["llama"].tensors
    ]
    assert "where embedding_length is" in _fault(tmp_path, "llama", tensors)


@pytest.mark.parametrize("shape", [(0,), (64, 0), (0, 64)])
def test_a_dimension_of_0_is_bad_input(
    shape: tuple[int, ...], tmp_path: Path, memfit: Memfit
) -> None:
    entry = MODELS["llama"]
    tensors = (*entry.tensors, tensor("rope_freqs.weight", shape))
    file = write(tmp_path / "model.gguf", entry.metadata, tensors)
    run = memfit("estimate", file, "--memory", "16GB")
    assert (run.code, run.out) == (2, "")
    assert "a dimension of 0" in run.err


def test_a_file_without_its_layers_does_not_pass_the_gate(tmp_path: Path, memfit: Memfit) -> None:
    entry = MODELS["llama"]
    only = [t for t in entry.tensors if t.name == "token_embd.weight"]
    write(tmp_path / "model.gguf", entry.metadata, only)
    policy = tmp_path / "memfit.yaml"
    policy.write_text(
        "schema: memfit.policy/1\n"
        "targets: {it: {path: model.gguf, memory: 16GB, workload: {context: 4k},"
        " limits: {peak: 90%}}}\n"
    )
    assert memfit("gate", "check", "--policy", policy).code == 2
