"""Models in Ollama's store and ModelScope's cache, found through the files those programs write."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memfit.estimators.base.errors import CheckpointError, MemfitError, UnsupportedError
from memfit.estimators.checkpoint.opening import open_checkpoint
from tests.gguf.writing import tensor, write
from tests.models import write_config
from tests.sparse import write_safetensors

WEIGHTS = (tensor("token_embd.weight", (64, 8)),)
DIGEST = "3e4cb14174460404e7a233e531675303b2fbf7749c02f91864fe311ab6344e4f"
PROJECTOR = "a" * 64


def layer(kind: str, digest: str = DIGEST, size: Any = 1000) -> dict[str, Any]:
    media = f"application/vnd.ollama.image.{kind}"
    return {"mediaType": media, "digest": f"sha256:{digest}", "size": size}


def write_manifest(store: Path, name: str, layers: Any) -> Path:
    """Write a manifest as Ollama does: docker's schema, a file without a suffix."""
    path = store / "manifests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return path


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with qwen3:4b as a GGUF blob."""
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    (tmp_path / "blobs").mkdir()
    write(tmp_path / "blobs" / f"sha256-{DIGEST}", {"general.architecture": "qwen3"}, WEIGHTS)
    parameters = {"num_ctx": 16_384, "num_gpu": 10, "stop": ["<|im_end|>"], "temperature": 0.6}
    (tmp_path / "blobs" / f"sha256-{'c' * 64}").write_text(json.dumps(parameters))
    layers = [layer("model"), layer("template", "b" * 64), layer("params", "c" * 64)]
    write_manifest(tmp_path, "registry.ollama.ai/library/qwen3/4b", layers)
    return tmp_path


def error_of(reference: str) -> str:
    with pytest.raises(MemfitError) as caught:
        open_checkpoint(reference)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_a_name_is_resolved_through_the_manifest_to_the_blob(store: Path) -> None:
    checkpoint = open_checkpoint("ollama:qwen3:4b")
    assert (checkpoint.id, checkpoint.source) == ("ollama:qwen3:4b", "gguf")
    assert checkpoint.tensors == WEIGHTS
    assert checkpoint.run_options == {"num_ctx": 16_384, "num_gpu": 10}
    assert checkpoint.config_name.endswith(f"sha256-{DIGEST}")
    assert open_checkpoint(str(store / "blobs" / f"sha256-{DIGEST}")).tensors == WEIGHTS


def test_the_default_store_is_in_the_home_directory(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OLLAMA_MODELS")
    home = store / "home"
    (home / ".ollama").mkdir(parents=True)
    (home / ".ollama" / "models").symlink_to(store)
    monkeypatch.setenv("HOME", str(home))
    assert open_checkpoint("ollama:qwen3:4b").tensors == WEIGHTS


@pytest.mark.parametrize(
    ("name", "manifest"),
    [
        ("ollama:gemma3", "registry.ollama.ai/library/gemma3/latest"),
        ("ollama:someone/tuned:q8", "registry.ollama.ai/someone/tuned/q8"),
        ("ollama:hf.co/org/model-GGUF:Q4_K_M", "hf.co/org/model-GGUF/Q4_K_M"),
    ],
)
def test_namespace_host_and_tag_have_defaults(store: Path, name: str, manifest: str) -> None:
    write_manifest(store, manifest, [layer("model")])
    assert open_checkpoint(name).id == name


def test_projectors_and_adapters_are_skipped(store: Path) -> None:
    layers = [layer("model"), layer("projector", PROJECTOR, 851251104)]
    write_manifest(store, "registry.ollama.ai/library/llava/7b", layers)
    checkpoint = open_checkpoint("ollama:llava:7b")
    assert [(left.name, left.nbytes) for left in checkpoint.skipped_files] == [
        ("projector", 851251104)
    ]


def test_a_missing_name_is_reported_with_the_available_ones(store: Path) -> None:
    assert "does not hold it; it has qwen3:4b; ollama pull qwen3:8b" in error_of("ollama:qwen3:8b")
    assert "does not hold it; ollama pull phi4" in error_of("ollama:phi4")


@pytest.mark.parametrize(
    "name", ["", ":", "../x", "a/b/c/d", "a:b:c", "qwen3:../../etc", "..", "a//b", "x\0y"]
)
def test_an_invalid_name_is_rejected(store: Path, name: str) -> None:
    assert "no name of Ollama's" in error_of(f"ollama:{name}")


@pytest.mark.parametrize(
    ("layers", "fault"),
    [
        (None, "layers: missing"),
        (1, "layers: expected a list"),
        ([1], "layers[0]: expected a mapping"),
        ([{"mediaType": "x"}], "layers[0].digest: missing"),
        ([{"digest": DIGEST}], "layers[0].mediaType: missing"),
        ([layer("model", "../../../etc/passwd")], "digest: expected sha256: and"),
        ([layer("model", DIGEST, -1)], "size: expected 0 to"),
        ([layer("model", DIGEST, True)], "size: expected an integer"),
        ([layer("model", "d" * 64)], "no such file"),
    ],
)
def test_a_broken_manifest_is_rejected(store: Path, layers: Any, fault: str) -> None:
    write_manifest(store, "registry.ollama.ai/library/broken/latest", layers)
    assert fault in error_of("ollama:broken")


def test_a_model_stored_as_single_tensors_is_not_supported(store: Path) -> None:
    layers = [layer("tensor"), layer("tensor", "b" * 64)]
    write_manifest(store, "registry.ollama.ai/library/mlx/latest", layers)
    with pytest.raises(UnsupportedError, match="0 GGUF layers"):
        open_checkpoint("ollama:mlx")


@given(st.binary(max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_arbitrary_manifest_gives_a_one_line_error(store: Path, content: bytes) -> None:
    path = write_manifest(store, "registry.ollama.ai/library/any/latest", [])
    path.write_bytes(content)
    assert "Traceback" not in error_of("ollama:any")


@pytest.mark.parametrize(
    "layout",
    [
        "models/org/Qwen2___5-7B",  # modelscope 1.11 to 1.37, MODELSCOPE_CACHE or its hub/models
        "hub/models/org/Qwen2___5-7B",
        "hub/org/Qwen2___5-7B",
        "org/Qwen2.5-7B",
        "models/org--Qwen2.5-7B/snapshots/master",  # modelscope_hub
    ],
)
def test_a_modelscope_snapshot_is_found_in_every_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path))
    folder = write_config(tmp_path / layout, {"model_type": "qwen2"})
    write_safetensors(folder / "model.safetensors", {"a": ("BF16", (4,))})
    (folder / ".msc").write_bytes(b"\x80\x04")  # ModelScope's record of the files' revisions
    checkpoint = open_checkpoint("modelscope:org/Qwen2.5-7B")
    assert checkpoint.source == "local"
    assert checkpoint.tensors == (("a", "BF16", (4,), 8),)


def test_a_missing_snapshot_gives_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path))
    assert "ModelScope's cache does not hold it" in error_of("modelscope:org/name")
    for name in ("name", "org/..", "../x", ""):
        with pytest.raises(CheckpointError, match="write modelscope:org/name"):
            open_checkpoint(f"modelscope:{name}")
