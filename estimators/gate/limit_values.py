"""The values of limits as a policy has them: shares, sizes, tokens, experts and durations."""

import re
from collections.abc import Callable
from fractions import Fraction
from math import ceil, floor
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import short
from memfit.estimators.base.units import (
    MAX_COUNT,
    Positive,
    Tokens,
    parse_count,
    parse_size,
)
from memfit.estimators.machine.device import Device

Unit = Literal["bytes", "tokens", "experts", "buffers", "milliseconds", "basis"]


NUMBER = r"^[0-9]+(\.[0-9]+)?"


_DURATION = re.compile(r"([0-9]{1,7}(?:\.[0-9]{1,3})?)\s*(ms|s|min)")


_MILLISECONDS = {"ms": 1, "s": 1000, "min": 60_000}


_SHARE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,9})?)\s*%")


MOST_GROWTH = 10  # times the baseline: a model that grows more is another class of model


Amount = Annotated[
    Literal[0] | Annotated[str, Meta(pattern=rf"{NUMBER} *(%|[A-Za-z]{{1,3}})$")],
    Meta(description="A share or a size, such as 90% or 16GB."),
]


TokenCount = Annotated[
    Tokens | Annotated[str, Meta(pattern=rf"{NUMBER}[kKmM]?$")],
    Meta(description="A count of tokens, such as 4096 or 4k."),
]


Experts = Positive | Annotated[str, Meta(pattern=rf"{NUMBER} *%$")]


class LimitValue(Struct, frozen=True):
    """An amount as the policy has it, exact."""

    text: str
    value: Fraction
    """Bytes, tokens or experts, or a share of them."""
    is_share: bool = False

    def most(self, whole: int) -> int:
        """Return the largest integer within the amount: exactly at a limit is within it.

        >>> parse_limit_value("12.5%").most(1001)
        125
        """
        return floor(self.value * whole if self.is_share else self.value)

    def least(self, whole: int) -> int:
        """Return the smallest integer that reaches the amount.

        >>> parse_limit_value("12.5%").least(1001)
        126
        """
        return ceil(self.value * whole if self.is_share else self.value)


def parse_limit_value(value: Any) -> LimitValue:
    """Return the amount of ``90%``, ``12.5%``, ``16GB``, ``500MiB``, ``123B`` or ``0``.

    Raises:
        InputError: for anything else; a number without a unit is ambiguous.

    >>> parse_limit_value("12.5%")
    LimitValue(text='12.5%', value=Fraction(1, 8), is_share=True)
    """
    if type(value) is int and value == 0:
        return LimitValue("0", Fraction(0))
    if isinstance(value, str):
        if share := _SHARE.fullmatch(value.strip()):
            return LimitValue(value.strip(), Fraction(share[1]) / 100, is_share=True)
        if value.strip()[-1:].isalpha():
            return LimitValue(value.strip(), Fraction(parse_size(value)))
    raise InputError(f"expected a share or a size such as 90% or 16GB, got {value!r:.60}")


def parse_experts(value: Any) -> LimitValue:
    """Return a number of experts such as ``64``, or a share of a layer's such as ``50%``.

    Raises:
        InputError: when it is neither.
    """
    if type(value) is int and 1 <= value <= 2**20:
        return LimitValue(str(value), Fraction(value))
    if isinstance(value, str) and _SHARE.fullmatch(value.strip()):
        return parse_limit_value(value)
    raise InputError(f"expected experts a layer such as 64 or 50%, got {value!r:.60}")


def parse_buffers(value: Any) -> LimitValue:
    """Return a number of buffers such as ``250000``.

    Raises:
        InputError: for anything else.
    """
    if type(value) is int and 1 <= value <= MAX_COUNT:
        return LimitValue(str(value), Fraction(value))
    raise InputError(f"expected a number of buffers such as 250000, got {short(value)}")


def parse_duration(value: Any) -> LimitValue:
    """Return milliseconds of ``20s``, ``1.5s``, ``800ms`` or ``2min``.

    Raises:
        InputError: for anything else; a number without a unit is ambiguous.

    >>> parse_duration("1.5s").most(0)
    1500
    """
    duration = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if duration is None or not Fraction(duration[1]):
        raise InputError(f"expected a time such as 20s, 800ms or 2min, got {short(value)}")
    return LimitValue(value.strip(), Fraction(duration[1]) * _MILLISECONDS[duration[2]])


def parse_tokens(value: Any) -> int:
    """Return a count of tokens such as ``4096`` or ``4k``.

    Raises:
        InputError: when it is neither.
    """
    if isinstance(value, str):
        return parse_count(value)
    if type(value) is not int:
        raise InputError(f"expected a count such as 4096 or 4k, got {short(value)}")
    return value


def parse_context(_: Device | None, value: Any) -> LimitValue:
    count = parse_tokens(value)
    if not 0 < count <= MAX_COUNT:
        raise InputError(f"{short(count)}: must be from 1 to {MAX_COUNT} tokens")
    return LimitValue(str(value), Fraction(count))


def parse_up_to(times: int, of: str) -> Callable[[Device | None, Any], LimitValue]:
    """What reads an amount that can break: at most so many times the whole, or the machine."""

    def parse(device: Device | None, value: Any) -> LimitValue:
        amount = parse_limit_value(value)
        if amount.is_share and amount.value > times:
            most = f"{100 * times}% of the {of}"
            raise InputError(f"{amount.text}: limits nothing; write at most {most}")
        if device and not amount.is_share and amount.value > device.memory_bytes:
            memory = f"the memory of the machine is {device.memory_bytes}B"
            raise InputError(f"{amount.text}: limits nothing; {memory}")
        return amount

    return parse
