"""Requests as they really come: a file of prompt and completion tokens, and percentiles."""

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
_MOST_BYTES = 256 * 2**20
PERCENTILES = (50, 90, 95, 99)


class Request(NamedTuple):
    """Tokens of one request."""

    prompt: int
    completion: int

    @property
    def total(self) -> int:
        """Tokens it holds when it ends."""
        return self.prompt + self.completion


def read_traffic(path: Path) -> tuple[Request, ...]:
    """Return the requests of a CSV with a header, or of JSON lines by the name's ending.

    Raises:
        InputError: naming file and line, when there is none, or one cannot be read.
    """
    if path.suffix.lower() not in (".csv", ".jsonl"):
        raise InputError(f"{printable(path)}: traffic is a .csv or a .jsonl file")
    size = regular_file_bytes(path)
    if size > _MOST_BYTES:
        raise InputError(f"{printable(path)}: {size} bytes of traffic; {_MOST_BYTES} are the most")
    with open_regular(path) as file:
        raw = read_exactly(file, size, path)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{printable(path)}: is not UTF-8 text") from None
    rows = _csv_rows(text, path) if path.suffix.lower() == ".csv" else _json_rows(text, path)
    requests = tuple(_request(row, path, line) for line, row in rows)
    if not requests:
        raise InputError(f"{printable(path)}: holds no request")
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
            raise InputError(f"{printable(path)}:{number}: is not JSON") from None
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
            f"{printable(path)}:{line}: {key}: {printable(value)!r} is no count of tokens"
        )
    return value
