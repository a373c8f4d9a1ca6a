"""The index of published models: names, configs and facts, each with the file it comes from.

One JSON object a line: the first names the sources with their dates, each other one a model. Only
the lines that a question needs are decoded, so that reading the file takes a millisecond.
"""

import os
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from memfit.estimators.base.errors import CheckpointError
from memfit.estimators.base.files import printable, read_whole, write_atomically

FILE = "models.jsonl"
SCHEMA = "memfit.index/1"
PREFIX = "index:"
"""Before a repository whose config is taken from the index."""
MAX_INDEX_BYTES = 32_000_000
_NAME = re.compile(rb'^\{"name":"([\w.-]+/[\w.-]+)"', re.MULTILINE)


class SourceFile(Struct, frozen=True):
    """Where facts come from."""

    address: str
    """A file or folder, or the start of the addresses of files."""
    date: str


class Header(Struct, frozen=True, tag_field="schema", tag=SCHEMA):
    """The first line of an index."""

    made: str
    """The day it was made, as 2026-11-27."""
    sources: Mapping[str, SourceFile]


class QuantizedRepository(Struct, frozen=True):
    """A repository with the model's weights in fewer bits."""

    name: str
    bits: str
    bytes: int
    """Of its weight files."""


class IndexedModel(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A published model; what its sources do not say is left out."""

    name: str
    """The repository on the Hugging Face Hub."""
    parameters: int | None = None
    """Of mlx-lm's class, computed from the config."""
    published: int | None = None
    """The total of the repository's safetensors files, as published: with towers and draft layers
    that mlx-lm leaves out, and in some repositories a second copy of a tied head."""
    checked: Literal["", "total"] = ""
    """``total``: both are the same number."""
    like: str = ""
    """The model whose config this is, where all published figures of both are the same."""
    released: str = ""
    license: str = ""
    context: int | None = None
    source: str = ""
    """The config's file: a key of the sources, and what follows its address."""
    quantized: tuple[QuantizedRepository, ...] = ()
    config: dict[str, Any] | None = None
    """None: only the name is known, and the Hub has the rest."""


class Index:
    """An index in memory; models are decoded when they are asked for."""

    def __init__(self, content: bytes, place: str) -> None:
        """Take the content of an index file; ``place`` is how messages name it.

        Raises:
            CheckpointError: when its first line is not that of an index.
        """
        self._content = content
        first = content[: content.find(b"\n") + 1]
        try:
            self.header = msgspec.json.decode(first, type=Header)
        except msgspec.DecodeError as error:
            raise CheckpointError(
                f"{place}: not an index of models ({error}); memfit index update makes a new one"
            ) from None
        self._place = place
        self._starts = {
            match[1].decode(): match.start() for match in _NAME.finditer(content, len(first))
        }

    @property
    def names(self) -> tuple[str, ...]:
        """The repositories, sorted."""
        return tuple(self._starts)

    def model(self, name: str) -> IndexedModel:
        """Return what is known of a repository of `names`.

        Raises:
            CheckpointError: when its line is damaged.
        """
        start = self._starts[name]
        end = self._content.find(b"\n", start)
        try:
            return msgspec.json.decode(self._content[start:end], type=IndexedModel)
        except msgspec.DecodeError as error:
            raise CheckpointError(
                f"{self._place}: {name}: {error}; memfit index update makes a new one"
            ) from None

    def address(self, model: IndexedModel) -> str:
        """Return where a model's config comes from."""
        key, _, rest = model.source.partition(":")
        source = self.header.sources.get(key)
        return f"{source.address}{rest}, {source.date}" if source else model.source


def updated_file() -> Path:
    """Return where `memfit index update` writes, in the platform's cache folder."""
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("memfit", appauthor=False)) / FILE


@cache
def index() -> Index:
    """Return the index that was made last: the user's own, else the shipped one.

    Raises:
        CheckpointError: when the user's own is not one.
    """
    path = updated_file()
    if os.path.isfile(path):
        return Index(read_whole(path, limit=MAX_INDEX_BYTES), printable(path))
    return shipped_index()


@cache
def shipped_index() -> Index:
    """Return the index in the package."""
    from importlib.resources import files  # slow to import, and most estimates need no index

    return Index(files("memfit.estimators.checkpoint.index").joinpath(FILE).read_bytes(), FILE)


def write_index(path: Path, header: Header, models: Iterable[IndexedModel]) -> None:
    """Write an index file whole, sorted by name.

    Raises:
        OSError: when it cannot be written.
    """
    ordered = sorted(models, key=lambda model: model.name.lower())
    lines = [msgspec.json.encode(each) for each in (header, *ordered)]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, b"\n".join(lines) + b"\n")
