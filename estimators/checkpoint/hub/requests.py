"""Requests to the Hub: bounded in bytes, time and tries. The one module that touches the network.

The token and the settings are huggingface-hub's. Its metadata calls are not used: they read a body
whole even when a server ignores Range, refuse headers above 25 MB, and drop what the digest is
computed from (docs/hub.md).
"""

import os
import re
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import closing
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.errors import InputError, UnreachableError
from memfit.estimators.base.files import printable
from memfit.estimators.base.progress import FinishedRequest, Progress
from memfit.estimators.base.version import __version__
from memfit.estimators.checkpoint.hub.http_errors import http_error
from memfit.estimators.checkpoint.hub.parallel import start
from memfit.estimators.checkpoint.hub.settings import Hub, open_session

if TYPE_CHECKING:
    import httpx2

ATTEMPTS = 3
FIRST_PAUSE_SECONDS = 0.5  # doubled with every attempt
LONGEST_PAUSE_SECONDS = 20.0  # a longer Retry-After is reported instead of waiting
MAX_REDIRECTS = 5
DRAINED_BYTES = 65_536  # a rest this small is read, so that the connection can be used again
# Timeout, rate limit and errors of the server; any other refusal is final.
_AGAIN = frozenset((408, 429, 500, 502, 503, 504))
# "bytes first-last/size"; a star for a size that the server does not know (RFC 9110).
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18}|\*)")
# "ratelimit" of the Hub: r requests left, t seconds until more (huggingface_hub _http.py).
_RATE_LIMIT = r"\br\s*=\s*0\s*;\s*t\s*=\s*([0-9]{1,9})"
# Variables that can hold a token or name where it is (huggingface_hub constants.py).
_TOKEN_VARIABLE = re.compile("HF_TOKEN|HF_OIDC|HUGGING_?FACE")


Result = TypeVar("Result")


class NoAnswerError(UnreachableError):
    """The Hub did not answer, or not as a Hub does: another time it may."""


class _AgainError(Exception):
    """An attempt failed in a way that another may not; ``pause`` is what the server asks for."""

    def __init__(self, reason: str, pause: float | None = None) -> None:
        super().__init__(reason)
        self.pause = pause


class Response(Struct, frozen=True):
    """The requested part of a response body, and what the headers say about the file."""

    content: bytes
    total: int | None  # bytes of the whole file
    commit: str | None  # the commit of the file, sent by the Hub before it redirects


class _Redirect(Struct, frozen=True):
    """The request that a redirect leads to, and the commit it names."""

    request: "httpx2.Request"
    url: str
    commit: str | None


