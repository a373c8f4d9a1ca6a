"""What a checkpoint's files say: its tensors, config and digest."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

from memfit.estimators.results.terms import Source


class Tensor(NamedTuple):
    """One tensor of a header: its bytes are known without reading them."""

    name: str
    dtype: str  # as its format spells it: a key of dtypes.BITS, or of ggml_types.BY_NAME
    shape: tuple[int, ...]
    nbytes: int


class Index(Struct, frozen=True):
    """What an index file says: the file of each tensor, and the set of these files."""

    weight_map: Mapping[str, str]
    files: frozenset[str]


class SkippedFile(Struct, frozen=True):
    """A weight file that was seen and not counted."""

    name: str
    nbytes: int
    reason: str


class Choice(Struct, frozen=True):
    """One of several models of a repository."""

    reference: str
    """What opens it."""
    label: str
    nbytes: int
    """Of all its files."""


class SmallFiles(Protocol):
    """Files of a checkpoint that are read only where a question needs them."""

    def exists(self, name: str) -> bool:
        """Return whether there is such a file."""

    def read(self, name: str, *, limit: int) -> bytes:
        """Return a whole small file; one above ``limit`` bytes is refused."""


class Checkpoint(Struct, frozen=True):
    """A model's config and, where there are weight files, their tensors.

    ``tensors`` is None when no header could be read: a bare config, or only files in which the
    content is not described by a header (``weight_bytes_bound`` then holds their size).
    """

    id: str
    source: Source
    config: Mapping[str, Any]
    config_name: str  # how messages name the config, e.g. "models/qwen/config.json"
    tensors: tuple[Tensor, ...] | None = None
    weight_bytes_bound: int | None = None
    file_bytes: int = 0  # size of the counted weight files
    header_bytes: int = 0  # bytes read of them
    shards: int = 0
    header_sha256: tuple[tuple[str, str], ...] = ()  # file name and digest, by name
    has_other_names: bool = False
    """Whether its weight files are not named model*.safetensors, as mlx-lm wants them."""
    skipped_files: tuple[SkippedFile, ...] = ()
    warnings: tuple[str, ...] = ()
    meaning: str = ""
    """Which model a word was taken for, and which others it could name."""
    revision: str | None = None
    stale: str | None = None
    """Why the files may not be the ones that the source has now."""
    choices: tuple[Choice, ...] = ()
    """All models of the repository, where none was named and this is the usual one."""
    other_kind: str = ""
    """What it is by its files, where it is no language model."""
    assumed_from: str | None = None
    """The config's own model type, where another one was put in its place."""
    hub: str | None = None
    """The repository that a sample describes."""
    run_options: Mapping[str, int] = {}
    """What a manifest of Ollama's says of its runs: num_ctx, num_gpu, num_batch."""
    others: SmallFiles | None = None
    """Where its other files are, None where there is nothing but a config."""

    @property
    def to_load(self) -> str:
        """What commands of other programs name."""
        return self.hub or self.id


def config_sha256(checkpoint: Checkpoint) -> str:
    """Return the digest of a checkpoint's config; spacing and order of its keys do not matter."""
    return _digest(checkpoint.config)


def fingerprint_of(checkpoint: Checkpoint) -> str:
    """Return the digest of a checkpoint's config and headers: 64 hexadecimal digits.

    Headers give every tensor's name, type and shape, so every size, but not the values: two
    fine-tunes of one model are the same here, as they are in memory.
    """
    return _digest([config_sha256(checkpoint), sorted(checkpoint.header_sha256)])


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
