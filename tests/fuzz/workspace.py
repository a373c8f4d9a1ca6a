"""A directory with every kind of file that a command reads, restored after each command."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from memfit.estimators.gate.policy_file import SCHEMA as POLICY_SCHEMA
from memfit.probes.measurement_json import collection_text, to_text
from tests.fuzz.readers import READERS
from tests.models import QWEN3_4B, write_checkpoint, write_config
from tests.probes.measurements import measurement

SAMPLES = Path(__file__).parents[2] / "sample_configs"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_BLOCK = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (128, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
    "input_layernorm": (64,),
    "post_attention_layernorm": (64,),
}
TENSORS = {
    "model.embed_tokens.weight": ("BF16", (256, 64)),
    "model.norm.weight": ("BF16", (64,)),
    **{
        f"model.layers.{layer}.{name}.weight": ("BF16", shape)
        for layer in range(2)
        for name, shape in _BLOCK.items()
    },
}
_TARGET = {
    "path": "./model",
    "device": "m4-max-64",
    "workload": {"prompt_tokens": 300, "max_tokens": 4},
    "limits": {"peak": "90%", "context": 100},
}
POLICY = {
    "schema": POLICY_SCHEMA,
    "targets": {
        "chat": _TARGET,
        "growing": {**_TARGET, "limits": {"growth": {"weights": "10%"}}},
        "file": {**_TARGET, "path": "./model.gguf", "runtime": "llama.cpp"},
        "hub": {
            **{k: v for k, v in _TARGET.items() if k != "path"},
            "hub": "org/name@main",
            "allow_stale": True,
        },
    },
}
HOSTILE_NAME = "\x1b[31m\x9b31m\u202e|`[a](b)\n::error::x ##[stop]=1"
# Files with what a reader accepts.
READS = {
    "examples/train.jsonl": "training-data",
    "fleet.yaml": "fleet",
    "hosts.json": "hosts",
    "lora.yaml": "recipe",
    "prompts.txt": "prompts",
    "trace.json": "trace",
    "traffic.jsonl": "traffic-lines",
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FOLDERS = {"HF_HOME": "hf", "XDG_CACHE_HOME": "cache", "XDG_DATA_HOME": "data"}
SETTINGS = {"HF_HUB_OFFLINE": "1", "COLUMNS": "100", "OLLAMA_MODELS": "ollama"}


def environment(home: Path) -> dict[str, str]:
    """Return the variables that keep a command inside ``home`` and off the network."""
    return {
        "HOME": str(home),
        **{name: str(home / folder) for name, folder in FOLDERS.items()},
        **SETTINGS,
        "OLLAMA_MODELS": str(home / SETTINGS["OLLAMA_MODELS"]),
    }


class Workspace:
    """The files as they are at first, and what a command changed of them."""

    def __init__(self, root: Path) -> None:
        """Write the files; the policy gets its lock from the command line itself."""
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        _write_all(root)
        self.adopt()

    @property
    def names(self) -> list[str]:
        """The files, sorted."""
        return sorted(self._pristine)

    def content(self, name: str) -> bytes:
        """Return the bytes of a file as it is at first."""
        return self._pristine[name]

    def adopt(self) -> None:
        """Take the files as they are now for those at first."""
        self._pristine: Mapping[str, bytes] = {
            name: (self.root / name).read_bytes() for name, _ in _files(self.root)
        }
        self._stamps = self._before = self._now()

    def changed(self) -> dict[str, bytes | None]:
        """Return what differs from what the command found; None for a file that is gone."""
        now = self._now()
        return {
            name: (self.root / name).read_bytes() if name in now else None
            for name in sorted(now.keys() | self._stamps.keys())
            if now.get(name) != self._stamps.get(name)
        }

    def put(self, files: Mapping[str, bytes]) -> None:
        """Replace files for the next command."""
        for name, content in files.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_bytes(content)
        self._before = self._stamps
        self._stamps = self._now()

    def restore(self) -> None:
        """Make every file what it was at first."""
        now, before = self._now(), self._before
        for name in now.keys() - self._pristine.keys():
            (self.root / name).unlink()
        for name, content in self._pristine.items():
            if now.get(name) != before.get(name):
                path = self.root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)
                path.write_bytes(content)
        self._stamps = self._now()

    def _now(self) -> dict[str, tuple[int, int, int]]:
        return {
            name: (status.st_mtime_ns, status.st_size, status.st_ino)
            for name, status in _files(self.root)
        }


def _files(folder: Path | str, above: str = "") -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path, f"{above}{entry.name}/")
            else:
                yield above + entry.name, entry.stat(follow_symlinks=False)


def _write_all(root: Path) -> None:
    write_checkpoint(root / "model", CONFIG, TENSORS, shards=2)
    write_config(root / "config", QWEN3_4B)
    write_checkpoint(root / HOSTILE_NAME, CONFIG, TENSORS)
    (root / "adapter").mkdir(exist_ok=True)
    (root / "adapter" / "adapter_config.json").write_bytes(READERS["adapter"].seed)
    (root / "adapter" / "adapters.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with (root / "model.gguf").open("wb") as file:
        file.write(READERS["gguf"].seed)
        file.truncate(300_000)
    for name in ("qwen3-0.6b.yaml", "deepseek-v2-lite.yaml"):
        shutil.copy(SAMPLES / name, root / name)
    for path in (SAMPLES / "plans").iterdir():
        shutil.copy(path, root / path.name)
    (root / "examples").mkdir(exist_ok=True)
    for name, reader in READS.items():
        (root / name).write_bytes(READERS[reader].seed)
    write_config(root / "unknown", {**CONFIG, "model_type": "unheard_of"})
    (root / "memfit.yaml").write_text(json.dumps(POLICY, indent=1))
    (root / "one.json").write_text(to_text(measurement()))
    (root / "all.json").write_text(collection_text([measurement()]))
    snapshot = root / "hf/hub/models--org--name"
    write_checkpoint(snapshot / "snapshots" / COMMIT, CONFIG, TENSORS)
    (snapshot / "refs").mkdir(exist_ok=True)
    (snapshot / "refs/main").write_text(COMMIT)
    repository = root / "hf/hub/models--org--gguf"
    for bits in ("Q4_0", "Q8_0"):
        path = repository / "snapshots" / COMMIT / f"any-{bits}.gguf"
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / "model.gguf", path)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs/main").write_text(COMMIT)
    blob = READERS["gguf"].seed
    digest = hashlib.sha256(blob).hexdigest()
    kind = "application/vnd.ollama.image.model"
    layer = {"mediaType": kind, "digest": f"sha256:{digest}", "size": 300_000}
    manifest = root / "ollama/manifests/registry.ollama.ai/library/any/latest"
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": [layer]}))
    (root / "ollama/blobs").mkdir(exist_ok=True)
    with (root / f"ollama/blobs/sha256-{digest}").open("wb") as file:
        file.write(blob)
        file.truncate(300_000)
