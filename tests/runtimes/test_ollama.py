"""Ollama's own context, batch and layers, by its source (server/routes.go, server/sched.go)."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import Memfit
from tests.gguf.writing import recorded, write

DIGEST, PARAMETERS = "a" * 64, "b" * 64


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with qwen3moe, whose manifest has no parameters yet."""
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    (tmp_path / "blobs").mkdir()
    entry = recorded()["qwen3moe"]
    metadata = {**entry.metadata, "qwen3moe.context_length": 40_960}
    write(tmp_path / "blobs" / f"sha256-{DIGEST}", metadata, entry.tensors)
    set_parameters(tmp_path, {})
    return tmp_path


def set_parameters(store: Path, parameters: dict[str, Any]) -> None:
    (store / "blobs" / f"sha256-{PARAMETERS}").write_text(json.dumps(parameters))
    layers = [
        {
            "mediaType": f"application/vnd.ollama.image.{kind}",
            "digest": f"sha256:{digest}",
            "size": 1000,
        }
        for kind, digest in (("model", DIGEST), ("params", PARAMETERS))
    ]
    manifest = store / "manifests" / "registry.ollama.ai" / "library" / "qwen3" / "4b"
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))


def run(memfit: Memfit, *options: str, line: str = "ollama run qwen3:4b") -> dict[str, Any]:
    workload: dict[str, Any] = memfit("--from", line, *options, "--json").json["workload"]
    return workload


@pytest.mark.parametrize(
    ("machine", "tokens", "batch"),
    [
        ("rtx-3070", 4096, 512),  # 8 GiB
        ("rtx-4090", 32_768, 1024),  # 24 GiB
        ("h100-80", 40_960, 2048),  # 80 GiB: all of the model's, and room for a large batch
    ],
)
def test_without_num_ctx_the_context_is_by_the_memory_of_the_gpu(
    memfit: Memfit, store: Path, machine: str, tokens: int, batch: int
) -> None:
    found = run(memfit, "--device", machine)
    assert (found["prompt_tokens"], found["prefill_step"]) == (tokens, batch)


def test_a_manifests_own_parameters_come_first(memfit: Memfit, store: Path) -> None:
    set_parameters(store, {"num_ctx": 16_384, "num_gpu": 2, "temperature": 0.6})
    where = ("--device", "rtx-3070", "--host-memory", "64GB", "--json")
    result = memfit("--from", "ollama run qwen3:4b hello", *where).json
    assert result["workload"]["prompt_tokens"] == 16_384
    assert result["memories"][0]["layers"] == 1  # of two layers the head is one
    assert result["actions"][0]["commands"] == ["ollama run qwen3:4b"]
    # Another context is not what that command takes.
    other = memfit("ollama:qwen3:4b", "--runtime", "ollama", "--context", "8k", "--json").json
    assert not any("ollama run" in str(action["commands"]) for action in other["actions"])


def test_requests_at_once_and_the_type_of_the_cache_are_variables(
    memfit: Memfit, store: Path
) -> None:
    variables = "OLLAMA_CONTEXT_LENGTH=8192 OLLAMA_NUM_PARALLEL=2 OLLAMA_KV_CACHE_TYPE=q8_0"
    found = memfit("--from", f"{variables} ollama run qwen3:4b", "--json").json
    asked = ("--context", "8192", "--batch", "2", "--cache-type", "q8_0", "--runtime", "ollama")
    assert found["peak_bytes"] == memfit("ollama:qwen3:4b", *asked, "--json").json["peak_bytes"]


def test_a_tag_is_pointed_to_the_store(memfit: Memfit) -> None:
    assert "of Ollama's store it is ollama:my-own:8b" in memfit("my-own:8b").err
