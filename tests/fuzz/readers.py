"""Every reader of a file, as a function of the file's bytes, with a seed that it accepts.

Each may raise MemfitError with one line, and nothing else; tests and the fuzzers in
benchmarks/fuzz hold them to it.
"""

import hashlib
import json
import os
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from memfit.cli.prompts import prompt_list
from memfit.estimators.base.errors import CheckpointError, MemfitError
from memfit.estimators.base.reading.request_trace import read_request_trace
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.adapters import read_adapter
from memfit.estimators.checkpoint.checkpoint_files import Directory
from memfit.estimators.checkpoint.config import read_model_config
from memfit.estimators.checkpoint.gguf.files import read_gguf_file
from memfit.estimators.checkpoint.gguf.header import read_gguf
from memfit.estimators.checkpoint.hub.listing import parse_listing
from memfit.estimators.checkpoint.local.directory import read_directory
from memfit.estimators.checkpoint.local.samples import read_sample
from memfit.estimators.checkpoint.local.stores import open_store
from memfit.estimators.checkpoint.manifest import Tensor
from memfit.estimators.checkpoint.safetensors import (
    LENGTH_BYTES,
    checked_header_bytes,
    parse_header,
)
from memfit.estimators.checkpoint.shards import read_index
from memfit.estimators.gate.baseline import read_baseline
from memfit.estimators.gate.policy import read_policy
from memfit.estimators.machine.device import DEFAULT_REGIME
from memfit.estimators.machine.devices import find_device
from memfit.estimators.machine.hosts import read_hosts
from memfit.estimators.plans.experts.routing import read_profile
from memfit.estimators.plans.ranks.fleet import read_fleet
from memfit.estimators.plans.train.recipe_file import read_recipe
from memfit.estimators.plans.wired.scenario import read_scenario
from memfit.estimators.sizing.estimate import estimate
from memfit.estimators.sizing.opening import size
from memfit.estimators.trace.graph_format import Array, Call, Node, Trace, from_json, to_json
from memfit.estimators.weights.expert_slots import ExpertLayer
from memfit.probes.experiments.sweep import SweepCheckpoint
from memfit.probes.experts import prepacked
from memfit.probes.measurement_json import (
    collection_text,
    parse_collection,
    parse_measurement,
    to_text,
)
from memfit.probes.prompt_caches.stored import checked_sha256
from memfit.probes.store import Store
from memfit.probes.training_data import read_training_data
from tests.gguf.writing import InMemory, header, tensor
from tests.models import QWEN3_4B
from tests.probes.measurements import measurement
from tests.sparse import header_of

DATA_BYTES = 2**40  # the header does not have the file's length: there is always enough data


class Reader(NamedTuple):
    """A reader of bytes with its own directory, and bytes that it accepts."""

    read: Callable[[bytes, Path], Any]
    seed: bytes


def outcome(reader: Reader, content: bytes, directory: Path) -> str | None:
    """Return the error for a content, None when it is accepted; other exceptions propagate."""
    try:
        reader.read(content, directory)
    except MemfitError as error:
        return str(error)
    return None


def _safetensors(content: bytes, directory: Path) -> None:
    path = directory / "model.safetensors"
    first = content[:LENGTH_BYTES]
    if len(first) < LENGTH_BYTES:
        raise CheckpointError(f"{path}: too short")
    end = checked_header_bytes(first, len(content), path)
    parse_header(first, content[LENGTH_BYTES:end], len(content), path)


def _gguf(content: bytes, directory: Path) -> None:
    read_gguf(InMemory(content, max(len(content), DATA_BYTES)), "model.gguf")


def _gguf_estimate(content: bytes, directory: Path) -> None:
    path = directory / "model.gguf"
    with path.open("wb") as file:
        file.write(content)
        file.truncate(max(len(content), 2**30))
    sized = size(read_gguf_file(path), device=None)
    workload = Workload(prompt_tokens=300, prefill_step=512, quantized_kv_start=0)
    estimate(sized, workload)


