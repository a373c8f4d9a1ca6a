"""A server that behaves like the Hub, and one like the host of its large files.

Answers, codes and redirects are those of the Hub as huggingface-hub expects them: the model's
listing with ``blobs=true``, its tree, ``resolve`` with X-Repo-Commit, X-Error-Code on errors, and
a redirect to another host with a signed address for large files, which takes Range.
"""

import hashlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_of_a_member"
PIECE = 16_384
_RESET = (socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@dataclass
class Made:
    """A request as the server received it."""

    host: str  # "hub" or "files"
    path: str
    headers: dict[str, str]
    connection: tuple[str, int] = ("", 0)  # the client's end
    sent: int = 0  # bytes of the body


@dataclass
class Repo:
    """A repository: a folder of files, at one commit with one branch."""

    folder: Path
    commit: str = COMMIT
    branch: str = "main"
    private: bool = False
    gated: bool = False
    digests: bool = True  # whether the listing has sizes and digests
    before: Path | None = None  # the commit sent for the branch, as after a push

    def names(self) -> list[str]:
        """Return every file's path in the repository."""
        paths = (path for path in self.folder.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self.folder)) for path in paths)

    def is_large(self, name: str) -> bool:
        """Return whether git keeps only a pointer of the file."""
        return name.endswith((".safetensors", ".bin", ".gguf"))

    def entry(self, name: str) -> dict[str, Any]:
        """Return a file in the form of the listing."""
        if not self.digests:
            return {"rfilename": name}
        size = (self.folder / name).stat().st_size
        if self.is_large(name):
            # No digest of terabytes of holes: path and size replace it.
            sha256 = hashlib.sha256(f"{self.folder}/{name}/{size}".encode()).hexdigest()
            lfs = {"sha256": sha256, "size": size, "pointerSize": 135}
            return {"rfilename": name, "size": size, "blobId": "1" * 40, "lfs": lfs}
        content = (self.folder / name).read_bytes()
        blob = hashlib.sha1(b"blob %d\0" % size + content).hexdigest()
        return {"rfilename": name, "size": size, "blobId": blob}


@dataclass
class Fault:
    """A fault for requests with ``where`` in their path; ``times`` -1 means always."""

    where: str
    kind: str  # "status", "reset", "stall", "no-range", "short", "other-length", "garbage", ...
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    times: int = -1

    def strikes(self, path: str) -> bool:
        """Return whether the fault happens this time."""
        if self.times == 0 or self.where not in path:
            return False
        self.times -= 1
        return True


