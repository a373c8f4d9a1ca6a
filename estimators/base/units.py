"""Sizes and numbers: their units, ranges and texts."""

import re
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from typing import Annotated, Literal, TypeVar

from msgspec import Meta

from memfit.estimators.base.errors import InputError

_DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]{0,3})"
# Five digits are terabytes: a longer number without a unit is of bytes.
_MEMORY = r"([0-9]{1,5}(?:\.[0-9]{1,9})?)\s*[Gg]?"
_SERVER_SIZE = r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([MmGg])[Bb]?"
_SHARE = r"[0-9](?:\.[0-9]{1,9})?"
_COUNT = r"([0-9]{1,18}(?:\.[0-9]{1,9})?)([kKmM]?)"
_DURATION = r"([0-9]{1,12}(?:\.[0-9]{1,9})?)\s*([A-Za-z]{1,3})"
_MILLISECONDS = {"ms": 1, "s": 1000, "min": 60_000, "h": 3_600_000}
MAX_COUNT = 2**40


class Units(str, Enum):
    """The units that bytes are printed in; the unit always follows the number."""

    GB = "gb"
    GIB = "gib"

    @property
    def symbol(self) -> str:
        """The unit as it is printed."""
        return "GB" if self is Units.GB else "GiB"


# RECORD SEPARATOR is in no sentence.
_OPEN_SIZE = re.compile("\x1e([0-9]+)(-?)\x1e")


