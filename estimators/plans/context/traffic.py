"""Recorded requests: a file of prompt and completion tokens, and percentiles of them."""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import open_regular, printable, read_exactly, regular_file_bytes
from memfit.estimators.base.units import MAX_COUNT, ceil_div
from memfit.estimators.results.context import Distribution

_KEYS = ("prompt_tokens", "completion_tokens")
_DIGITS = re.compile(r"[0-9]{1,18}")
_MAX_BYTES = 256 * 2**20
PERCENTILES = (50, 90, 95, 99)


class Request(NamedTuple):
    """Tokens of one request."""

    prompt: int
    completion: int

    @property
    def total(self) -> int:
        """Tokens in its cache when it ends."""
        return self.prompt + self.completion


def read_traffic(path: Path) -> tuple[Request, ...]:
    """Return the requests of a ``.csv`` file with a header, or of a ``.jsonl`` file.

    Raises:
        InputError: naming file and line, when a request cannot be read or there is none.
    """
    if path.suffix.lower() not in (".csv", ".jsonl"):
        raise InputError(f"{printable(path)}: give traffic as a .csv or a .jsonl file")
    size = regular_file_bytes(path)
    if size > _MAX_BYTES:
        raise InputError(f"{printable(path)}: {size} bytes of traffic; the limit is {_MAX_BYTES}")
    with open_regular(path) as file:
        raw = read_exactly(file, size, path)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{printable(path)}: not UTF-8 text") from None
    rows = _csv_rows(text, path) if path.suffix.lower() == ".csv" else _json_rows(text, path)
    requests = tuple(_request(row, path, line) for line, row in rows)
    if not requests:
        raise InputError(f"{printable(path)}: no requests")
    return requests


def percentile(ordered: list[int], percent: int) -> int:
    """Return the nearest-rank percentile of sorted counts.

    >>> percentile([1, 2, 3, 4], 50), percentile([1, 2, 3, 4], 99)
    (2, 4)
    """
    return ordered[max(0, ceil_div(percent * len(ordered), 100) - 1)]


def distribution(tokens: Iterable[int]) -> Distribution:
    """Return the percentiles of at least one count."""
    ordered = sorted(tokens)
    p50, p90, p95, p99 = (percentile(ordered, percent) for percent in PERCENTILES)
    mean = ceil_div(sum(ordered), len(ordered))
    return Distribution(mean, p50, p90, p95, p99, ordered[-1])


def _csv_rows(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)
    try:
        names = [(name or "").strip() for name in reader.fieldnames or ()]
        if any(names.count(key) != 1 for key in _KEYS):
            raise InputError(
                f"{printable(path)}:1: the header must name {_KEYS[0]} and {_KEYS[1]} once each"
            )
        reader.fieldnames = names
        for row in reader:
            yield reader.line_num, dict(row)
    except csv.Error as error:
        raise InputError(f"{printable(path)}:{reader.reader.line_num}: {error}") from None


def _json_rows(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise InputError(f"{printable(path)}:{number}: not JSON") from None
        if not isinstance(row, dict):
            raise InputError(f"{printable(path)}:{number}: expected an object")
        yield number, row


def _request(row: dict[str, Any], path: Path, line: int) -> Request:
    prompt, completion = (_count(row.get(key), key, path, line) for key in _KEYS)
    if prompt == 0:
        raise InputError(f"{printable(path)}:{line}: {_KEYS[0]}: a prompt has at least one token")
    return Request(prompt, completion)


def _count(value: Any, key: str, path: Path, line: int) -> int:
    if isinstance(value, str) and _DIGITS.fullmatch(value.strip()):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        raise InputError(
            f"{printable(path)}:{line}: {key}: {printable(value)!r} is not a number of tokens"
        )
    return value
