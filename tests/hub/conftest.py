"""A Hub on this machine, with one model in three shards."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from memfit.estimators.base.progress import FinishedRequest
from memfit.estimators.checkpoint.hub.header_cache import HeaderCache
from memfit.estimators.checkpoint.hub.settings import Hub
from memfit.estimators.checkpoint.hub.source import open_hub
from memfit.estimators.checkpoint.manifest import Checkpoint
from tests.hub.server import FakeHub, Repo, serve
from tests.models import QWEN3_4B, plain_tensors, write_checkpoint
from tests.sparse import Shapes

NAME = "org/name"
TENSORS: Shapes = {
    f"model.layers.{layer}.mlp.{part}_proj.weight": ("BF16", (2560, 9728))
    for layer in range(12)
    for part in ("gate", "up", "down")
}


class Reports:
    """A progress sink that keeps every message."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.requests: list[FinishedRequest] = []
        self.advanced = self.ended = 0

    def begin(self, what: str, steps: int) -> None:
        self.begun.append((what, steps))

    def advance(self, steps: int = 1) -> None:
        self.advanced += steps

    def end(self) -> None:
        self.ended += 1

    def request(self, request: FinishedRequest) -> None:
        self.requests.append(request)


class Reader:
    """Opens names on the test's Hub, with the test's own directories."""

    def __init__(self, hub: FakeHub, home: Path) -> None:
        self.hub, self.home = hub, home
        self.cache = HeaderCache(home / "cache")
        self.snapshots = home / "hf" / "hub"
        self.reports = Reports()

    def __call__(
        self,
        name: str = NAME,
        *,
        offline: bool = False,
        timeout: float = 5.0,
        longest: float = 120.0,
    ) -> Checkpoint:
        settings = Hub(self.hub.endpoint, self.snapshots, offline, timeout, longest)
        found = open_hub(name, progress=self.reports, hub=settings, cache=self.cache)
        return replace(found, others=None)  # is not compared: it opens further files


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint of three shards with an index."""
    return write_checkpoint(tmp_path / "model", QWEN3_4B, plain_tensors(QWEN3_4B), shards=3)


@pytest.fixture
def hub(model: Path) -> Iterator[FakeHub]:
    """The Hub that has the model as org/name."""
    with serve(FakeHub({NAME: Repo(model)})) as served:
        yield served


@pytest.fixture
def read(hub: FakeHub, tmp_path: Path) -> Reader:
    """Opens names on that Hub."""
    return Reader(hub, tmp_path)
