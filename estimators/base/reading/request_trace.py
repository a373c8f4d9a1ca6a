"""A request trace: CSV with a header, or JSON Lines, one request per row."""

import codecs
import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import printable, read_whole
from memfit.estimators.base.reading.strict_json import parse_object
from memfit.estimators.base.units import MAX_COUNT, parse_count

MAX_TRACE_BYTES = 256 * 2**20
MAX_REQUESTS = 10_000_000
MAX_ROW_VALUES = 10_000
MAX_NAME_CHARACTERS = 4096
MAX_SECONDS = 2**40
JSON_LINES = (".jsonl", ".ndjson")
TOKEN_COLUMNS = ("prompt_tokens", "completion_tokens")
TIME_COLUMNS = ("arrival_seconds", "duration_seconds")
Row = dict[str, Any]


class TraceRequest(NamedTuple):
    """One request: its whole prompt, with all earlier turns, and its completion."""

    prompt_tokens: int
    completion_tokens: int
    agent: str = ""
    """Empty in a trace without agents."""
    max_tokens: int = 0
    """The longest reply that was asked for; 0: not recorded."""
    session: str = ""
    """Requests of a session begin with what was said before in it; empty: not recorded."""

    @property
    def total_tokens(self) -> int:
        """Tokens in the cache when it ends."""
        return self.prompt_tokens + self.completion_tokens


def read_request_trace(path: Path, *, agents: bool = False) -> tuple[TraceRequest, ...]:
    """Return the requests of a file in their order; other columns and keys are ignored.

    ``agents`` requires the column ``agent``. The ending of the name tells CSV from JSON Lines.

    Raises:
        InputError: when the file cannot be read, has no request, or a row is not one; the
            message names file and line.
    """
    return tuple(request for request, _ in _read(path, agents=agents))


def read_timed_trace(
    path: Path,
) -> tuple[tuple[TraceRequest, ...], tuple[tuple[float, float], ...]]:
    """Return the requests of a file, and when each arrived and its reply ended, in seconds.

    Requests with times are sorted by arrival; without times the second is empty.

    Raises:
        InputError: as `read_request_trace`, or when only some rows have times.
    """
    found = _read(path, agents=False, timed=True)
    times = [seconds for _, seconds in found if seconds]
    if times and len(times) < len(found):
        named = " and ".join(TIME_COLUMNS)
        raise InputError(f"{printable(path)}: give {named} in every row, or in none")
    if times:
        found.sort(key=lambda each: each[1] or (0.0, 0.0))
    return tuple(request for request, _ in found), tuple(sorted(times))


def _read(
    path: Path, *, agents: bool, timed: bool = False
) -> list[tuple[TraceRequest, tuple[float, float] | None]]:
    ending = path.suffix.lower()
    if ending not in (".csv", *JSON_LINES):
        raise InputError(f"{printable(path)}: a request trace is a .csv or a .jsonl file")
    content = read_whole(path, limit=MAX_TRACE_BYTES).removeprefix(codecs.BOM_UTF8)
    columns = ("agent", *TOKEN_COLUMNS) if agents else TOKEN_COLUMNS
    rows = _json_rows(content, path) if ending in JSON_LINES else _csv_rows(content, path, columns)
    requests: list[tuple[TraceRequest, tuple[float, float] | None]] = []
    for line, row in rows:
        if len(requests) == MAX_REQUESTS:
            raise InputError(f"{printable(path)}: more than {MAX_REQUESTS} requests")
        where = f"{printable(path)}:{line}"
        times = _times(row, where) if timed else None
        requests.append((_request(row, where, agents=agents), times))
    if not requests:
        raise InputError(f"{printable(path)}: no requests")
    return requests


def _csv_rows(content: bytes, path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, Row]]:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{printable(path)}: not UTF-8 text") from None
    reader = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)
    try:
        names = [(name or "").strip() for name in reader.fieldnames or ()]
        if any(names.count(column) != 1 for column in columns):
            named = " and ".join((", ".join(columns[:-1]), columns[-1]))
            raise InputError(f"{printable(path)}:1: the header must name {named} once each")
        reader.fieldnames = names
        for row in reader:
            yield reader.line_num, dict(row)
    except csv.Error as error:
        raise InputError(f"{printable(path)}:{reader.reader.line_num}: {error}") from None


def _json_rows(content: bytes, path: Path) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            place = path.with_name(f"{path.name}:{number}")
            yield (
                number,
                parse_object(
                    line, place, what="the row", error=InputError, max_values=MAX_ROW_VALUES
                ),
            )


def _request(row: Row, where: str, *, agents: bool) -> TraceRequest:
    prompt, completion = (_tokens(row.get(key), f"{where}: {key}") for key in TOKEN_COLUMNS)
    if prompt == 0:
        raise InputError(f"{where}: prompt_tokens: a prompt has at least one token")
    agent = _name(row.get("agent"), f"{where}: agent") if agents else ""
    most, session = (row.get(key) for key in ("max_tokens", "session"))
    longest = 0 if most in (None, "") else _tokens(most, f"{where}: max_tokens")
    if 0 < longest < completion:
        raise InputError(f"{where}: max_tokens: {longest} are fewer than completion_tokens")
    named = "" if session in (None, "") else _name(session, f"{where}: session")
    return TraceRequest(prompt, completion, agent, longest, named)


def _times(row: Row, where: str) -> tuple[float, float] | None:
    given = [row.get(key) for key in TIME_COLUMNS]
    if all(value in (None, "") for value in given):
        return None
    start, duration = (
        _seconds(value, f"{where}: {key}") for key, value in zip(TIME_COLUMNS, given, strict=True)
    )
    return start, start + duration


def _seconds(value: Any, where: str) -> float:
    number = None
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = None
    if number is None or not 0 <= number <= MAX_SECONDS:
        raise InputError(f"{where}: {printable(value)!r} is not a number of seconds")
    return number


def _name(value: Any, where: str) -> str:
    name = value.strip() if isinstance(value, str) else ""
    if not name or len(name) > MAX_NAME_CHARACTERS:
        text = f"expected a name of up to {MAX_NAME_CHARACTERS} characters"
        raise InputError(f"{where}: {text}")
    return name


def _tokens(value: Any, where: str) -> int:
    count = value
    if isinstance(value, str):
        try:
            count = parse_count(value)
        except InputError:
            count = None
    if type(count) is not int or not 0 <= count <= MAX_COUNT:
        raise InputError(f"{where}: {printable(value)!r} is not a number of tokens")
    return count