class Client:
    """Makes requests, from any thread."""

    def __init__(self, hub: Hub, repository: str, progress: Progress) -> None:
        """Take what is asked for; the token is read here.

        Raises:
            InputError: when the token is invalid.
            UnreachableError: when the token cannot be read.
        """
        self._hub, self._repository, self._sink = hub, repository, progress
        # The thread reads the system's certificates first, outside Python.
        import httpcore2  # noqa: F401

        (self._session,) = start([open_session], 1)
        # Not in that thread, which would hold up what this one imports next.
        import httpx2  # noqa: F401

        self._headers = {
            "accept-encoding": "identity",  # ranges are of the file, not of its compression
            "user-agent": f"memfit/{__version__}",
            **_authorization(),
        }
        # Set from another thread: requests look at it between parts and between attempts.
        self._stopped = threading.Event()
        # The deadlines and addresses of requests.
        self._under_way: set[tuple[float, str]] = set()
        self.fastest_seconds = float("inf")
        """The shortest time of a request that has ended."""

    def stop(self) -> None:
        """Let requests under way end early: their results are no longer wanted."""
        self._stopped.set()

    def get(
        self,
        url: str,
        wanted: Callable[[bytearray], int],
        *,
        span: tuple[int, int] | None = None,
        attempts: int = ATTEMPTS,
    ) -> Response:
        """Return the body at ``url``, from ``span[0]`` to before ``span[1]`` where it is given.

        Reading stops once there are ``wanted(body so far)`` bytes, whatever the server sends on.
        Only `result` bounds its time in every case, so it is called in the job of a thread.

        Raises:
            CheckpointError: when the Hub knows no such repository, revision or file.
            InputError: when the connection settings are unusable.
            NoAnswerError: when no attempt brought an answer, or it took too long.
            UnreachableError: when the Hub refuses.
        """
        request = deadline, _ = time.monotonic() + self._hub.longest_seconds, url
        self._under_way.add(request)
        try:
            return self._tried(url, wanted, span, attempts, deadline)
        finally:
            self._under_way.discard(request)

    def result(self, job: Future[Result]) -> Result:
        """Return the result of a job on another thread, unless a request is past its deadline.

        Raises:
            NoAnswerError: when one is. Its thread is left behind: a timeout is for one read, and
                while headers drip in, or 1xx answers follow one another, httpx never returns.
        """
        while not job.done():
            now = time.monotonic()
            # A request that begins later has a later deadline.
            first = min(self._under_way.copy(), default=(now + self._hub.longest_seconds, ""))
            deadline, url = first
            if deadline <= now:
                self._under_way.discard(first)
                raise self._too_long(url)
            wait([job], deadline - now)
        return job.result()

    def _tried(
        self,
        url: str,
        wanted: Callable[[bytearray], int],
        span: tuple[int, int] | None,
        attempts: int,
        deadline: float,
    ) -> Response:
        pause = FIRST_PAUSE_SECONDS
        for attempt in range(1, attempts + 1):
            try:
                return self._follow(url, wanted, span, deadline)
            except _AgainError as again:
                delay = pause if again.pause is None else again.pause
                late = delay > LONGEST_PAUSE_SECONDS or time.monotonic() + delay > deadline
                # No wait before a failure: the error is raised at once.
                if attempt == attempts or late or self._stopped.is_set():
                    raise NoAnswerError(self._given_up(again, attempt)) from None
                # Not time.sleep, which `stop` could not end.
                self._stopped.wait(delay)
                pause *= 2
        raise AssertionError("no attempts were allowed")

    def _too_long(self, url: str) -> NoAnswerError:
        return NoAnswerError(
            f"{self._repository}: {_host(url)} took longer than {self._hub.longest_seconds:g} s"
        )

    def _given_up(self, again: _AgainError, attempt: int) -> str:
        tries = "" if attempt == 1 else f", {attempt} times"
        wait = "" if again.pause is None else f"; it asks to wait {again.pause:.0f} s"
        return f"{self._repository}: {printable(again)}{tries}{wait}"

    def _follow(
        self,
        url: str,
        wanted: Callable[[bytearray], int],
        span: tuple[int, int] | None,
        deadline: float,
    ) -> Response:
        request: httpx2.Request | None = None
        commit = None
        for hop in range(MAX_REDIRECTS + 1):
            answer = self._attempt(url, request, wanted, span, deadline)
            # Only the Hub itself knows the commit; the storage that it redirects to does not.
            commit = answer.commit if hop == 0 else commit
            if isinstance(answer, Response):
                return replace(answer, commit=commit)
            request = answer.request
            # The token is for the endpoint alone; a signed address of a storage needs none.
            if _origin(answer.url) != _origin(url):
                request.headers.pop("authorization", None)
            # Never from TLS to plain text, whatever a server says.
            if _origin(url)[0] == "https" and _origin(answer.url)[0] != "https":
                raise UnreachableError(
                    f"{self._repository}: {_host(url)} redirects to {_host(answer.url)} without TLS"
                )
            url = answer.url
        raise UnreachableError(
            f"{self._repository}: {_host(url)} redirects more than {MAX_REDIRECTS} times"
        )

    def _attempt(
        self,
        url: str,
        request: "httpx2.Request | None",
        wanted: Callable[[bytearray], int],
        span: tuple[int, int] | None,
        deadline: float,
    ) -> "Response | _Redirect":
        """One request, by default a new one: an answer, or where it leads."""
        import httpx2

        session = self._session.result()
        started, status, body = time.monotonic(), None, bytearray()
        try:
            request = request or self._request(session, url, span)
            # Redirects are followed by _follow, which decides about the token at every hop.
            with closing(session.send(request, stream=True, follow_redirects=False)) as response:
                status, commit = response.status_code, response.headers.get("x-repo-commit")
                if response.has_redirect_location:
                    # Not needed, but with its body unread the connection could not be used again.
                    self._read(response, body, 0, lambda _: 0, deadline)
                    return self._redirect(response, commit)
                # Before the body: the page of an error is not read as a file.
                self._reject(response, url)
                skipped, total = self._extent(response, span[0] if span else 0)
                self._read(response, body, skipped, wanted, deadline)
                return Response(bytes(body[skipped:]), total, commit)
        # Without an answer in time another attempt may get one.
        except httpx2.TimeoutException:
            limit = f"{self._hub.timeout_seconds:g} s"
            raise _AgainError(f"{_host(url)} did not answer within {limit}") from None
        except (httpx2.NetworkError, httpx2.RemoteProtocolError, httpx2.ProxyError) as error:
            raise _AgainError(f"{_host(url)} cannot be reached: {_reason(error)}") from None
        # A fault of the address or the settings is the same at every attempt.
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
            raise UnreachableError(
                f"{self._repository}: {printable(url)} cannot be asked: {_reason(error)}"
            ) from None
        finally:
            seconds = time.monotonic() - started
            self.fastest_seconds = min(self.fastest_seconds, seconds)
            # Without its query: a signed address carries a key in it.
            self._sink.request(FinishedRequest(url.partition("?")[0], status, len(body), seconds))

    def _request(
        self, session: "httpx2.Client", url: str, span: tuple[int, int] | None
    ) -> "httpx2.Request":
        # The last byte of a Range is included (RFC 9110).
        part = {"range": f"bytes={span[0]}-{span[1] - 1}"} if span else {}
        headers = {**self._headers, **part}
        return session.build_request("GET", url, headers=headers, timeout=self._hub.timeout_seconds)

    def _redirect(self, response: "httpx2.Response", commit: str | None) -> _Redirect:
        # httpx2 has parsed the Location, which may be relative (RFC 9110).
        if response.next_request is None:
            raise UnreachableError(
                f"{self._repository}: {_host(str(response.url))} redirects to an invalid address"
            )
        return _Redirect(response.next_request, str(response.next_request.url), commit)

    def _read(
        self,
        response: "httpx2.Response",
        body: bytearray,
        skipped: int,
        wanted: Callable[[bytearray], int],
        deadline: float,
    ) -> None:
        length = _length(response)
        # Raw: a compressed body could be far larger than what came.
        for part in response.iter_raw():
            body += part
            rest = None if length is None else length - len(body)
            enough = skipped + wanted(body[skipped:] if skipped else body)
            # Closing early costs the connection, so a short rest is read to its end.
            if len(body) >= enough and (rest is None or rest > DRAINED_BYTES):
                return
            if self._stopped.is_set() or time.monotonic() > deadline:
                raise self._too_long(str(response.url))

    def _extent(self, response: "httpx2.Response", first: int) -> tuple[int, int | None]:
        """Bytes of the body that come before ``first``, and the file's size; 200 is all of it."""
        # The server ignores Range and sends the file from its first byte.
        if response.status_code == 200:
            return first, _length(response)
        match = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if not match or int(match[1]) != first:
            raise UnreachableError(
                f"{self._repository}: {_host(str(response.url))} answered another part of the file"
                " than it was asked for"
            )
        return 0, None if match[2] == "*" else int(match[2])

    def _reject(self, response: "httpx2.Response", url: str) -> None:
        status = response.status_code
        if status in (200, 206):
            return
        if status in _AGAIN:
            raise _AgainError(f"{_host(url)} answered {status}", _asked_pause(response))
        raise http_error(
            status,
            response.headers.get("x-error-code", ""),
            response.headers.get("x-error-message", ""),
            url=url,
            repository=self._repository,
            endpoint=self._hub.endpoint,
            has_token="authorization" in self._headers,
        )


