"""A sample: a YAML file that carries a model's config, its origin and what is known of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from memfit.estimators.base.errors import ConfigError
from memfit.estimators.base.files import printable, read_whole
from memfit.estimators.base.reading.section import Reading, Section
from memfit.estimators.base.reading.strict_json import plain
from memfit.estimators.base.reading.strict_yaml import parse_document
from memfit.estimators.base.reading.values import as_text

MAX_SAMPLE_BYTES = 1_000_000
SCHEMA = "memfit.sample/1"
_KEYS = ("schema", "name", "source", "config", "expected")


class Sample(Struct, frozen=True):
    """A config with its origin, and the figures that are known of it."""

    name: str
    source: str
    config: Mapping[str, Any]
    expected: Mapping[str, Any]


def read_sample(path: Path) -> Sample:
    """Return the sample of a YAML file in the schema ``memfit.sample/1``.

    Raises:
        CheckpointError: when the file is missing, unreadable or above ``MAX_SAMPLE_BYTES``.
        ConfigError: when it is not YAML, not a sample, or holds what no config can.
    """
    document = parse_document(read_whole(path, limit=MAX_SAMPLE_BYTES), path)
    value = plain(document, printable(path), error=ConfigError)
    if not isinstance(value, dict):
        raise ConfigError(
            f"{printable(path)}: expected a mapping of schema, name, source and config"
        )
    top = Section(value, Reading(printable(path), ConfigError))
    if value.get("schema") != SCHEMA:
        raise top.fail("schema", f"expected {SCHEMA}")
    top.only(_KEYS)
    return Sample(
        name=_text(top, "name"),
        source=_text(top, "source"),
        config=top.reading.section(value.get("config"), ("config",)).values,
        expected=top.mapping("expected").values,
    )


def _text(top: Section, key: str) -> str:
    if text := top.take(key, as_text):
        return text
    raise top.fail(key, "expected a text")
