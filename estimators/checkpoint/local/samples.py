"""The samples that are shipped with memfit, by name."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path

_FOLDER, _SUFFIX = "memfit.sample_configs", ".yaml"


def sample_names() -> tuple[str, ...]:
    names = (file.name for file in files(_FOLDER).iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


@contextmanager
def sample_file(name: str) -> Iterator[Path]:
    """Yield the path of a sample, which may exist only until the block ends."""
    with as_file(files(_FOLDER) / f"{name}{_SUFFIX}") as path:
        yield path