def ceil_div(numerator: int, denominator: int) -> int:
    """Return ``numerator / denominator`` rounded up, in integers.

    >>> ceil_div(2049, 256)
    9
    """
    return -(-numerator // denominator)


def round_up(value: int, step: int) -> int:
    """Return the smallest multiple of ``step`` that is at least ``value``.

    >>> round_up(2049, 256)
    2304
    """
    return ceil_div(value, step) * step


def round_down(value: int, step: int) -> int:
    """Return the largest multiple of ``step`` that is at most ``value``."""
    return value // step * step


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``64GB`` (10^9), ``512MiB`` (2^20) or ``4096``.

    Raises:
        InputError: when the text is not a size, or its unit is ambiguous (``64G``, ``64mb``).

    >>> parse_size("64GB"), parse_size("1.5GiB")
    (64000000000, 1610612736)
    """
    match = re.fullmatch(_SIZE, text.strip())
    unit = match[2].upper() if match else None
    factor = None if unit is None else _DECIMAL.get(unit, _BINARY.get(unit))
    if match and match[2][:1].isupper() and match[2].endswith("b"):
        raise InputError(f"{text!r} is in bits; write bytes with a capital B")
    if match and factor and match[2].startswith("m"):
        # The SI's m is a thousandth, and mb is written for megabits.
        raise InputError(f"{text!r} is ambiguous; write megabytes as {match[1]}M{match[2][1:-1]}B")
    if match is None or factor is None:
        number = match[1] if match else "64"
        raise InputError(
            f"{text!r} is not a size; write it as {number}GB (10^9), {number}GiB (2^30) or bytes"
        )
    return int(Decimal(match[1]) * factor)


def parse_server_size(text: str) -> int:
    """Return the bytes of a size as mlx-lm's programs read it too: ``26G`` is 26 x 10^9.

    Their units are M, G, MB and GB in any case, powers of ten (mlx_lm/utils.py, _parse_size).

    Raises:
        InputError: as `parse_size`.

    >>> parse_server_size("26G"), parse_server_size("512mb"), parse_server_size("1GiB")
    (26000000000, 512000000, 1073741824)
    """
    match = re.fullmatch(_SERVER_SIZE, text.strip())
    return parse_size(f"{match[1]}{match[2].upper()}B" if match else text)


def parse_memory(text: str) -> int:
    """Return the bytes of a machine's memory: ``32`` and ``32G`` are ``32GB``.

    Raises:
        InputError: as `parse_size`.

    >>> parse_memory("32"), parse_memory("32G"), parse_memory("32GiB")
    (32000000000, 32000000000, 34359738368)
    """
    match = re.fullmatch(_MEMORY, text.strip())
    return parse_size(f"{match[1]}GB" if match else text)


def parse_rate(text: str) -> int:
    """Return the bytes per second of a text such as ``3.5GB/s`` or ``7GB``.

    Raises:
        InputError: when it is not a rate, is zero, or its unit could mean bits (``Gb/s``).

    >>> parse_rate("3.5GB/s")
    3500000000
    """
    size = text.strip().removesuffix("/s").rstrip()
    if not size.endswith("B") or not (rate := parse_size(size)):
        raise InputError(f"{text!r} is not a speed; write it as 3.5GB/s, bytes with a capital B")
    return rate


def parse_count(text: str) -> int:
    """Return a count of tokens such as ``4096``, ``4k`` (4 x 1024) or ``1m`` (1024 x 1024).

    Raises:
        InputError: when the text is not a count or is beyond 2^40.

    >>> parse_count("32k")
    32768
    """
    match = re.fullmatch(_COUNT, text.strip())
    factor = {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()] if match else 0
    value = Decimal(match[1]) * factor if match else Decimal("NaN")
    if match is None or value != int(value):
        raise InputError(f"{text!r} is not a count; write it as 4096 or 4k")
    if value > MAX_COUNT:
        raise InputError(f"{text!r} is more than {MAX_COUNT} tokens")
    return int(value)


def parse_counts(text: str) -> tuple[int, ...]:
    """Return the counts of a list with commas, each once.

    Raises:
        InputError: as `parse_count`.

    >>> parse_counts("4k,16, 16")
    (4096, 16)
    """
    return tuple(dict.fromkeys(parse_count(part.strip()) for part in text.split(",")))


def parse_share(text: str) -> Fraction:
    """Return the percent of a share such as ``0.92``.

    Raises:
        InputError: when it is not above 0 and at most 1.

    >>> parse_share("0.925")
    Fraction(185, 2)
    """
    if not re.fullmatch(_SHARE, text.strip()) or not 0 < (share := Fraction(text.strip())) <= 1:
        raise InputError(f"{text[:40]!r} is not a share above 0 and up to 1, such as 0.92")
    return 100 * share


def parse_duration(text: str) -> int:
    """Return the milliseconds of a duration such as ``1.5s``, ``250ms``, ``2min`` or ``1h``.

    Raises:
        InputError: when the text is not a duration, has no unit, an ambiguous one (``2m``),
            or parts of a millisecond.

    >>> parse_duration("1.5s"), parse_duration("2min")
    (1500, 120000)
    """
    match = re.fullmatch(_DURATION, text.strip())
    factor = _MILLISECONDS.get(match[2]) if match else None
    if match is None or factor is None:
        raise InputError(f"{text!r} is not a duration; write it as 1.5s, 250ms, 2min or 1h")
    value = Decimal(match[1]) * factor
    if value != int(value):
        raise InputError(f"{text!r} is finer than a millisecond; round it")
    return int(value)


Rounding = Literal["up", "down", "nearest"]


def format_bytes(
    value: int, units: Units = Units.GB, *, rounding: Rounding = "up", digits: int = 1
) -> str:
    """Return bytes as text with their unit, rounded up: no need looks smaller.

    ``digits`` are the decimals of a GB; anything smaller has one. Figures that are compared are
    rounded to the nearest, so that equal ones have equal texts.

    >>> format_bytes(2262535712), format_bytes(2262535712, rounding="nearest", digits=3)
    ('2.3 GB', '2.263 GB')
    """
    base, names = (
        (1000, ("B", "kB", "MB", "GB", "TB"))
        if units is Units.GB
        else (1024, ("B", "KiB", "MiB", "GiB", "TiB"))
    )
    size = abs(value)
    power = sum(size >= base**exponent for exponent in range(1, len(names)))
    if power == 0:
        return f"{value} B"
    scale = 10 ** (digits if power > 2 else 1)
    added = {"up": base**power - 1, "down": 0, "nearest": base**power // 2}[rounding]
    count = (size * scale + added) // base**power
    if count == base * scale and power < len(names) - 1:
        count, power = scale, power + 1
    whole, rest = divmod(count, scale)
    sign = "-" if value < 0 else ""
    return f"{sign}{whole}.{rest:0{len(str(scale)) - 1}} {names[power]}"


def format_limit(value: int, units: Units = Units.GB) -> str:
    """Return the bytes of a limit, or of what is free, rounded down.

    >>> format_limit(2299999999)
    '2.2 GB'
    """
    return format_bytes(value, units, rounding="down")


def open_size(nbytes: int) -> str:
    """Return bytes for a sentence of a result; `with_sizes` writes them in the reader's units."""
    return f"\x1e{nbytes}\x1e"


def open_limit(nbytes: int) -> str:
    """Return the bytes of a limit, as `open_size`: they are rounded down."""
    return f"\x1e{nbytes}-\x1e"


def with_sizes(sentence: str, units: Units) -> str:
    """Return a sentence that was written with `open_size`, with its sizes in units.

    >>> with_sizes(f"it takes {open_size(2262535712)}", Units.GIB)
    'it takes 2.2 GiB'
    """
    return _OPEN_SIZE.sub(
        lambda size: (format_limit if size[2] else format_bytes)(int(size[1]), units), sentence
    )


def format_duration(milliseconds: int) -> str:
    """Return milliseconds as text in seconds, without zeros at the end.

    >>> format_duration(1500), format_duration(2000)
    ('1.5 s', '2 s')
    """
    seconds, rest = divmod(milliseconds, 1000)
    fraction = f".{rest:03}".rstrip("0") if rest else ""
    return f"{seconds}{fraction} s"


Item = TypeVar("Item")

Bytes = Annotated[int, Meta(ge=0)]
Tokens = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0)]
"""A number of anything else, or a time in the unit of the field's name."""
Positive = Annotated[int, Meta(ge=1)]
Number = Annotated[float, Meta(ge=0)]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
Line = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]+$", max_length=8192)]
"""A text of one line."""
NonEmpty = Annotated[tuple[Item, ...], Meta(min_length=1)]


def one_of(*values: str | int) -> Meta:
    """Return what the JSON Schema says of a value that is one of these; reading accepts others."""
    return Meta(extra_json_schema={"enum": list(values)})
