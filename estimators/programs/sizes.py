"""Integers that know how they came about.

A `Size` is a number and a polynomial in named sizes. The rules of the trace calculate with it as
with any number; each comparison that its names can decide otherwise is noted as a guard, so that
what the rules found holds wherever the guards do.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from functools import cached_property, partial
from types import CodeType
from typing import Any, NamedTuple

# Coefficients by monomial: a sorted tuple of atoms, which are names or texts of other operations.
Polynomial = Mapping[tuple[str, ...], int]


class Guard(NamedTuple):
    """A comparison of a polynomial with 0 that the rules made."""

    text: str
    relation: str
    holds: bool

    @property
    def condition(self) -> str:
        """It in Python."""
        return (
            f"({self.text}){self.relation}0" if self.holds else f"not ({self.text}){self.relation}0"
        )


class Guards:
    """The comparisons that were made, without those that follow from names above 0."""

    def __init__(self, values: Mapping[str, int]) -> None:
        """Take the values of all names; none is negative."""
        self._positive = {name for name, value in values.items() if value > 0}
        # Those whose being positive was used.
        self._used: set[str] = set()
        self._found: dict[tuple[str, str], bool] = {}
        self._signed: set[str] = set()
        self.sizes = {name: Size(value, {(name,): 1}, self) for name, value in values.items()}
        """The values of the names, from which all others are calculated."""

    def __iter__(self) -> Iterator[Guard]:
        return (Guard(*key, holds) for key, holds in self._found.items())

    def compare(self, left: int, right: int, relation: str, *, holds: bool) -> None:
        """Note that a comparison came out so, unless it always does."""
        difference = _sum(polynomial(left), polynomial(right), -1)
        if any(difference) and not self._follows(difference, relation, holds=holds):
            if relation == "==" and min(difference.items(), key=_place)[1] < 0:
                difference = {monomial: -count for monomial, count in difference.items()}
            self._found.setdefault((text_of(difference), relation), holds)

    def may_be_negative(self, terms: Polynomial) -> bool:
        """Whether a polynomial has something to subtract, or quotients of such."""
        atoms = (atom for monomial in terms for atom in monomial)
        return any(count < 0 for count in terms.values()) or not self._signed.isdisjoint(atoms)

    def note_signed(self, atom: str) -> None:
        """Note a quotient that may be negative, as in rounding up: -(-x // y)."""
        self._signed.add(atom)

    def _follows(self, difference: Polynomial, relation: str, *, holds: bool) -> bool:
        """Whether it holds for all positive values of the names that are positive."""
        if any(not self._signed.isdisjoint(monomial) for monomial in difference):
            return False
        if relation == "<" and holds:
            return self._is_positive({m: -count for m, count in difference.items()})
        if relation == "<":
            return all(count > 0 for count in difference.values())
        negative = {monomial: -count for monomial, count in difference.items()}
        return not holds and (self._is_positive(difference) or self._is_positive(negative))

    def _is_positive(self, difference: Polynomial) -> bool:
        if any(count < 0 for count in difference.values()):
            return False
        for monomial in sorted(difference, key=len):
            if self._positive.issuperset(monomial):
                self._used.update(monomial)
                return True
        return False

    def condition(self) -> str:
        """Return all of them in Python, with those that others follow from."""
        positive = (f"{name}>0" for name in sorted(self._used))
        return " and ".join([*positive, *(guard.condition for guard in self)]) or "True"


class Size(int):
    """A number with its polynomial."""

    terms: Polynomial
    guards: Guards
    # Shapes share few sizes, of which the rules ask the same again and again.
    _compared: dict[tuple[str, int], int]
    _multiplied: dict[int, tuple[int, "Size"]]

    def __new__(cls, value: int, terms: Polynomial, guards: Guards) -> "Size":
        self = int.__new__(cls, value)
        self.terms, self.guards = terms, guards
        self._compared, self._multiplied = {}, {}
        return self

    @cached_property
    def text(self) -> str:
        """The polynomial in Python."""
        return text_of(self.terms)

    def _compare(self, relation: str, other: int, *, holds: bool) -> bool:
        key = relation, other if type(other) is int else id(other)
        if key not in self._compared:
            # With the other one, whose identity stays its own as long.
            self._compared[key] = other
            left, right = (other, self) if relation == ">" else (self, other)
            self.guards.compare(left, right, "<" if relation == ">" else relation, holds=holds)
        return holds

    def __add__(self, other: int) -> "Size":
        if type(other) is int and not other:
            return self
        return self._with(int(self) + int(other), _sum(self.terms, polynomial(other)))

    __radd__ = __add__

    def __sub__(self, other: int) -> "Size":
        return self._with(int(self) - int(other), _sum(self.terms, polynomial(other), -1))

    def __rsub__(self, other: int) -> "Size":
        return self._with(int(other) - int(self), _sum(polynomial(other), self.terms, -1))

    def __mul__(self, other: int) -> int:
        if type(other) is int and other in (0, 1):
            return self if other else 0
        # No number of that kind is as far below 0 as an address.
        key = other if type(other) is int else -id(other)
        if key not in self._multiplied:
            made = self._with(int(self) * int(other), _product(self.terms, polynomial(other)))
            # With the other one, whose identity stays its own as long.
            self._multiplied[key] = other, made
        return self._multiplied[key][1]

    __rmul__ = __mul__

    def __neg__(self) -> "Size":
        return self._with(-int(self), {monomial: -count for monomial, count in self.terms.items()})

    def __abs__(self) -> "Size":
        return self if self >= 0 else -self

    def __floordiv__(self, other: int) -> int:
        return self._divided(self, other)

    def __rfloordiv__(self, other: int) -> int:
        return self._divided(other, self)

    def __mod__(self, other: int) -> int:
        return self._rest(self, other)

    def __rmod__(self, other: int) -> int:
        return self._rest(other, self)

    def __rshift__(self, bits: int) -> int:
        return self._divided(self, 1 << bits)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, int):
            return NotImplemented
        return self._compare("==", other, holds=int(self) == int(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: int) -> bool:
        return self._compare("<", other, holds=int(self) < int(other))

    def __ge__(self, other: int) -> bool:
        return not self < other

    def __gt__(self, other: int) -> bool:
        return self._compare(">", other, holds=int(other) < int(self))

    def __le__(self, other: int) -> bool:
        return not self > other

    def __bool__(self) -> bool:
        return self != 0

    def __hash__(self) -> int:
        return hash(int(self))

    def bit_length(self) -> int:
        return self.called("bit_length", int(self).bit_length(), self)

    def called(self, name: str, value: int, *arguments: int) -> "Size":
        """Return the value of a function of sizes, which stays a function of them."""
        return self._with(value, {(f"{name}({','.join(map(expression, arguments))})",): 1})

    def _with(self, value: int, terms: Polynomial) -> "Size":
        return Size(value, terms, self.guards)

    def _divided(self, above: int, below: int) -> int:
        value, over, under = int(above) // int(below), polynomial(above), polynomial(below)
        quotient = _quotient(over, under)
        if quotient is None:
            atom = f"(({text_of(over)})//({text_of(under)}))"
            if self.guards.may_be_negative(over) or self.guards.may_be_negative(under):
                self.guards.note_signed(atom)
            quotient = {(atom,): 1}
        return self._with(value, quotient) if any(quotient) else value

    def _rest(self, above: int, below: int) -> int:
        over, under = polynomial(above), polynomial(below)
        if _quotient(over, under) is not None:
            return 0
        rest: Polynomial = {(f"(({text_of(over)})%({text_of(under)}))",): 1}
        if self.guards.may_be_negative(under):
            self.guards.note_signed(next(iter(rest))[0])
        return self._with(int(above) % int(below), rest)


def polynomial(number: int) -> Polynomial:
    """Return the polynomial of a number."""
    if isinstance(number, Size):
        return number.terms
    return {(): number} if number else {}


def expression(number: int) -> str:
    """Return a number as text: of a `Size` its polynomial, in Python."""
    return number.text if isinstance(number, Size) else str(number)


def text_of(terms: Polynomial) -> str:
    """Return a polynomial in Python.

    >>> text_of({("L", "width"): 2, (): 16})
    '2*L*width+16'
    """
    ordered = sorted(terms.items(), key=_place)
    parts = ("*".join([*([str(n)] if n != 1 or not m else []), *m]) for m, n in ordered)
    return "+".join(parts).replace("+-", "-") or "0"


def _place(term: tuple[tuple[str, ...], int]) -> tuple[int, tuple[str, ...]]:
    """Return what terms are ordered by: the largest products first."""
    monomial, _ = term
    return -len(monomial), monomial


def evaluator(
    texts: Iterable[str], functions: Mapping[str, Callable[..., int]]
) -> Callable[[Mapping[str, int]], tuple[Any, ...]]:
    """Return a function of the sizes by name that calculates all texts, each of them made here."""
    code = compile(f"({''.join(f'{text},' for text in texts)})", "<sizes>", "eval")
    return partial(_evaluated, code, dict(functions))


def _evaluated(
    code: CodeType, functions: dict[str, Any], sizes: Mapping[str, int]
) -> tuple[Any, ...]:
    values: tuple[Any, ...] = eval(code, functions, sizes)
    return values


def _sum(left: Polynomial, right: Polynomial, sign: int = 1) -> Polynomial:
    result = dict(left)
    for monomial, count in right.items():
        total = result.get(monomial, 0) + sign * count
        if total:
            result[monomial] = total
        else:
            result.pop(monomial, None)
    return result


def _product(left: Polynomial, right: Polynomial) -> Polynomial:
    result: dict[tuple[str, ...], int] = {}
    for first, count in left.items():
        for second, times in right.items():
            monomial = tuple(sorted(first + second))
            result[monomial] = result.get(monomial, 0) + count * times
    return {monomial: count for monomial, count in result.items() if count}


def _quotient(above: Polynomial, below: Polynomial) -> Polynomial | None:
    """Return the quotient where the divisor is one term that divides every other, None else."""
    if len(below) != 1:
        return {(): 1} if above == below else None
    ((divisor, count),) = below.items()
    result: dict[tuple[str, ...], int] = {}
    for monomial, times in above.items():
        left = list(monomial)
        for atom in divisor:
            if atom not in left:
                return None
            left.remove(atom)
        part = Fraction(times, count)
        if part.denominator != 1:
            return None
        result[tuple(left)] = int(part)
    return result
