"""The samples shipped with memfit: YAML files of a config, its origin and what is known of it."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from memfit.estimators.base.errors import ConfigError
from memfit.estimators.base.files import printable, read_whole
from memfit.estimators.base.reading.section import Reading, to_record
from memfit.estimators.base.reading.strict_json import plain
from memfit.estimators.base.reading.strict_yaml import parse_document

PREFIX = "sample:"
"""Before the name of a sample that a path has too."""
_FOLDER, _SUFFIX = "memfit.sample_configs", ".yaml"


def sample_names() -> tuple[str, ...]:
    names = (file.name for file in files(_FOLDER).iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


@contextmanager
def sample_file(name: str) -> Iterator[Path]:
    """Yield the path of a sample, which may exist only until the block ends."""
    with as_file(files(_FOLDER) / f"{name}{_SUFFIX}") as path:
        yield path


_PARAMETERS = re.compile(r"^  parameters: (\d+)$", re.MULTILINE)
_REPOSITORY = re.compile(r"^hub: (\S+)$", re.MULTILINE)


def stated_parameters(path: Path) -> int | None:
    """Return the parameters that a sample's file states, without reading it as YAML."""
    found = _PARAMETERS.search(_text(path))
    return int(found[1]) if found else None


def sample_repositories() -> Iterator[str]:
    """Yield the repositories on the Hub that samples describe."""
    for name in sample_names():
        with sample_file(name) as path:
            if found := _REPOSITORY.search(_text(path)):
                yield found[1]


def _text(path: Path) -> str:
    return read_whole(path, limit=MAX_SAMPLE_BYTES).decode("utf-8")


MAX_SAMPLE_BYTES = 1_000_000
SCHEMA = "memfit.sample/1"


class Sample(Struct, frozen=True, tag_field="schema", tag=SCHEMA, forbid_unknown_fields=True):
    """A config with its origin, and the figures that are known of it."""

    name: Annotated[str, Meta(min_length=1)]
    source: Annotated[str, Meta(min_length=1)]
    config: Mapping[str, Any]
    expected: Mapping[str, Any] = {}
    hub: Annotated[str, Meta(pattern=r"^[\w.-]+/[\w.-]+$")] | None = None
    """The repository on the Hugging Face Hub, which commands to paste name."""


def read_sample(path: Path) -> Sample:
    """Return the sample of a YAML file in the schema ``memfit.sample/1``.

    Raises:
        CheckpointError: when the file is missing, unreadable or above ``MAX_SAMPLE_BYTES``.
        ConfigError: when it is not YAML, not a sample, or holds what no config can.
    """
    document = parse_document(read_whole(path, limit=MAX_SAMPLE_BYTES), path)
    value = plain(document, printable(path), error=ConfigError)
    return to_record(Sample, value, Reading(printable(path), ConfigError))
