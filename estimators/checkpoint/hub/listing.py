"""What the Hub says of a repository at a revision: its commit, and every file with its digest."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import PurePath

import msgspec
from msgspec import Struct, field

from memfit.estimators.base.errors import UnreachableError
from memfit.estimators.base.files import printable

# The largest model repositories have some thousands of files.
MAX_LISTING_BYTES = 16_000_000
MAX_FILES = 100_000
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_DIGEST = re.compile(r"[0-9a-f]{40,64}")


class _Pointer(Struct, frozen=True, gc=False):
    """What git keeps of a large file."""

    sha256: str | None = None


class RemoteFile(Struct, frozen=True, gc=False):
    """A file as it is listed; a Hub's copy may leave out what it does not know."""

    name: str = field(name="rfilename")
    size: int | None = None
    """Bytes of the file."""
    blob: str | None = field(name="blobId", default=None)
    lfs: _Pointer | None = None

    @property
    def sha256(self) -> str | None:
        """The digest of a large file's content."""
        return _digest(self.lfs.sha256) if self.lfs else None

    @property
    def git_id(self) -> str | None:
        """The digest of a small file's content, as git counts it; of a large one git has none."""
        return None if self.lfs else _digest(self.blob)

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


class Listing(Struct, frozen=True):
    """A repository at one commit."""

    commit: str
    """The hash of the commit."""
    files: Mapping[str, RemoteFile]
    """By path in the repository."""


class _Answer(Struct, frozen=True, gc=False):
    """The keys of the Hub's answer that are used; others are skipped without being built."""

    sha: str
    siblings: list[RemoteFile]


def parse_listing(content: bytes, place: PurePath) -> Listing:
    """Return the listing that the Hub's answer is (GET /api/models/NAME/revision/REVISION).

    Raises:
        UnreachableError: when it is not a listing, e.g. the login page of a captive portal.
    """
    # Before parsing: a file takes memory far above its few bytes. Large ones have two objects.
    if content.count(b"{") > 2 * MAX_FILES:
        raise _fault(place, f"has more than {MAX_FILES} files")
    try:
        answer = _DECODER.decode(content)
    # ValueError: text that is not UTF-8. RecursionError: brackets within brackets.
    except (ValueError, RecursionError) as error:
        raise _fault(place, f"is not a listing: {printable(error)}") from None
    # It goes into addresses and into the names of cache entries.
    if not _COMMIT.fullmatch(answer.sha):
        raise _fault(place, "sha: names no commit")
    for file in answer.siblings:
        if file.size is not None and file.size < 0:
            raise _fault(place, f"size of {printable(file.name)}: is below zero")
    return Listing(answer.sha, {file.name: file for file in answer.siblings})


def git_id(content: bytes) -> str:
    """Return the id git gives a file of this content.

    >>> git_id(b"")
    'e69de29bb2d1d6434b8b29ae775ad8c2e48c5391'
    """
    # git's own format: type, length, a zero byte and the content.
    digest = hashlib.sha1(b"blob %d\0" % len(content), usedforsecurity=False)
    digest.update(content)
    return digest.hexdigest()


_DECODER = msgspec.json.Decoder(_Answer)


def _fault(place: PurePath, text: str) -> UnreachableError:
    return UnreachableError(f"{printable(place)}: the Hub's answer {text}")


def _digest(value: str | None) -> str | None:
    return value if value and _DIGEST.fullmatch(value) else None
