"""What the Hub says of a repository at a revision: its commit, and every file with its digest."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

from memfit.estimators.base.errors import UnreachableError
from memfit.estimators.base.reading.section import Section, json_section

MAX_LISTING_BYTES = 50_000_000  # 200,000 files; the largest model repositories have some thousands
MAX_LISTING_VALUES = 4_000_000
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_DIGEST = re.compile(r"[0-9a-f]{40,64}")


class RemoteFile(NamedTuple):
    """A file as it is listed; a Hub's copy may leave out what it does not know."""

    size: int | None
    """Bytes of the file."""
    sha256: str | None  # of a large file's content
    git_id: str | None  # of a small file's content, as git counts it

    @property
    def digest(self) -> str | None:
        """The digest of the content, by whichever way it was taken."""
        return self.sha256 or self.git_id

    def is_content(self, content: bytes) -> bool:
        """Tell whether this is the listed content, as far as the listing says."""
        if self.size is not None and self.size != len(content):
            return False
        if self.sha256:
            return hashlib.sha256(content).hexdigest() == self.sha256
        # Without a digest there is nothing to compare: some mirrors list none.
        return self.git_id in (None, git_id(content))


class Listing(NamedTuple):
    """A repository at one commit."""

    commit: str
    """The hash of the commit."""
    files: Mapping[str, RemoteFile]
    """By path in the repository."""


def parse_listing(content: bytes, place: PurePath) -> Listing:
    """Return the listing that the Hub's answer is (GET /api/models/NAME/revision/REVISION).

    Raises:
        UnreachableError: when it is not a listing, e.g. the login page of a captive portal.
    """
    top = json_section(
        content,
        place,
        what="the Hub's answer",
        max_values=MAX_LISTING_VALUES,
        error=UnreachableError,
    )
    commit = top.values.get("sha")
    # It goes into addresses and into the names of cache entries.
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise top.fail("sha", "the Hub's answer names no commit")
    return Listing(commit, dict(map(_file, top.mappings("siblings"))))


def git_id(content: bytes) -> str:
    """Return the id git gives a file of this content.

    >>> git_id(b"")
    'e69de29bb2d1d6434b8b29ae775ad8c2e48c5391'
    """
    # git's own format: type, length, a zero byte and the content.
    digest = hashlib.sha1(b"blob %d\0" % len(content), usedforsecurity=False)
    digest.update(content)
    return digest.hexdigest()


def _file(sibling: Section) -> tuple[str, RemoteFile]:
    name = sibling.text("rfilename")
    lfs, size = sibling.values.get("lfs"), sibling.values.get("size")
    sha256 = _digest(lfs.get("sha256")) if isinstance(lfs, dict) else None
    return name, RemoteFile(
        # Not isinstance: true is an integer to Python.
        size if type(size) is int and size >= 0 else None,
        sha256,
        # Of a large file git keeps a pointer, and the id is the pointer's.
        None if isinstance(lfs, dict) else _digest(sibling.values.get("blobId")),
    )


def _digest(value: Any) -> str | None:
    return value if isinstance(value, str) and _DIGEST.fullmatch(value) else None
