"""GGUF files of a Hub repository; their headers are read with range requests."""

from pathlib import PurePosixPath

from msgspec.structs import replace

from memfit.estimators.base.errors import CheckpointError
from memfit.estimators.base.files import printable
from memfit.estimators.checkpoint.gguf.files import (
    SUFFIX,
    GgufFile,
    choose_model,
    gguf_checkpoint,
    gguf_models,
    label,
    series,
)
from memfit.estimators.checkpoint.hub.repository import Repository
from memfit.estimators.checkpoint.manifest import Checkpoint, Choice
from memfit.estimators.checkpoint.shards import list_some

USUAL = "Q4_K_M"


class HubSource:
    """The start of a file, fetched as it is read; headers are read from front to back."""

    def __init__(self, repository: Repository, name: str) -> None:
        """Open a file of the repository; cached bytes are not fetched again."""
        self._repository, self._name = repository, name
        self.size: int = repository.size(name)
        self._content = repository.cached(name) or b""

    def read(self, offset: int, count: int) -> bytes:
        """Return exactly ``count`` bytes at ``offset``.

        Raises:
            UnreachableError: when the Hub cannot be reached, or sends something else.
        """
        end = offset + count
        if end > len(self._content):
            # Always from where the last piece ended, so that the cached start has no gaps.
            self._content += self._repository.piece(self._name, len(self._content), end)
        return self._content[offset:end]

    def keep(self) -> None:
        """Cache what was fetched."""
        self._repository.cache(self._name, self._content)


def read_usual_gguf(repository: Repository, reference: str) -> Checkpoint:
    """Return the checkpoint of the usual file of a repository, with all that it could be.

    That is Q4_K_M, as llama.cpp and Ollama take it where none is named, else the first.

    Raises:
        MemfitError: as `read_hub_gguf`.
    """
    models = gguf_models(list(repository.listing.files))
    labels = [label(model) for model in models]
    choices = [
        Choice(
            f"{reference}:{name if labels.count(name) == 1 else model}",
            name if labels.count(name) == 1 else model,
            sum(map(repository.size, _series(repository, model))),
        )
        for model, name in zip(models, labels, strict=True)
    ]
    try:
        chosen = models.index(choose_model(models, USUAL, reference))
    except CheckpointError:
        chosen = 0
    found = read_hub_gguf(repository, models[chosen], id=printable(choices[chosen].reference))
    text = f"{reference} holds {len(models)} GGUF models, and none was named: this is the usual one"
    return replace(found, choices=tuple(choices), warnings=(*found.warnings, printable(text)))


def _series(repository: Repository, model: str) -> list[str]:
    """The files of a model that are there."""
    place = PurePosixPath(model)
    names = [str(place.with_name(part)) for part in series(place.name)]
    return [name for name in names if name in repository.listing.files]


def read_hub_gguf(repository: Repository, name: str, *, id: str) -> Checkpoint:
    """Return the checkpoint of a repository's GGUF file, and of the rest of its series.

    ``name`` is the file, or its quantisation.

    Raises:
        CheckpointError: when there is no such file, or as `gguf_checkpoint`.
        UnreachableError: when the Hub cannot be reached.
        UnsupportedError: as `gguf_checkpoint`.
    """
    if not name.lower().endswith(SUFFIX):
        name = choose_model(list(repository.listing.files), name, printable(repository.label))
    place = PurePosixPath(name)
    names = [str(place.with_name(part)) for part in series(place.name)]
    if missing := repository.missing(names):
        there = [file for file in repository.listing.files if file.lower().endswith(SUFFIX)]
        has = f"; it has {list_some(sorted(there))}" if there else ""
        raise CheckpointError(f"{printable(repository.label)}: has no {list_some(missing)}{has}")
    sources = [HubSource(repository, part) for part in names]
    parts = [
        GgufFile(printable(repository.label / part), source)
        for part, source in zip(names, sources, strict=True)
    ]
    checkpoint = gguf_checkpoint(parts, id=id, revision=repository.listing.commit)
    # After parsing: only a header that is whole and valid is kept.
    for source in sources:
        source.keep()
    return checkpoint
