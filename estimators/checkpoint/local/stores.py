"""Models that other programs keep on this machine: Ollama's store and ModelScope's cache."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from memfit.estimators.base.errors import CheckpointError, UnsupportedError
from memfit.estimators.base.files import list_names, printable, read_whole
from memfit.estimators.base.reading.section import MAX_FIGURE, Section, json_section
from memfit.estimators.checkpoint.gguf.files import read_gguf_file
from memfit.estimators.checkpoint.local.directory import read_directory
from memfit.estimators.checkpoint.manifest import Checkpoint, SkippedFile

MAX_MANIFEST_BYTES = 4_000_000  # of a model in single tensors; one of GGUF has a kilobyte
MAX_MANIFEST_VALUES = 200_000
# github.com/ollama/ollama types/model/name.go: defaultHost, defaultNamespace, defaultTag.
_HOST, _NAMESPACE, _TAG = "registry.ollama.ai", "library", "latest"
_MEDIA = "application/vnd.ollama.image."
_RUN_OPTIONS = ("num_ctx", "num_gpu", "num_batch")
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_WORD = re.compile(r"[\w.-]{1,200}", re.ASCII)
_BESIDE = {
    "projector": "a vision projector, which the runtime loads with the model",
    "adapter": "an adapter, which the runtime applies to the model",
}


class _Blob(NamedTuple):
    kind: str  # the end of its media type: model, projector, adapter, template...
    path: Path
    nbytes: int


def open_store(reference: str) -> Checkpoint:
    """Return the checkpoint of ``ollama:name:tag`` or ``modelscope:org/name``.

    Raises:
        CheckpointError: when the store does not hold it, or its files are inconsistent.
        UnsupportedError: when it is kept in a form that is not described.
    """
    store, _, name = reference.partition(":")
    return _open_ollama(name, reference) if store == "ollama" else _open_modelscope(name, reference)


def ollama_directory() -> Path:
    """Return where Ollama keeps models: OLLAMA_MODELS, else ~/.ollama/models (envconfig)."""
    configured = os.environ.get("OLLAMA_MODELS")
    return Path(configured) if configured else Path(os.path.expanduser("~/.ollama/models"))


def ollama_models() -> Iterator[str]:
    """Yield a reference to every model of Ollama's store, by its shortest name."""
    manifests = ollama_directory() / "manifests"
    for path in sorted(manifests.glob("*/*/*/*")):
        if path.name.startswith(".") or not os.path.isfile(path):
            continue
        host, namespace, model, tag = path.relative_to(manifests).parts
        names = (host, namespace, model) if host != _HOST else (namespace, model)
        shortest = (model,) if (host, namespace) == (_HOST, _NAMESPACE) else names
        yield f"ollama:{'/'.join(shortest)}:{tag}"


def _open_ollama(name: str, reference: str) -> Checkpoint:
    directory = ollama_directory()
    host, namespace, model, tag = _ollama_name(name, reference)
    manifest = directory / "manifests" / host / namespace / model / tag
    if not os.path.lexists(manifest):
        known = _tags(manifest.parent)
        has = f"; it has {model}:{f', {model}:'.join(known)}" if known else ""
        raise CheckpointError(
            f"{printable(reference)}: Ollama's store {printable(directory)} does not hold it{has};"
            f" ollama pull {printable(name)} fetches it, OLLAMA_MODELS names another store"
        )
    blobs = _blobs(directory, manifest)
    models = [blob for blob in blobs if blob.kind == "model"]
    if len(models) != 1:
        raise UnsupportedError(
            f"{printable(manifest)}: {len(models)} GGUF layers; a model of exactly one is read"
        )
    skipped_files = tuple(
        SkippedFile(blob.kind, blob.nbytes, _BESIDE[blob.kind])
        for blob in blobs
        if blob.kind in _BESIDE
    )
    checkpoint = read_gguf_file(
        models[0].path, id=printable(reference), skipped_files=skipped_files
    )
    return replace(checkpoint, run_options=_run_options(blobs))


