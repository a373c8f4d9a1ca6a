"""Settings of every test run."""

import gc
import os
import signal
import tempfile
import time

import pytest
from hypothesis import settings

from tests.checkpoints import Checkpoints
from tests.selection import IS_SHARED, examples, of_day

# No user's token, settings or downloads are used; huggingface-hub reads these at import.
for name in [name for name in os.environ if name.startswith("HF_")]:
    del os.environ[name]
os.environ["HF_HOME"] = os.path.join(tempfile.gettempdir(), f"memfit-tests-no-home-{os.getpid()}")
# Nor are measurements of this machine.
os.environ["MEMFIT_HOME"] = os.path.join(os.environ["HF_HOME"], "memfit")

# Workers read it from the first process: all of a run have the same day.
os.environ.setdefault("MEMFIT_TESTS_DAY", str(int(time.time()) // 86400))

# A process started in the background ignores interrupts, and so do its children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: a busy machine is not a bug. CI draws the same examples each time.
settings.register_profile("many", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.register_profile("few", settings.get_profile("many"), max_examples=examples(100, "few"))


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples of a property are drawn, before a test is imported."""
    is_quick = IS_SHARED or config.option.markexpr == "not exhaustive"
    settings.load_profile("few" if is_quick else "many")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out of `make check` what its share of a day leaves out."""
    if IS_SHARED:
        kept = of_day(items, int(os.environ["MEMFIT_TESTS_DAY"]))
        config.hook.pytest_deselected(items=list(set(items) - set(kept)))
        items[:] = kept


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Checkpoints that really run, by names in tests.checkpoints.RECIPES."""
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


def pytest_collection_finish() -> None:
    """Leave modules and tests out of every later collection, which their number makes slow."""
    gc.freeze()
