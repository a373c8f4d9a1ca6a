"""From what a user calls a model to its checkpoint: the one place that decides which it is."""

import os
import re
from pathlib import Path

from memfit.estimators.checkpoint.config import read_model_config
from memfit.estimators.checkpoint.files import shown
from memfit.estimators.checkpoint.local import read_directory, read_file
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.errors import CheckpointError, UnsupportedError
from memfit.estimators.sink import SILENT, Sink

_SUFFIXES = (".safetensors", ".gguf", ".json", ".yaml", ".yml", ".bin", ".pt", ".pth")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(?:@[\w./-]+)?", re.ASCII)
_WANTED = "give a model's directory, a .safetensors file, a config.json, a sample .yaml or org/name"


def open_checkpoint(reference: str, *, sink: Sink = SILENT) -> Checkpoint:
    """Return the checkpoint that ``reference`` stands for: an existing path first of all.

    Raises:
        CheckpointError: when there is no such path or repository, or its files are missing or
            inconsistent.
        ConfigError: when its config is not one.
        UnsupportedError: for GGUF files, which are not read yet.
        UnreachableError: when the Hub cannot be reached, or refuses.
    """
    path = Path(os.path.expanduser(reference))
    if reference and _is_there(path):
        return _open_path(path)
    if _looks_like_path(reference) or not _HUB_NAME.fullmatch(reference):
        raise CheckpointError(f"{shown(reference)!r}: no such path; {_WANTED}")
    # Asked for by name only: the modules that talk HTTP take longer to import than a file to read.
    from memfit.estimators.checkpoint.hub import open_hub

    return open_hub(reference, sink=sink)


def _open_path(path: Path) -> Checkpoint:
    if os.path.isdir(path):
        return read_directory(path)
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        return read_file(path)
    if suffix == ".gguf":
        raise UnsupportedError(f"GGUF files are not supported yet: {shown(path)}")
    if path.name.endswith(".index.json"):
        raise CheckpointError(f"{shown(path)}: an index of shards; give the directory it is in")
    if suffix == ".json":
        return _open_config(path)
    if suffix in (".yaml", ".yml"):
        return _open_sample(path)
    raise CheckpointError(f"{shown(path)}: not a file that describes a model; {_WANTED}")


def _open_config(path: Path) -> Checkpoint:
    name = shown(path)
    return Checkpoint(id=name, source="config", config=read_model_config(path), config_name=name)


def _open_sample(path: Path) -> Checkpoint:
    # PyYAML takes longer to import than a config to read.
    from memfit.estimators.checkpoint.sample import read_sample

    sample = read_sample(path)
    return Checkpoint(
        id=sample.name, source="sample", config=sample.config, config_name=shown(path)
    )


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except PermissionError:
        raise CheckpointError(f"{shown(path)}: permission denied on the way to it") from None
    except (OSError, ValueError):
        return False
    return True


def _looks_like_path(reference: str) -> bool:
    return (
        reference.startswith((".", "/", "~"))
        or reference.lower().endswith(_SUFFIXES)
        or reference.split("@")[0].count("/") > 1
        or "\\" in reference
    )
