"""How much a limit allows: bytes, or an exact share of something, in integers."""

import re
from typing import Any

from msgspec import Struct

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import ceil_div, parse_size

_SHARE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,9})?)\s*%")


class LimitValue(Struct, frozen=True):
    """An amount as the policy has it."""

    text: str
    numerator: int
    """The bytes, tokens or experts, or the numerator of a share."""
    denominator: int | None = None
    """None where the amount is not a share."""

    def most(self, whole: int) -> int:
        """Return the largest integer within the amount: exactly at a limit is within it.

        >>> parse_limit_value("12.5%").most(1001)
        125
        """
        if self.denominator is None:
            return self.numerator
        return self.numerator * whole // self.denominator

    def least(self, whole: int) -> int:
        """Return the smallest integer that reaches the amount.

        >>> parse_limit_value("12.5%").least(1001)
        126
        """
        if self.denominator is None:
            return self.numerator
        return ceil_div(self.numerator * whole, self.denominator)


def parse_limit_value(value: Any) -> LimitValue:
    """Return the amount of ``90%``, ``12.5%``, ``16GB``, ``500MiB``, ``123B`` or ``0``.

    Raises:
        InputError: for anything else; a number without a unit is ambiguous.

    >>> parse_limit_value("12.5%")
    LimitValue(text='12.5%', numerator=125, denominator=1000)
    """
    if type(value) is int and value == 0:
        return LimitValue("0", 0)
    if isinstance(value, str):
        if share := _SHARE.fullmatch(value.strip()):
            digits, _, decimals = share[1].partition(".")
            return LimitValue(value.strip(), int(digits + decimals), 100 * 10 ** len(decimals))
        if value.strip()[-1:].isalpha():
            return LimitValue(value.strip(), parse_size(value))
    raise InputError(f"expected a share or a size such as 90% or 16GB, got {_shown(value)}")


def parse_experts(value: Any) -> LimitValue:
    """Return a number of experts such as ``64``, or a share of a layer's such as ``50%``.

    Raises:
        InputError: when it is neither.
    """
    if type(value) is int and 1 <= value <= 2**20:
        return LimitValue(str(value), value)
    if isinstance(value, str) and _SHARE.fullmatch(value.strip()):
        return parse_limit_value(value)
    raise InputError(f"expected experts a layer such as 64 or 50%, got {_shown(value)}")


def _shown(value: Any) -> str:
    return repr(value)[:60]
