"""``pytest --memfit``: the targets of memfit.yaml as tests, and tests marked ``memfit``."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from memfit.estimators.gate import POLICY

if TYPE_CHECKING:
    from memfit.estimators.gate.policy import Policy
    from memfit.estimators.gate.report import TargetReport


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.getgroup("memfit").addoption(
        "--memfit",
        action="store_true",
        help="check the targets of every memfit.yaml, and run the tests that are marked memfit",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark."""
    config.addinivalue_line("markers", "memfit: a test of models' memory; needs --memfit")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the marked tests without the option."""
    if not config.getoption("--memfit"):
        for item in items:
            if item.get_closest_marker("memfit"):
                item.add_marker(pytest.mark.skip(reason="needs --memfit"))


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect a policy."""
    if not parent.config.getoption("--memfit") or file_path.name != POLICY:
        return None
    return PolicyFile.from_parent(parent, path=file_path)


class PolicyFile(pytest.File):
    """A policy, whose targets are tests."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield a test for each target."""
        from memfit.estimators.base.errors import MemfitError
        from memfit.estimators.gate.policy import read_policy

        try:
            policy = read_policy(self.path)
        except MemfitError as error:
            raise self.CollectError(str(error)) from None
        for target in policy.targets:
            yield PolicyItem.from_parent(self, name=target.name, policy=policy)


class PolicyItem(pytest.Item):
    """One target of a policy."""

    def __init__(self, *, policy: "Policy", **place: object) -> None:
        """Take the policy, and what pytest gives."""
        super().__init__(**place)  # type: ignore[arg-type]
        self._policy = policy

    def runtest(self) -> None:
        """Fail unless every limit of the target holds, as ``memfit gate`` says."""
        from memfit.estimators.gate.baseline import NAME, read_baseline
        from memfit.estimators.gate.evaluate import run_gate, select

        lock = read_baseline(self.path.with_name(NAME))
        report = run_gate(select(self._policy, (self.name,)), lock, allow_bounds=False).report
        (target,) = report.targets
        if target.status != "passed":
            pytest.fail(_reason(target), pytrace=False)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Return what a failure is listed under."""
        line = next(each.line for each in self._policy.targets if each.name == self.name)
        return self.path, line - 1, f"target {self.name}"


def _reason(target: "TargetReport") -> str:
    broken = (
        f"{check.limit}: {check.figure} {check.unit}, {check.sense} {check.allowed}"
        for check in target.checks
        if not check.is_passed
    )
    return "\n".join([f"{target.model}: {target.message or target.status}", *broken])