def _config(content: bytes, directory: Path) -> None:
    (directory / "config.json").write_bytes(content)
    read_model_config(directory / "config.json")


def _config_estimate(content: bytes, directory: Path) -> None:
    (directory / "config.json").write_bytes(content)
    sized = size(read_directory(directory), device=None)
    estimate(sized, Workload(prompt_tokens=300))


def _sample(content: bytes, directory: Path) -> None:
    (directory / "sample.yaml").write_bytes(content)
    read_sample(directory / "sample.yaml")


def _policy(content: bytes, directory: Path) -> None:
    (directory / "memfit.yaml").write_bytes(content)
    read_policy(directory / "memfit.yaml")


def _lock(content: bytes, directory: Path) -> None:
    (directory / "memfit.lock").write_bytes(content)
    read_baseline(directory / "memfit.lock")


def _index(content: bytes, directory: Path) -> None:
    name = "model.safetensors.index.json"
    (directory / name).write_bytes(content)
    read_index(Directory(directory), name)


def _listing(content: bytes, directory: Path) -> None:
    parse_listing(content, directory)


def _adapter(content: bytes, directory: Path) -> None:
    (directory / "adapter_config.json").write_bytes(content)
    (directory / "adapters.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    read_adapter(directory)


def _manifest(content: bytes, directory: Path) -> None:
    path = directory / "manifests/registry.ollama.ai/library/any/latest"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    before = os.environ.get("OLLAMA_MODELS")
    os.environ["OLLAMA_MODELS"] = str(directory)
    try:
        open_store("ollama:any")
    finally:
        if before is None:
            del os.environ["OLLAMA_MODELS"]
        else:
            os.environ["OLLAMA_MODELS"] = before


def _measurement(content: bytes, directory: Path) -> None:
    parse_measurement(content, directory / "measurement.json")


def _collection(content: bytes, directory: Path) -> None:
    parse_collection(content, directory / "measurements.json")


def _hosts(content: bytes, directory: Path) -> None:
    (directory / "hosts.json").write_bytes(content)
    read_hosts(directory / "hosts.json", find_device=find_device, os_regime=DEFAULT_REGIME)


def _fleet(content: bytes, directory: Path) -> None:
    (directory / "fleet.yaml").write_bytes(content)
    read_fleet(directory / "fleet.yaml")


def _scenario(content: bytes, directory: Path) -> None:
    (directory / "scenario.yaml").write_bytes(content)
    read_scenario(directory / "scenario.yaml")


def _recipe(content: bytes, directory: Path) -> None:
    (directory / "lora.yaml").write_bytes(content)
    read_recipe(directory / "lora.yaml", {})


def _training_data(content: bytes, directory: Path) -> None:
    (directory / "train.jsonl").write_bytes(content)
    read_training_data(directory, None, {}, mask_prompt=True)


def _prompts(content: bytes, directory: Path) -> None:
    (directory / "prompts.txt").write_bytes(content)
    prompt_list("--prompts", f"@{directory / 'prompts.txt'}")


def _traffic(content: bytes, directory: Path) -> None:
    (directory / "traffic.csv").write_bytes(content)
    read_request_trace(directory / "traffic.csv", agents=True)


def _traffic_lines(content: bytes, directory: Path) -> None:
    (directory / "traffic.jsonl").write_bytes(content)
    read_request_trace(directory / "traffic.jsonl", agents=True)


def _profile(content: bytes, directory: Path) -> None:
    (directory / "profile.json").write_bytes(content)
    layers = [ExpertLayer(index, 4, 2, False, 100) for index in (0, 1)]
    read_profile(directory / "profile.json", layers, "any")


def _pack(content: bytes, directory: Path) -> None:
    (directory / prepacked.MANIFEST).write_bytes(content)
    prepacked.check(directory, prepacked.read(directory), directory, "a" * 64)


def _stored_cache(content: bytes, directory: Path) -> None:
    (directory / "a.safetensors").write_bytes(b"any")
    (directory / "a.safetensors.sha256").write_bytes(content)
    checked_sha256(directory / "a.safetensors")


def _sweep(content: bytes, directory: Path) -> None:
    (directory / "sweep.json").write_bytes(content)
    SweepCheckpoint(directory / "sweep.json", Store(directory)).measured()


def _trace(content: bytes, directory: Path) -> None:
    from_json(content, directory / "trace.json")


def _safetensors_seed() -> bytes:
    text, _ = header_of({"a.weight": ("BF16", (2, 0)), "b": ("F32", (0,))}, {"format": "mlx"})
    return len(text).to_bytes(8, "little") + text


def _gguf_seed() -> bytes:
    shapes = {
        "token_embd.weight": (64, 100),
        "output_norm.weight": (64,),
        **{
            f"blk.{i}.{name}.weight": shape
            for i in range(2)
            for name, shape in {
                "attn_q": (64, 64),
                "attn_k": (64, 32),
                "ffn_up": (64, 128),
                "ffn_gate_inp": (64, 4),
                "ffn_up_exps": (64, 32, 4),
            }.items()
        },
    }
    tensors = [
        Tensor(name, "Q8_0", shape, prod(shape) // 32 * 34) for name, shape in shapes.items()
    ]
    tensors.append(tensor("rope_freqs.weight", (8,), "F32"))
    metadata = {
        "general.architecture": "gemma3",
        "gemma3.block_count": 2,
        "gemma3.context_length": 4096,
        "gemma3.embedding_length": 64,
        "gemma3.attention.head_count": [4, 4],
        "gemma3.attention.head_count_kv": 2,
        "gemma3.attention.key_length": 16,
        "gemma3.attention.sliding_window": 512,
        "gemma3.attention.sliding_window_pattern": [True, False],
        "gemma3.expert_used_count": 2,
        "gemma3.rope.freq_base": 1e6,
        "tokenizer.ggml.tokens": ["a", "bc"],
    }
    return header(metadata, tensors)


_SAMPLE = b"""schema: memfit.sample/1
name: tiny
source: none
config: {model_type: llama, hidden_size: 64, layers: [1, 2.5, yes]}
expected: {weights: 1}
"""
_POLICY = b"""schema: memfit.policy/1
targets:
  chat:
    model: ./model
    workload: {context: 4k, batch: 1}
    device: m4-max-64
    training: {batch_size: 1, num_layers: 2, max_seq_length: 64}
    limits: {peak: 40GB, training_peak: 90%}
"""
_INDEX = {"metadata": {}, "weight_map": {"a": "model.safetensors"}}
_LISTING = {
    "sha": "0" * 40,
    "siblings": [{"rfilename": "config.json", "size": 10, "blobId": "1" * 40}],
}
_LAYER = {
    "mediaType": "application/vnd.ollama.image.model",
    "digest": f"sha256:{'a' * 64}",
    "size": 10,
}

_HOSTS = [{"ssh": "a", "ips": ["10.0.1.1"], "device": "m1-8"}, {"ssh": "b", "memory": "24GB"}]
_FLEET = b"""schema: memfit.fleet/1
machines: [{name: desk, device: m4-max-128, count: 2}]
models: [{model: qwen3-0.6b.yaml, context: 16k, quantize: 4, copies: 2}]
"""
_SCENARIO = b"""schema: memfit.wired-scenario/1
device: m4-pro-24
policies: {a: {kind: sum, cap: 14GB}, b: {kind: speculative, limit: 12GB, additional: 2GB}}
tickets:
  - {name: weights, policy: a, kind: reservation, size: 8.31GB}
  - {name: chat, policy: b, main: weights, size: 1.1GB, start: 1s, runs: 3s}
"""
_RECIPE = b"""model: a
fine_tune_type: lora
num_layers: 8
learning_rate: 1e-5
lora_parameters: {keys: [self_attn.q_proj], rank: 8, scale: 20.0, dropout: 0.0}
"""
_TRAINING_DATA = b"""{"text": "a"}
{"messages": [{"role": "user", "content": "b"}]}
{"prompt": "c", "completion": ["d"]}
{"text": "e"}
"""
_TRAFFIC = b"agent,prompt_tokens,completion_tokens\nplanner,64,458\nwriter,4k,0\n"
_TRAFFIC_LINES = b"""{"agent": "a", "prompt_tokens": 6, "completion_tokens": 4}
{"agent": "b", "prompt_tokens": "1k", "completion_tokens": 0}
"""
_PROFILE = {
    "model_type": "any",
    "num_prompts": 4,
    "layers": {str(i): {"activation_counts": {"0": 1, "3": 4}} for i in range(2)},
}
_PACK = {
    "schema": "memfit.experts-pack/1",
    "fingerprint": "a" * 64,
    "revision": None,
    "source": [],
    "profile_sha256": "b" * 64,
    "kept": [[0, 2], [3, 1]],
    "pinned": [[0], []],
    "files": [
        {"name": name, "nbytes": 0, "sha256": "c" * 64}
        for name in (prepacked.EXPERTS, prepacked.OTHERS)
    ],
}
_CHECKSUM = f"{hashlib.sha256(b'any').hexdigest()}  a.safetensors\n".encode()
TRACE = Trace(
    "llama",
    "metal",
    {"mlx": "0.32.4"},
    {"norm.weight": 4},
    (
        Call(
            phase="decode",
            tokens=1,
            position=7,
            arrays=(Array((2,), "BF16", "weight", "norm.weight"), Array((2,), "BF16")),
            nodes=(Node("Square", (0,), (1,)),),
            evaluated=(1,),
            held=(1,),
        ),
    ),
)

READERS = {
    "safetensors": Reader(_safetensors, _safetensors_seed()),
    "gguf": Reader(_gguf, _gguf_seed()),
    "gguf-estimate": Reader(_gguf_estimate, _gguf_seed()),
    "config": Reader(_config, json.dumps({**QWEN3_4B, "a": [1, None, {"b": 1e-6}]}).encode()),
    "config-estimate": Reader(_config_estimate, json.dumps(QWEN3_4B).encode()),
    "sample": Reader(_sample, _SAMPLE),
    "policy": Reader(_policy, _POLICY),
    "lock": Reader(_lock, b'{"schema": "memfit.lock/1", "memfit_version": "0", "targets": {}}'),
    "index": Reader(_index, json.dumps(_INDEX).encode()),
    "listing": Reader(_listing, json.dumps(_LISTING).encode()),
    "adapter": Reader(_adapter, b'{"rank": 8, "scale": 20.0, "keys": ["self_attn.q_proj"]}'),
    "measurement": Reader(_measurement, to_text(measurement()).encode()),
    "collection": Reader(_collection, collection_text([measurement()]).encode()),
    "hosts": Reader(_hosts, json.dumps({"backend": "ring", "hosts": _HOSTS}).encode()),
    "fleet": Reader(_fleet, _FLEET),
    "scenario": Reader(_scenario, _SCENARIO),
    "recipe": Reader(_recipe, _RECIPE),
    "training-data": Reader(_training_data, _TRAINING_DATA),
    "prompts": Reader(_prompts, b"one\ntwo \xc3\xa9\n"),
    "traffic": Reader(_traffic, _TRAFFIC),
    "traffic-lines": Reader(_traffic_lines, _TRAFFIC_LINES),
    "profile": Reader(_profile, json.dumps(_PROFILE).encode()),
    "pack": Reader(_pack, json.dumps(_PACK).encode()),
    "stored-cache": Reader(_stored_cache, _CHECKSUM),
    "sweep": Reader(_sweep, b'{"schema": "memfit.sweep/1", "measurements": ["0123456789abcdef"]}'),
    "trace": Reader(_trace, to_json(TRACE).encode()),
    "manifest": Reader(_manifest, json.dumps({"schemaVersion": 2, "layers": [_LAYER]}).encode()),
}