def _authorization() -> dict[str, str]:
    from huggingface_hub import constants

    # huggingface_hub: the user wants no stored token to be sent.
    if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN or not _may_have_token(constants.HF_TOKEN_PATH):
        return {}
    from huggingface_hub import get_token
    from huggingface_hub.errors import OIDCError

    try:
        token = get_token()
    except (OIDCError, OSError, ValueError) as error:
        raise UnreachableError(f"the Hugging Face token cannot be read: {_reason(error)}") from None
    if token is None:
        return {}
    # A line break in a token would end the header and begin another.
    if not token.isascii() or not token.isprintable():
        raise InputError("the Hugging Face token has characters no token has; see HF_TOKEN")
    return {"authorization": f"Bearer {token}"}


def _may_have_token(path: str) -> bool:
    """Whether get_token can find a token: its imports take longer than a request.

    Source: huggingface_hub/utils/_auth.py: variables, the file at ``path``, a notebook's secrets.
    """
    try:
        os.stat(path)
    except FileNotFoundError:
        return "google.colab" in sys.modules or any(map(_TOKEN_VARIABLE.match, os.environ))
    except (OSError, ValueError):
        pass  # get_token says what is wrong
    return True


def _asked_pause(response: "httpx2.Response") -> float | None:
    """Seconds until another attempt: by Retry-After, else by the Hub's own rate limit header."""
    text = response.headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        limit = re.search(_RATE_LIMIT, response.headers.get("ratelimit", ""))
        return float(limit[1]) if limit and response.status_code == 429 else None


def _length(response: "httpx2.Response") -> int | None:
    text = response.headers.get("content-length", "")
    return int(text[:18]) if text.isascii() and text.isdigit() else None


def _origin(url: str) -> tuple[str, str]:
    try:
        parts = urlsplit(url)
    except ValueError:
        return "", ""
    # Without user and password, and in lower case: host names have no case.
    return parts.scheme, parts.netloc.rpartition("@")[2].lower()


def _host(url: str) -> str:
    return printable(_origin(url)[1] or url)


def _reason(error: Exception) -> str:
    return printable(str(error) or type(error).__name__)
