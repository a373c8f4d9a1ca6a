"""Cache of headers and small files fetched earlier, limited in bytes.

An entry is named by the digest of its key and starts with the digest of its content, so that a
damaged one is ignored. Two processes may share the directory: each entry is written atomically, and
both write the same content.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from memfit.estimators.base.errors import CheckpointError
from memfit.estimators.base.files import read_whole, write_atomically
from memfit.estimators.checkpoint.safetensors import LENGTH_BYTES, MAX_HEADER_BYTES

MAX_CACHE_BYTES = 256_000_000  # headers of a hundred of the largest models
_DIGEST_BYTES = 32
# A safetensors header may be the longest of what is kept.
_MAX_ENTRY_BYTES = _DIGEST_BYTES + LENGTH_BYTES + MAX_HEADER_BYTES


class Usage(Struct, frozen=True):
    """How much a cache holds."""

    entries: int
    nbytes: int


class HeaderCache:
    """A directory of entries; an unreadable one behaves as an empty cache."""

    def __init__(self, directory: Path, max_bytes: int = MAX_CACHE_BYTES) -> None:
        """Use a directory; it is created with the first entry."""
        self.directory, self.max_bytes = directory, max_bytes

    def get(self, *key: str) -> bytes | None:
        """Return the content stored under a key, or None if absent or damaged."""
        path = self._path(key)
        try:
            entry = read_whole(path, limit=_MAX_ENTRY_BYTES)
            os.utime(path)  # least recently used entries go first
        except (CheckpointError, OSError):
            return None
        content = entry[_DIGEST_BYTES:]
        # A half-written or changed entry is as good as none: it is fetched again.
        return content if hashlib.sha256(content).digest() == entry[:_DIGEST_BYTES] else None

    def put(self, content: bytes, *key: str) -> None:
        """Store content under a key, if the directory is writable."""
        with contextlib.suppress(OSError):
            # For the user alone: it has configs and headers of private repositories too.
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(self._path(key), hashlib.sha256(content).digest() + content)

    def trim(self) -> None:
        """Remove the least recently used entries until the rest is within the limit."""
        # `get` sets the time of an entry that it reads, so the oldest was read longest ago.
        files = sorted(self._files(), key=lambda file: file[1].st_mtime_ns)
        excess = sum(status.st_size for _, status in files) - self.max_bytes
        for path, status in files:
            if excess <= 0:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            # Counted even when unlink fails: another process may have removed it.
            excess -= status.st_size

    def usage(self) -> Usage:
        """Return how many entries there are and the bytes they take."""
        sizes = [status.st_size for _, status in self._files()]
        return Usage(len(sizes), sum(sizes))

    def clear(self) -> Usage:
        """Remove every entry; return what was there."""
        usage = self.usage()
        for path, _ in list(self._files()):
            path.unlink(missing_ok=True)
        return usage

    def _path(self, key: tuple[str, ...]) -> Path:
        # A digest, because a key has slashes and may be longer than a file name.
        return self.directory / hashlib.sha256("\0".join(key).encode()).hexdigest()

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        try:
            paths = list(self.directory.iterdir())
        except OSError:
            return
        for path in paths:
            # Another process may be trimming too.
            with contextlib.suppress(OSError):
                yield path, path.stat()


def user_cache() -> HeaderCache:
    """Return the user's own cache, in the platform's cache folder (XDG_CACHE_HOME)."""
    from platformdirs import user_cache_dir

    return HeaderCache(Path(user_cache_dir("memfit", appauthor=False)) / "headers")
