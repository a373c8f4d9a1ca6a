"""Resolve what the user typed to a checkpoint: the only place that decides the source."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from memfit.estimators.base.errors import CheckpointError, UnreachableError
from memfit.estimators.base.files import list_names, printable
from memfit.estimators.base.progress import NULL_PROGRESS, Progress
from memfit.estimators.checkpoint.checkpoint_files import Directory
from memfit.estimators.checkpoint.config import CONFIG, read_model_config
from memfit.estimators.checkpoint.index.records import PREFIX as INDEX_PREFIX
from memfit.estimators.checkpoint.local.directory import read_directory, read_file
from memfit.estimators.checkpoint.manifest import Checkpoint

_SUFFIXES = (".safetensors", ".gguf", ".json", ".yaml", ".yml", ".bin", ".pt", ".pth")
_HUB_NAME = r"(?a)[\w.-]+/[\w.-]+(?:@[\w./-]+)?"
# After the colon a GGUF file, or its quantisation.
_HUB_FILE = r"(?ai)[\w.-]+/[\w.-]+(?:@[\w./-]+)?:(?:[\w./-]+\.gguf|[\w.-]+)"
_ADDRESS = r"(?ai)https?://|(?:www\.)?huggingface\.co/|hf\.co/"
_OLLAMA_BLOB = "sha256-"
_STORES = ("ollama:", "modelscope:")
# Of a family, a size and a tag, as a program or a person writes them.
_WORDS = r"(?a)[A-Za-z][\w.+-]*(?:[: ][\w.+-]+)*"
_OTHERS = 3
_SAMPLE = "sample:"
"""Before the name of a sample that a path has too."""
HUB = "hub:"
"""Before a name on the Hub, which is not looked up in the directory then."""
_WANTED = (
    "give a model's directory, a .safetensors or .gguf file, a config.json, a sample,"
    " hub:org/name, hub:org/name:file.gguf, ollama:name:tag or modelscope:org/name"
)


def open_checkpoint(
    reference: str, *, progress: Progress = NULL_PROGRESS, guess_hub: bool = True
) -> Checkpoint:
    """Return the checkpoint of ``reference``; an existing path comes first.

    Without ``guess_hub`` nothing is guessed, as in a policy: only a name after ``hub:`` is looked
    up on the Hub, and no path takes the place of a prefix, a URL or a sample.

    Raises:
        CheckpointError: when there is no such path or repository, or its files are missing or
            inconsistent.
        ConfigError: when its config is not one.
        UnsupportedError: for a GGUF file that is not a model, or has an undescribed version or
            type.
        UnreachableError: when the Hub cannot be reached, or refuses.
    """
    if reference.startswith(HUB):
        return _open_hub(reference.removeprefix(HUB), progress, picks=guess_hub)
    if shipped := _prefixed(reference):
        return shipped
    if path := _existing(reference, guess_hub):
        return _open_path(path)
    # Each source is imported only when it is used, which keeps a local read fast.
    if reference.startswith(_STORES):
        from memfit.estimators.checkpoint.local.stores import open_store

        return open_store(reference)
    if re.match(_ADDRESS, reference):
        return _open_hub(_addressed(reference, guess_hub), progress, picks=True)
    if named := _named_sample(reference) or (guess_hub and _published(reference, progress)):
        return named
    if not _is_hub_name(reference):
        raise CheckpointError(f"{printable(reference)!r}: no such path{_known(reference)}")
    if not guess_hub:
        raise CheckpointError(
            f"{printable(reference)!r}: no such path; on the Hub it is hub: {reference} in a"
            f" policy, and hub:{reference} on the command line"
        )
    found = _open_hub_or_index(reference, progress)
    folder = reference.partition("/")[0]
    if not os.path.isdir(folder):
        return found
    doubt = f"{folder} is a directory without {reference.partition('/')[2]}, so it is the Hub's"
    return replace(found, warnings=(*found.warnings, f"{doubt}; hub:{reference} says so"))


def _prefixed(reference: str) -> Checkpoint | None:
    """What is shipped with memfit, where a prefix says so and it is there."""
    if reference.startswith(_SAMPLE):
        return _named_sample(reference[len(_SAMPLE) :])
    if not reference.startswith(INDEX_PREFIX):
        return None
    from memfit.estimators.checkpoint.index.checkpoint import indexed_checkpoint
    from memfit.estimators.checkpoint.index.records import index

    name = reference.removeprefix(INDEX_PREFIX)
    model = index().model(name) if name in index().names else None
    if model is None or model.config is None:
        raise CheckpointError(f"{printable(reference)!r}: the index has no config of that name")
    return indexed_checkpoint(model)


def _existing(reference: str, guess_hub: bool) -> Path | None:
    """The path of that name, if there is one; where nothing is guessed the name is of it alone."""
    path = Path(os.path.expanduser(reference))
    is_elsewhere = not guess_hub and has_prefix(reference)
    if not reference or is_elsewhere or not _is_there(path):
        return None
    if not guess_hub:
        require_no_sample(reference)
    return path


def has_prefix(reference: str) -> bool:
    """Return whether a reference says where it is looked up: in a store, or at an address."""
    prefixes = (HUB, INDEX_PREFIX, _SAMPLE, *_STORES)
    return reference.startswith(prefixes) or bool(re.match(_ADDRESS, reference))


def require_no_sample(reference: str) -> None:
    """Check that the name of a path is not that of a sample.

    Raises:
        CheckpointError: when it is.
    """
    if _named_sample(reference):
        raise CheckpointError(
            f"{printable(reference)!r}: both a sample and a path; write"
            f" {_SAMPLE}{reference.lower()}, or ./{reference} for the path"
        )


def open_sample(name: str) -> Checkpoint:
    """Return the checkpoint of a sample that is shipped with memfit."""
    from memfit.estimators.checkpoint.local.samples import sample_file

    with sample_file(name) as path:
        return _open_sample(path)


def _named_sample(name: str) -> Checkpoint | None:
    """The sample of a name in any case; None where there is none."""
    if "/" in name:
        return None
    from memfit.estimators.checkpoint.local.samples import sample_names

    return open_sample(name.lower()) if name.lower() in sample_names() else None


def _published(word: str, progress: Progress) -> Checkpoint | None:
    """The published model that a word without an owner means; None where there is none."""
    if not re.fullmatch(_WORDS, word):
        return None
    from memfit.estimators.checkpoint.index.lookup import look_up
    from memfit.estimators.checkpoint.index.records import index

    meaning = look_up(word, index())
    if meaning is None:
        return None
    others = ", ".join(name.rpartition("/")[2] for name in meaning.others[:_OTHERS])
    also = f"; also {others}" if others else ""
    name = meaning.model.name
    if meaning.model.config is not None:
        from memfit.estimators.checkpoint.index.checkpoint import indexed_checkpoint

        return indexed_checkpoint(meaning.model, f"{word}: {name} by its published config{also}")
    return replace(
        _open_hub(name, progress, picks=True), meaning=f"{word}: {name} on the Hub{also}"
    )


def _open_hub_or_index(name: str, progress: Progress) -> Checkpoint:
    """Open a repository; where the Hub cannot be reached, by the config that the index has."""
    try:
        return _open_hub(name, progress, picks=True)
    except UnreachableError as error:
        from memfit.estimators.checkpoint.index.checkpoint import indexed_checkpoint
        from memfit.estimators.checkpoint.index.records import index

        model = index().model(name) if name in index().names else None
        if model is None or model.config is None:
            raise
        text = f"{error}; this is {name} by its published config in the index"
        return replace(indexed_checkpoint(model), warnings=(text,), stale=str(error))


def _known(reference: str) -> str:
    """The models nearest to a word, else all that names a model."""
    store = f"; of Ollama's store it is ollama:{reference}" if _is_tag(reference) else ""
    if not re.fullmatch(_WORDS, reference):
        return store or f"; {_WANTED}"
    from memfit.estimators.base.nearest import nearest
    from memfit.estimators.checkpoint.local.samples import sample_names

    word = re.sub("[: ]", "-", reference.lower())
    near = nearest(word, {*sample_names(), *_published_names(reference)})
    if near:
        return f"{store or ', and no sample'}; nearest: {near}"
    return store or f"; {_WANTED}"


def _is_tag(reference: str) -> bool:
    return bool(re.fullmatch(r"[\w.-]+:[\w.-]+", reference))


def _published_names(word: str) -> Iterator[str]:
    """The published models of the family that a word begins with."""
    from memfit.estimators.checkpoint.index.names import is_copy, is_plain, name_words
    from memfit.estimators.checkpoint.index.records import index

    family = name_words(word).family[:1]
    for name in index().names:
        if name_words(name).family[:1] == family and is_plain(name) and not is_copy(name):
            yield name.rpartition("/")[2].lower()


def _addressed(address: str, guess_hub: bool) -> str:
    """The name on the Hub that an address is of."""
    from memfit.estimators.checkpoint.hub.address import hub_name
    from memfit.estimators.checkpoint.hub.settings import configured_hub

    name = hub_name(address, endpoint=configured_hub().endpoint)
    if not guess_hub:
        raise CheckpointError(f"{printable(address)!r}: a URL, not a name; write {HUB}{name}")
    return name


def _open_hub(name: str, progress: Progress, *, picks: bool) -> Checkpoint:
    """Open a name; with ``picks`` a repository of GGUF files at the usual one."""
    from memfit.estimators.checkpoint.hub.source import open_hub, open_hub_file

    if re.fullmatch(_HUB_FILE, name):
        return open_hub_file(name, progress=progress)
    if not re.fullmatch(_HUB_NAME, name):
        raise CheckpointError(f"{printable(HUB + name)!r}: write hub:org/name@revision")
    return open_hub(name, progress=progress, picks=picks)


def _open_path(path: Path) -> Checkpoint:
    if os.path.isdir(path):
        return _open_directory(path)
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        return read_file(path)
    if suffix == ".gguf" or path.name.startswith(_OLLAMA_BLOB):
        from memfit.estimators.checkpoint.gguf.files import read_gguf_file

        return read_gguf_file(path)
    if path.name.endswith(".index.json"):
        raise CheckpointError(f"{printable(path)}: an index of shards; give the directory it is in")
    if suffix == ".json":
        return _open_config(path)
    if suffix in (".yaml", ".yml"):
        return _open_sample(path)
    raise CheckpointError(f"{printable(path)}: not a file that describes a model; {_WANTED}")


def _open_directory(path: Path) -> Checkpoint:
    names = list_names(path)
    if CONFIG not in names:
        from memfit.estimators.checkpoint.gguf.files import gguf_models, read_gguf_directory

        if gguf_models(names):
            return read_gguf_directory(path, names)
    return read_directory(path)


def _open_config(path: Path) -> Checkpoint:
    name = printable(path)
    return Checkpoint(
        id=name,
        source="config",
        config=read_model_config(path),
        config_name=name,
        others=Directory(path.parent),
    )


def _open_sample(path: Path) -> Checkpoint:
    from memfit.estimators.checkpoint.local.samples import read_sample

    sample = read_sample(path)
    return Checkpoint(
        id=sample.name,
        source="sample",
        config=sample.config,
        config_name=printable(path),
        hub=sample.hub,
    )


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except PermissionError:
        raise CheckpointError(
            f"{printable(path)}: permission denied for one of its folders"
        ) from None
    except (OSError, ValueError):
        return False
    return True


def _is_hub_name(reference: str) -> bool:
    if re.fullmatch(_HUB_FILE, reference) and not reference.startswith("."):
        return True
    return bool(re.fullmatch(_HUB_NAME, reference)) and not _looks_like_path(reference)


def _looks_like_path(reference: str) -> bool:
    return (
        reference.startswith((".", "/", "~"))
        or reference.lower().endswith(_SUFFIXES)
        or reference.split("@")[0].count("/") > 1
        or "\\" in reference
    )
