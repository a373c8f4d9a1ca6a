"""The files of a Hub repository: fetched on request, of weights only the headers.

The first round asks at once for the listing, the config, the index and the header of a model in
one file (or, by its name, ModelOpt's quantisation), before it is known which of them there are; the
second for the headers of shards. With an index each header's length is known closely enough for
one request to bring it.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import PurePath
from typing import TypeVar
from urllib.parse import quote

from memfit.estimators.base.errors import CheckpointError, UnreachableError
from memfit.estimators.base.files import printable
from memfit.estimators.base.progress import Progress
from memfit.estimators.checkpoint.config import CONFIG, MAX_CONFIG_BYTES, MODELOPT
from memfit.estimators.checkpoint.hub.header_cache import HeaderCache
from memfit.estimators.checkpoint.hub.listing import MAX_LISTING_BYTES, Listing, parse_listing
from memfit.estimators.checkpoint.hub.parallel import start
from memfit.estimators.checkpoint.hub.requests import ATTEMPTS, Client, NoAnswerError, Response
from memfit.estimators.checkpoint.hub.settings import Hub
from memfit.estimators.checkpoint.manifest import Index
from memfit.estimators.checkpoint.safetensors import (
    LENGTH_BYTES,
    MAX_EXTENT,
    Header,
    checked_header_bytes,
    parse_header,
)
from memfit.estimators.checkpoint.shards import MAX_INDEX_BYTES
from memfit.estimators.checkpoint.weight_files import SAFETENSORS_INDEX

Result = TypeVar("Result")

MOST_THREADS = 32
# Of a server that answers sooner than Python sends requests: more threads only wait for each other.
THREADS_NEARBY = 8
NEARBY_SECONDS = 0.01
SINGLE_FILE = "model.safetensors"
# ModelOpt's exports are named for what they are in: Llama-3.3-70B-Instruct-FP4, Qwen3-8B-NVFP4.
_NAMES_MODELOPT = re.compile(r"fp[48]|modelopt", re.IGNORECASE)
# A header that no index describes: 97% of the Hub's are below 100 kB (huggingface_hub/hf_api.py).
USUAL_HEADER_BYTES = 128_000
# Bytes of a tensor's entry without its name: the longest dtype, three dimensions of five digits
# and offsets of eleven; and the metadata of a file.
ENTRY_BYTES = 96
METADATA_BYTES = 4096


class Repository:
    """A repository at a revision; ``stale`` says why a cached listing is used."""

    def __init__(
        self,
        hub: Hub,
        name: str,
        revision: str,
        *,
        place: PurePath,
        cache: HeaderCache,
        progress: Progress,
        listing_only: bool = False,
    ) -> None:
        """Fetch the listing, and with it what a first reading of safetensors needs.

        Raises:
            CheckpointError: when there is no such repository or revision.
            UnreachableError: when the Hub cannot be reached, and nothing is kept of it.
        """
        self.label = place
        self.stale = ""
        self._hub, self._name, self._cache, self._sink = hub, name, cache, progress
        self._client: Client | None = None
        self._begun: dict[str, Response | UnreachableError] = {}
        self.listing = self._listing(revision, listing_only)

    def names(self) -> Sequence[str]:
        """Return the names at the repository's top level, sorted."""
        return sorted(name for name in self.listing.files if "/" not in name)

    def exists(self, name: str) -> bool:
        """Return whether the repository has this file."""
        return name in self.listing.files

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return those of the names that the repository does not have."""
        return [name for name in names if name not in self.listing.files]

    def read(self, name: str, *, limit: int) -> bytes:
        """Return a small file whole, as it is at the listed commit."""
        file = self.listing.files[name]
        if file.size is not None and file.size > limit:
            raise CheckpointError(
                f"{printable(self.label / name)}: {file.size} bytes; such a file may have"
                f" at most {limit}"
            )
        # Cached by digest: an unchanged file is not fetched again at a new commit.
        if (kept := self.cached(name)) is not None and file.is_content(kept):
            return kept
        begun = self._begun.pop(name, None)
        if isinstance(begun, UnreachableError):
            raise begun
        # Fetched together with the listing, and only now compared with it.
        if begun and self._is_listed(begun) and file.is_content(begun.content):
            content = begun.content
        else:
            # By commit, not by branch: a push in between cannot mix two versions.
            url = self._url(self.listing.commit, name)
            content = self._alone(lambda: self._whole(url, limit)).content
        if not file.is_content(content):
            raise UnreachableError(
                f"{printable(self.label / name)}: what came is not the file that the Hub lists"
            )
        self.cache(name, content)
        return content

    def size(self, name: str) -> int:
        """Return the bytes of a file."""
        size = self.listing.files[name].size
        if size is None:
            raise UnreachableError(
                f"{printable(self.label / name)}: the Hub does not give its size"
            )
        return size

    def pytorch_file_bytes(self, name: str) -> int:
        """Return the bytes of a PyTorch file; the Hub lists sizes of real files."""
        return self.size(name)

    def headers(self, names: Sequence[str], index: Index | None) -> Iterable[Header]:
        """Return the headers, in parallel where they have to be fetched."""
        found = {name: self.cached(name) for name in names}
        missing = [name for name, content in found.items() if content is None]
        # One request for each header, when the first range is long enough.
        expected = _expected_bytes(index)
        jobs = [
            partial(self._header, name, expected.get(name, USUAL_HEADER_BYTES)) for name in missing
        ]
        found.update(zip(missing, self._parallel(jobs), strict=True))
        return [self._parsed(name, found[name] or b"") for name in names]

    def cached(self, name: str) -> bytes | None:
        """Return what the cache has of a file: its beginning, or a small one whole."""
        return self._cache.get(*self._key(name))

    def cache(self, name: str, content: bytes) -> None:
        """Cache a file's beginning, or a small one whole."""
        self._cache.put(content, *self._key(name))

    def piece(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes of a file from ``start`` to before ``end``.

        Raises:
            UnreachableError: when the Hub cannot be reached, or sends something else.
        """
        count = end - start
        content = self._alone(lambda: self._range(name, lambda _: count, start, end))[:count]
        if len(content) < count:
            raise UnreachableError(
                f"{printable(self.label / name)}: the Hub sent only a part of it"
            )
        return content

    def _parsed(self, name: str, content: bytes) -> Header:
        first_bytes, text = content[:LENGTH_BYTES], content[LENGTH_BYTES:]
        return parse_header(first_bytes, text, self.size(name), self.label / name)

    def _header(self, name: str, expected: int) -> bytes:
        path, size = self.label / name, self.size(name)
        # A safetensors file begins with the length of its header, in eight bytes.
        if size < LENGTH_BYTES:
            raise CheckpointError(f"{printable(path)}: {size} bytes is not a safetensors file")
        wanted = partial(_header_bytes, size=size, path=path)
        begun = self._begun.pop(name, None)
        # Brought by the first round.
        if isinstance(begun, Response) and self._is_listed(begun):
            content = self._checked(begun, name)
        else:
            content = self._range(name, wanted, 0, min(expected, size))
        header_bytes = wanted(content)
        if len(content) < header_bytes:
            rest = header_bytes - len(content)
            content += self._range(name, lambda _: rest, len(content), header_bytes)
        if len(content) < header_bytes:
            raise UnreachableError(f"{printable(path)}: the Hub sent only a part of the header")
        # Without the tensors that came along.
        content = content[:header_bytes]
        self.cache(name, content)
        return content

    def _range(self, name: str, wanted: Callable[[bytearray], int], start: int, end: int) -> bytes:
        url = self._url(self.listing.commit, name)
        return self._checked(self._connected().get(url, wanted, span=(start, end)), name)

    def _is_listed(self, begun: Response) -> bool:
        """Asked by the revision's name, an answer may be of another commit: a push came between."""
        return begun.commit == self.listing.commit

    def _checked(self, answer: Response, name: str) -> bytes:
        # A proxy or a mirror may send another file under the same name.
        if answer.total not in (None, self.size(name)):
            raise UnreachableError(
                f"{printable(self.label / name)}: its length is {answer.total} bytes as sent and"
                f" {self.size(name)} as listed"
            )
        return answer.content

    def _listing(self, revision: str, listing_only: bool) -> Listing:
        # By endpoint too: a mirror may have other content under a name.
        key = (self._hub.endpoint, self._name, "revision", revision)
        kept = self._cache.get(*key)
        if self._hub.offline:
            if kept is None:
                raise UnreachableError(
                    f"{printable(self.label)}: HF_HUB_OFFLINE is set, and neither Hugging Face's"
                    " cache nor memfit's has it; unset it once"
                )
            return self._as_kept(kept, f"{printable(self.label)}: HF_HUB_OFFLINE is set")
        try:
            content = self._first_round(revision, kept is None, listing_only)
        # Only when no answer came: an old listing must not hide a refusal.
        except NoAnswerError as error:
            if kept is None:
                raise
            return self._as_kept(kept, str(error))
        listing = parse_listing(content, self.label)
        self._cache.put(content, *key)
        return listing

    def _as_kept(self, content: bytes, why: str) -> Listing:
        listing = parse_listing(content, self.label)
        self.stale = f"{why}; this is commit {listing.commit[:12]}, as it was last read"
        return listing

    def _first_round(self, revision: str, is_first: bool, listing_only: bool) -> bytes:
        """The listing; on a first call the files that every model has come along with it."""
        url = f"{self._hub.endpoint}/api/models/{self._name}/revision/{quote(revision, safe='')}"
        attempts = ATTEMPTS if is_first else 1  # with a cached answer one attempt is enough
        jobs = [lambda: self._whole(f"{url}?blobs=true", MAX_LISTING_BYTES, attempts).content]
        if is_first and not listing_only:
            config, index = self._url(revision, CONFIG), self._url(revision, SAFETENSORS_INDEX)
            jobs += [
                partial(self._begin, CONFIG, lambda: self._whole(config, MAX_CONFIG_BYTES)),
                partial(
                    self._begin, SAFETENSORS_INDEX, lambda: self._whole(index, MAX_INDEX_BYTES)
                ),
                self._guess(revision),
            ]
        return self._parallel(jobs)[0]

    def _begin(self, name: str, fetch: Callable[[], Response]) -> bytes:
        """Fetch a file before its existence is known."""
        try:
            self._begun[name] = fetch()
        except UnreachableError as error:
            self._begun[name] = error
        except CheckpointError:
            pass  # none there, or damaged: when it counts it is asked for again
        return b""

    def _guess(self, revision: str) -> Callable[[], bytes]:
        """Files that a model with this name usually has next to config and index."""
        if _NAMES_MODELOPT.search(self._name):
            url = self._url(revision, MODELOPT)
            return partial(self._begin, MODELOPT, lambda: self._whole(url, MAX_CONFIG_BYTES))
        return partial(self._begin, SINGLE_FILE, lambda: self._likely_header(revision))

    def _likely_header(self, revision: str) -> Response:
        path = self.label / SINGLE_FILE
        # The size is not listed yet; `_header` checks it again.
        wanted = partial(_header_bytes, size=MAX_EXTENT, path=path)
        url = self._url(revision, SINGLE_FILE)
        return self._connected().get(url, wanted, span=(0, USUAL_HEADER_BYTES), attempts=1)

    def _whole(self, url: str, limit: int, attempts: int = ATTEMPTS) -> Response:
        # One byte more than the limit shows that there is more.
        answer = self._connected().get(url, lambda _: limit + 1, attempts=attempts)
        if len(answer.content) > limit:
            raise UnreachableError(f"{printable(self.label)}: the Hub sent more than {limit} bytes")
        return answer

    def _parallel(self, jobs: Sequence[Callable[[], bytes]]) -> list[bytes]:
        """The results of jobs in their order; the first that fails ends the others."""
        if not jobs:
            return []
        client = self._connected()
        is_nearby = client.fastest_seconds < NEARBY_SECONDS
        futures = start(jobs, THREADS_NEARBY if is_nearby else MOST_THREADS)
        try:
            # Reported after the requests are sent, so that the report costs no waiting time.
            self._sink.begin(f"Reading {printable(self.label)}", len(jobs))
            for future in futures:
                future.add_done_callback(lambda _: self._sink.advance())
            return [client.result(future) for future in futures]
        except BaseException:
            # Without this the others would go on until their own timeouts.
            client.stop()
            for future in futures:
                future.cancel()
            raise
        finally:
            self._sink.end()

    def _alone(self, job: Callable[[], Result]) -> Result:
        """The result of one job, without a report."""
        client = self._connected()
        (future,) = start([job], 1)
        return client.result(future)

    def _connected(self) -> Client:
        # An old listing and new files would be two commits in one estimate.
        if self.stale:
            raise UnreachableError(f"{self.stale}, and a part of it is not kept")
        if self._client is None:
            self._client = Client(self._hub, self._name, self._sink)
        return self._client

    def _key(self, name: str) -> tuple[str, ...]:
        # By content where the Hub lists a digest, else by commit: a branch changes.
        digest = self.listing.files[name].digest
        return self._hub.endpoint, self._name, digest or f"{self.listing.commit}/{name}"

    def _url(self, revision: str, name: str) -> str:
        return f"{self._hub.endpoint}/{self._name}/resolve/{quote(revision, safe='')}/{quote(name)}"


def _header_bytes(body: bytearray | bytes, size: int, path: PurePath) -> int:
    """How many bytes the header takes, as soon as its length has come."""
    if len(body) < LENGTH_BYTES:
        return LENGTH_BYTES
    return checked_header_bytes(bytes(body[:LENGTH_BYTES]), size, path)


def _expected_bytes(index: Index | None) -> dict[str, int]:
    """How long the header of each file may be, by the names of the tensors in it."""
    expected: dict[str, int] = {}
    for tensor, file in (index.weight_map if index else {}).items():
        # The entry of a tensor is its name and a bounded rest.
        known = expected.setdefault(file, LENGTH_BYTES + METADATA_BYTES)
        expected[file] = known + len(tensor) + ENTRY_BYTES
    return expected