def _run_options(blobs: list[_Blob]) -> dict[str, int]:
    """The parameters of the manifest that change memory (api/types.go, Runner)."""
    found: dict[str, int] = {}
    for blob in blobs:
        if blob.kind != "params":
            continue
        options = json_section(
            read_whole(blob.path, limit=MAX_MANIFEST_BYTES),
            blob.path,
            what="the parameters",
            max_values=MAX_MANIFEST_VALUES,
            error=CheckpointError,
        )
        for name in _RUN_OPTIONS:
            if options.has(name):
                found[name] = options.count(name, least=0, most=MAX_FIGURE)
    return found


def _ollama_name(name: str, reference: str) -> tuple[str, str, str, str]:
    """Host, namespace, model and tag; only the model is required."""
    path, _, tag = name.partition(":")
    words = path.split("/")
    parts = [_HOST, _NAMESPACE][: 3 - len(words)] + words if len(words) <= 3 else []
    parts.append(tag or _TAG)
    if len(parts) != 4 or any(p.strip(".") == "" or not _WORD.fullmatch(p) for p in parts):
        raise CheckpointError(f"{printable(reference)}: no name of Ollama's; write ollama:qwen3:4b")
    host, namespace, model, tag = parts
    return host, namespace, model, tag


def _tags(directory: Path) -> list[str]:
    return [printable(tag) for tag in list_names(directory)[:8]] if os.path.isdir(directory) else []


def _blobs(directory: Path, manifest: Path) -> list[_Blob]:
    top = json_section(
        read_whole(manifest, limit=MAX_MANIFEST_BYTES),
        manifest,
        what="the manifest",
        max_values=MAX_MANIFEST_VALUES,
        error=CheckpointError,
    )
    return [_blob(directory, layer) for layer in top.mappings("layers")]


def _blob(directory: Path, layer: Section) -> _Blob:
    kind = layer.text("mediaType").removeprefix(_MEDIA)
    digest = _DIGEST.fullmatch(layer.text("digest"))
    if digest is None:
        raise layer.fail("digest", "expected sha256: and 64 hexadecimal digits")
    nbytes = layer.count("size", least=0, most=MAX_FIGURE)
    return _Blob(kind, directory / "blobs" / f"sha256-{digest[1]}", nbytes)


def _open_modelscope(name: str, reference: str) -> Checkpoint:
    owner, slash, model = name.partition("/")
    if not slash or not all(_WORD.fullmatch(w) and w.strip(".") for w in (owner, model)):
        raise CheckpointError(f"{printable(reference)}: write modelscope:org/name")
    for candidate in _modelscope_places(owner, model):
        if os.path.isdir(candidate):
            return read_directory(candidate)
    raise CheckpointError(
        f"{printable(reference)}: ModelScope's cache does not hold it; modelscope download --model"
        f" {printable(name)} fetches it, MODELSCOPE_CACHE names another cache"
    )


def _modelscope_places(owner: str, model: str) -> list[Path]:
    """Where ModelScope's programs have kept a snapshot, the newest layout first.

    Source: modelscope 1.40 hub/utils/utils.py, find_reusable_legacy_repo_dir.
    """
    configured = os.environ.get("MODELSCOPE_CACHE")
    base = Path(configured) if configured else Path(os.path.expanduser("~/.cache/modelscope"))
    masked = model.replace(".", "___")
    snapshots = base / "models" / f"{owner}--{model}" / "snapshots"
    revisions = (
        sorted(list_names(snapshots), key=lambda r: r != "master")
        if os.path.isdir(snapshots)
        else []
    )
    return [
        *(snapshots / revision for revision in revisions[:1]),
        *(
            base / part / owner / directory
            for part in ("models", "hub/models", "hub", "")
            for directory in (masked, model)
        ),
    ]
