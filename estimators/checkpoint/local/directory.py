"""A model on this machine: a directory as mlx-lm loads it, or one weight file of it."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from memfit.estimators.base.errors import CheckpointError, UnsupportedError
from memfit.estimators.base.files import list_names, printable
from memfit.estimators.checkpoint.checkpoint_files import CheckpointFiles, Directory
from memfit.estimators.checkpoint.config import CONFIG, model_config, read_model_config
from memfit.estimators.checkpoint.kinds import kind_of_files
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.checkpoint.safetensors import read_header
from memfit.estimators.checkpoint.shards import list_some, shard_total
from memfit.estimators.checkpoint.weight_files import is_weight_file, with_weights
from memfit.estimators.results.terms import Source

_READ = (".json", ".safetensors", ".bin")


def read_directory(directory: Path) -> Checkpoint:
    """Return the checkpoint of a directory with a config.json, and weights or none.

    Raises:
        CheckpointError: when the directory has no config.json, or a file that counts is
            missing, unreadable or inconsistent, or was changed meanwhile.
        ConfigError: when config.json is not one.
    """
    before = _state(directory)
    checkpoint = read_checkpoint_files(Directory(directory), "local")
    # The config of one model and the headers of another would be an answer about neither.
    if _state(directory) != before:
        raise CheckpointError(
            f"{printable(directory)}: was changed while it was read; run again when nothing"
            " writes to it"
        )
    return checkpoint


def read_checkpoint_files(files: CheckpointFiles, source: Source) -> Checkpoint:
    """Return the checkpoint of a model's files; its id is their label.

    Raises:
        CheckpointError: as `read_directory`.
        ConfigError: as `read_directory`.
        UnreachableError: when the files are remote and cannot be reached.
    """
    names = files.names()
    kind = kind_of_files(names)
    if CONFIG not in names and kind:
        raise UnsupportedError(f"{printable(files.label)}: {kind}, not a language model")
    if CONFIG not in names:
        raise CheckpointError(f"{printable(files.label)}: {_what_is_missing(names)}")
    checkpoint = Checkpoint(
        id=printable(files.label),
        source=source,
        config=model_config(files),
        config_name=printable(files.label / CONFIG),
        other_kind=kind,
        others=files,
    )
    return with_weights(checkpoint, files, names)


def read_file(path: Path) -> Checkpoint:
    """Return the checkpoint of one safetensors file, and of the config.json next to it.

    Without a config.json the config is empty: the weights are exact, the rest is unknown.

    Raises:
        CheckpointError: when the file is unreadable or inconsistent.
        ConfigError: when the config.json next to it is invalid.
    """
    header = read_header(path)
    config_path = path.with_name("config.json")
    has_config = os.path.lexists(config_path)
    return Checkpoint(
        id=printable(path),
        source="local",
        config=read_model_config(config_path) if has_config else {},
        config_name=printable(config_path),
        tensors=header.tensors,
        file_bytes=header.file_bytes,
        header_bytes=header.header_bytes,
        shards=1,
        header_sha256=((path.name, header.sha256),),
        warnings=_file_warnings(path, has_config),
        others=Directory(path.parent),
    )


def _state(directory: Path) -> list[tuple[str, int, int, int]]:
    """What tells one version of the files that are read from another."""
    found = []
    for name in list_names(directory):
        if name.endswith(_READ):
            # A broken link is reported by its reader.
            with suppress(OSError):
                status = os.stat(directory / name)
                found.append((name, status.st_ino, status.st_size, status.st_mtime_ns))
    return found


def _file_warnings(path: Path, has_config: bool) -> tuple[str, ...]:
    warnings = []
    if (total := shard_total(path.name)) > 1:
        warnings.append(
            f"{printable(path)}: one of {total} shards; give the directory for all of them"
        )
    if not has_config:
        warnings.append(f"{printable(path)}: no config.json next to it; only its weights are known")
    return tuple(warnings)


def _what_is_missing(names: Sequence[str]) -> str:
    if not names:
        return "it is empty; give a directory with config.json and model*.safetensors"
    if "adapter_config.json" in names:
        return "no config.json; it holds an adapter, give the model that it was trained on"
    if weight_files := [name for name in names if is_weight_file(name)]:
        return f"no config.json next to {list_some(weight_files)}; copy the model's own there"
    return "no config.json; give a model's directory, or its config.json"
