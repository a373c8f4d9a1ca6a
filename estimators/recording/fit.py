"""Exact expressions for what varies over recordings of one structure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations, combinations_with_replacement
from typing import NamedTuple

from memfit.estimators.programs.dimensions import QUANTISED_FEATURES

# Sizes of a call are not multiplied with one another, but for these.
_FACTORS = frozenset({"L", "C", "B"})
CALL = frozenset({"L", "P", "C0", "C", "W0", "W1", "PW", "M1", "B"})
_FLAGS = frozenset({"chunk", "first_token", "cuda", *QUANTISED_FEATURES})
_PACKING = frozenset({"bits", "group_size"})
_WORD_BITS = 32
_LARGEST_DIVISOR = 64


class _Term(NamedTuple):
    text: str
    values: tuple[int, ...]


class Fitting:
    """Finds expressions over the sizes of some recordings."""

    def __init__(self, recorded: Sequence[Mapping[str, int]]) -> None:
        names = sorted(n for n in recorded[0] if n not in _FLAGS and not n.startswith("fused"))
        columns = {name: tuple(sizes[name] for sizes in recorded) for name in names}
        self._columns = columns
        varied = [name for name in names if len(set(columns[name])) > 1]
        self._fixed = {name: columns[name][0] for name in names if name not in varied}
        self._terms = list(self._made_terms(varied))
        self._known: dict[tuple[int, ...], str | None] = {}

    def _made_terms(self, varied: list[str]) -> Iterator[_Term]:
        """Yield what may be in an expression, the simplest first, each series of values once."""
        seen: set[tuple[int, ...]] = set()
        for text, values in (self._growth(), *self._candidates(varied)):
            if len(set(values)) > 1 and values not in seen:
                seen.add(values)
                yield _Term(text, values)

    def _growth(self) -> tuple[str, tuple[int, ...]]:
        """Return by how much a cache without a limit grows, which few lengths tell from others."""
        room = zip(self._columns.get("C", ()), self._columns.get("C0", ()), strict=True)
        return "(C - C0)", tuple(after - before for after, before in room)

    def _candidates(self, varied: list[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
        columns = self._columns
        plain = [name for name in varied if name not in _PACKING]
        yield from ((name, columns[name]) for name in varied)
        products: list[tuple[str, tuple[int, ...]]] = []
        for a, b in combinations_with_replacement(plain, 2):
            if {a, b} <= CALL and not {a, b} & _FACTORS:
                continue
            products.append((f"{a}*{b}", _times(columns[a], columns[b])))
        yield from products
        if {"B", "L"} <= set(varied):
            # Of all sequences together, such as the rows that experts sort.
            tokens = _times(columns["B"], columns["L"])
            for name in plain:
                if name not in CALL:
                    yield f"B*L*{name}", _times(tokens, columns[name])
        sizes = [name for name in plain if name not in CALL]
        for a in sizes:
            for b in sizes:
                if a != b and all(x % y == 0 for x, y in zip(columns[a], columns[b], strict=True)):
                    quotient = zip(columns[a], columns[b], strict=True)
                    yield f"{a}//{b}", tuple(x // y for x, y in quotient)
        if "bits" in columns:
            # A width that is the same in all recordings counts too: words are no multiple of it.
            widths = [name for name in columns if name not in CALL | _PACKING]
            pairs = combinations(widths, 2)
            products = [(f"{a}*{b}", _times(columns[a], columns[b])) for a, b in pairs]
            yield from self._packed([*((name, columns[name]) for name in widths), *products])

    def _packed(
        self, widths: Iterable[tuple[str, tuple[int, ...]]]
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the words of packed rows, and their groups of scales."""
        bits, groups = self._columns["bits"], self._columns["group_size"]
        for text, values in widths:
            words = zip(values, bits, strict=True)
            yield f"{text}*bits//{_WORD_BITS}", tuple(w * b // _WORD_BITS for w, b in words)
            rows = zip(values, groups, strict=True)
            yield f"{text}//group_size", tuple(w // g for w, g in rows)

    def text(self, values: tuple[int, ...]) -> str | None:
        """Return the simplest expression that has these values, None if none is known."""
        if values not in self._known:
            self._known[values] = self._found(values)
        return self._known[values]

    def _found(self, values: tuple[int, ...]) -> str | None:
        if len(set(values)) == 1:
            return str(values[0])
        for term in self._terms:
            if text := _multiple(term, values):
                return text
        for term in self._terms:
            if text := _affine(term, values):
                return text
        for first, second in combinations(self._terms, 2):
            if text := _sum(first, second, values):
                return text
        return None

    def guards(self) -> Iterator[str]:
        """Yield what held in all recordings and need not hold in other calls."""
        for name, value in self._fixed.items():
            yield f"{name} == {value}"
        columns = {n: c for n, c in self._columns.items() if n not in self._fixed}
        for a, b in combinations(columns, 2):
            ratios = {Fraction(x, y) for x, y in zip(columns[a], columns[b], strict=True) if y}
            both_zero = all(bool(x) == bool(y) for x, y in zip(columns[a], columns[b], strict=True))
            if len(ratios) == 1 and both_zero:
                ratio = ratios.pop()
                yield f"{_scaled(ratio.denominator, a)} == {_scaled(ratio.numerator, b)}"
        call = [name for name in columns if name in CALL]
        for c in call:
            for a, b in combinations([name for name in call if name != c], 2):
                sums = zip(columns[a], columns[b], columns[c], strict=True)
                if all(x + y == z for x, y, z in sums):
                    yield f"{a} + {b} == {c}"
        for a in call:
            for b in call:
                steps = {x - y for x, y in zip(columns[a], columns[b], strict=True)}
                if a != b and len(steps) == 1 and (step := steps.pop()) > 0:
                    yield f"{a} == {b} + {step}"


def _times(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x * y for x, y in zip(a, b, strict=True))


def _scaled(factor: int, text: str) -> str:
    return text if factor == 1 else f"{factor}*{text}"


def _multiple(term: _Term, values: tuple[int, ...]) -> str | None:
    first = next((i for i, each in enumerate(term.values) if each), None)
    if first is None or not values[first]:
        return None
    a, b = values[first], term.values[first]
    if any(v * b != t * a for v, t in zip(values, term.values, strict=True)):
        return None
    factor = Fraction(a, b)
    if factor.denominator > _LARGEST_DIVISOR:
        return None
    text = _scaled(factor.numerator, term.text)
    return text if factor.denominator == 1 else f"{text}//{factor.denominator}"


def _affine(term: _Term, values: tuple[int, ...]) -> str | None:
    at = next(i for i, each in enumerate(term.values) if each != term.values[0])
    factor = Fraction(values[at] - values[0], term.values[at] - term.values[0])
    if factor.denominator != 1 or not factor:
        return None
    slope, rest = factor.numerator, values[0] - factor.numerator * term.values[0]
    if any(v != slope * t + rest for v, t in zip(values, term.values, strict=True)):
        return None
    return _joined([(slope, term.text), (rest, "")])


def _sum(first: _Term, second: _Term, values: tuple[int, ...]) -> str | None:
    solved = _solved(first.values, second.values, values)
    if solved is None:
        return None
    a, b, rest = solved
    rows = zip(first.values, second.values, values, strict=True)
    if not a or not b or any(a * x + b * y + rest != v for x, y, v in rows):
        return None
    return _joined([(a, first.text), (b, second.text), (rest, "")])


def _solved(
    x: tuple[int, ...], y: tuple[int, ...], v: tuple[int, ...]
) -> tuple[int, int, int] | None:
    """Return integers with v = a*x + b*y + c in three of the rows."""
    i = next((i for i in range(len(x)) if x[i] != x[0]), None)
    if i is None:
        return None
    dx, dy, dv = x[i] - x[0], y[i] - y[0], v[i] - v[0]
    for j in range(len(x)):
        ex, ey, ev = x[j] - x[0], y[j] - y[0], v[j] - v[0]
        determinant = dx * ey - ex * dy
        if determinant:
            a, b = dv * ey - ev * dy, dx * ev - ex * dv
            if a % determinant or b % determinant:
                return None
            a, b = a // determinant, b // determinant
            return a, b, v[0] - a * x[0] - b * y[0]
    return None


def _joined(terms: Sequence[tuple[int, str]]) -> str:
    """Return a sum as text, the positive terms first.

    >>> _joined([(-1, "P"), (2, "L"), (3, "")])
    '2*L + 3 - P'
    """
    parts: list[str] = []
    for factor, text in sorted((t for t in terms if t[0]), key=lambda t: t[0] < 0):
        size = abs(factor)
        shown = _scaled(size, text) if text else str(size)
        sign = "-" if factor < 0 else "+"
        parts.append(f"{sign} {shown}" if parts else f"-{shown}" if factor < 0 else shown)
    return " ".join(parts)