@dataclass
class FakeHub:
    """The two servers, their repositories and their requests."""

    repos: dict[str, Repo] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    listed: list[dict[str, Any]] = field(default_factory=list)
    """What the listing of an owner's models says of each."""
    latency_seconds: float = 0.0
    endpoint: str = ""
    files_endpoint: str = ""
    released: threading.Event = field(default_factory=threading.Event)

    def asked(self, host: str = "hub") -> list[str]:
        return [made.path for made in self.made if made.host == host]

    def sent(self) -> int:
        return sum(made.sent for made in self.made)


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    """Run both servers on this machine until the block ends."""
    servers = [_Server(("127.0.0.1", 0), _handler(hub, host)) for host in ("hub", "files")]
    hub.endpoint, hub.files_endpoint = (
        f"http://127.0.0.1:{server.server_address[1]}" for server in servers
    )
    threads = [threading.Thread(target=server.serve_forever, args=(0.01,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        for server in servers:
            server.shutdown()
            server.server_close()
        for thread in threads:
            thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that disconnect are expected."""


def _handler(hub: FakeHub, host: str) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        pass

    Handler.hub, Handler.host = hub, host
    return Handler


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub
    host: str
    # Headers and the start of the body are sent together, as by a real server.
    wbufsize = 65_536

    def log_message(self, format: str, *args: Any) -> None:
        """The tests read the requests from ``FakeHub.made``."""

    def do_HEAD(self) -> None:
        """Respond as to GET, without the body."""
        self.do_GET()

    def do_GET(self) -> None:
        """Respond to one request."""
        seen = {name.lower(): value for name, value in self.headers.items()}
        # Recorded before the response: a client may finish before the server.
        self.made = Made(self.host, self.path, seen, self.client_address)
        self.hub.made.append(self.made)
        time.sleep(self.hub.latency_seconds)
        try:
            if not self._goes_wrong():
                self._answer()
            self.wfile.flush()
        except OSError:
            self.close_connection = True

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        if self.host == "files":
            name, _, file = path.partition("//")
            self._send_file(self.hub.repos[name], file)
        elif path == "api/models":
            owner = parse_qs(urlsplit(self.path).query)["author"][0]
            self._send_json(
                [each for each in self.hub.listed if each["id"].startswith(f"{owner}/")]
            )
        elif path.startswith("api/models/"):
            owner, name, kind, revision = path.removeprefix("api/models/").split("/", 3)
            if repo := self._repo(f"{owner}/{name}", revision, listing=True):
                self._send_json(_listing(repo) if kind == "revision" else _tree(repo))
        else:
            owner, name, _, rest = path.split("/", 3)
            revision, _, file = rest.partition("/")
            if repo := self._repo(f"{owner}/{name}", revision, listing=False):
                if repo.before and revision == repo.branch:
                    repo = replace(repo, folder=repo.before, commit="e" * 40)
                self._resolve(repo, f"{owner}/{name}", file)

    def _repo(self, name: str, revision: str, *, listing: bool) -> Repo | None:
        """The visible repository; without one the error has been sent."""
        repo, token = self.hub.repos.get(name), self.headers.get("authorization")
        if token and token != f"Bearer {TOKEN}":
            self._reject(401, "", "Invalid credentials in Authorization header")
        elif repo is None or (repo.private and not token):
            self._reject(404 if token else 401, "RepoNotFound", "Repository not found")
        elif revision not in (repo.branch, repo.commit):
            self._reject(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif repo.gated and not listing and not token:
            self._reject(401, "GatedRepo", f"Access to model {name} is restricted.")
        else:
            return repo
        return None

    def _resolve(self, repo: Repo, name: str, file: str) -> None:
        if not (repo.folder / file).is_file():
            self._reject(404, "EntryNotFound", "Entry not found")
        elif repo.is_large(file):
            self.send_response(302)
            self.send_header("Location", f"{self.hub.files_endpoint}/{name}//{file}?signature=abc")
            self.send_header("X-Repo-Commit", repo.commit)
            if repo.digests:
                entry = repo.entry(file)
                self.send_header("X-Linked-Size", str(entry["size"]))
                self.send_header("X-Linked-ETag", f'"{entry["lfs"]["sha256"]}"')
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self._send_file(repo, file)

    def _send_file(self, repo: Repo, name: str) -> None:
        size = (repo.folder / name).stat().st_size
        start, end, asked = 0, size, self.headers.get("range", "")
        if asked and not self._fault("no-range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(size, int(last or size) + 1)
            self.send_response(206)
            total = size + 8 if self._fault("other-length") else size
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{total}")
        else:
            self.send_response(200)
        self.send_header("X-Repo-Commit", repo.commit)
        if repo.digests:
            entry = repo.entry(name)
            self.send_header("ETag", f'"{entry.get("lfs", {}).get("sha256") or entry["blobId"]}"')
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if self._fault("short"):
            end -= 1
            self.close_connection = True
        self._send_bytes(repo.folder / name, start, end)

    def _send_bytes(self, path: Path, start: int, end: int) -> None:
        if self.command == "HEAD":
            return
        with path.open("rb") as file:
            file.seek(start)
            while start < end:
                piece = file.read(min(PIECE, end - start))
                if self.made.sent and self._fault("reset"):
                    self.wfile.flush()
                    self.connection.setsockopt(*_RESET)
                    raise ConnectionResetError
                self.made.sent += len(piece)
                self.wfile.write(piece)
                start += len(piece)

    def _fault(self, kind: str) -> bool:
        return any(f.kind == kind and f.strikes(self.path) for f in self.hub.faults)

    def _goes_wrong(self) -> bool:
        for fault in self.hub.faults:
            action: Callable[[Fault], None] | None = {
                "status": self._send_status,
                "stall": self._stall,
                "garbage": self._send_garbage,
                "drop": self._drop,
                "drip": self._drip,
                "continue": self._continue,
                "redirect": self._redirect,
            }.get(fault.kind)
            if action and fault.strikes(self.path):
                action(fault)
                return True
        return False

    def _send_status(self, fault: Fault) -> None:
        self.send_response(fault.status)
        for name, value in fault.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _stall(self, fault: Fault) -> None:
        self.hub.released.wait(30)
        self.close_connection = True

    def _drip(self, fault: Fault) -> None:
        """Headers without an end, a byte at a time."""
        self._without_end(b"HTTP/1.1 200 OK\r\nx-endless: ", b"a")

    def _continue(self, fault: Fault) -> None:
        """Interim answers without an end."""
        self._without_end(b"", b"HTTP/1.1 100 Continue\r\n\r\n")

    def _without_end(self, first: bytes, again: bytes) -> None:
        self.wfile.write(first)
        while not self.hub.released.wait(0.01):
            self.wfile.write(again)
            self.wfile.flush()

    def _send_garbage(self, fault: Fault) -> None:
        self._send(200, b"<html>Please log in to the network</html>", "text/html")

    def _drop(self, fault: Fault) -> None:
        self.close_connection = True

    def _redirect(self, fault: Fault) -> None:
        self.send_response(302)
        self.send_header("Location", fault.headers["location"])
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _reject(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.made.sent += len(body)
            self.wfile.write(body)


def _listing(repo: Repo) -> dict[str, Any]:
    siblings = [repo.entry(name) for name in repo.names()]
    return {"id": "org/name", "sha": repo.commit, "gated": repo.gated, "siblings": siblings}


def _tree(repo: Repo) -> list[dict[str, Any]]:
    return [_leaf(repo.entry(name)) for name in repo.names()]


def _leaf(entry: dict[str, Any]) -> dict[str, Any]:
    leaf = {"type": "file", "path": entry["rfilename"], "size": entry.get("size")}
    if lfs := entry.get("lfs"):
        leaf["lfs"] = {"oid": lfs["sha256"], "size": lfs["size"], "pointerSize": lfs["pointerSize"]}
    return {**leaf, "oid": entry.get("blobId")}
