"""Numbers that keep their expressions calculate as numbers do."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators import trace
from memfit.estimators.base.units import ceil_div
from memfit.estimators.programs.sizes import Guards, evaluator, expression

OPERATIONS: list[Callable[[int, int, int], int]] = [
    lambda a, b, c: a * b + c,
    lambda a, b, c: 7 * a - b * c + 3,
    lambda a, b, c: a * b * 2 // b,
    lambda a, b, c: (a * b + c) // 8 * c,
    lambda a, b, c: -(-a * b // 64) * 64 + a % 8,
    lambda a, b, c: (a + b) // (c + 1) + 5 // (a + 1),
    lambda a, b, c: abs(a - b) + (b - a + 100).bit_length(),
    lambda a, b, c: max(a, b) * min(b, c) + sum((a, b, c)),
]
NUMBERS = st.integers(1, 400)


@given(NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_expression_holds_wherever_the_guards_do(
    operation: Callable[[int, int, int], int], a: int, b: int, c: int, d: int, e: int, f: int
) -> None:
    guards = Guards({"a": a, "b": b, "c": c})
    result = operation(*guards.sizes.values())
    assert result.__index__() == operation(a, b, c)
    texts = [expression(result), f"({guards.condition()})"]
    values = evaluator(texts, {"bit_length": int.bit_length})
    assert values({"a": a, "b": b, "c": c}) == (operation(a, b, c), True)
    other, holds = values({"a": d, "b": e, "c": f})
    assert not holds or other == operation(d, e, f)


def test_what_follows_from_positive_names_is_no_guard() -> None:
    guards = Guards({"a": 3, "b": 4, "zero": 0})
    a, b, zero = guards.sizes.values()
    assert a * b + 1 > 0
    assert a + 2 != 1
    assert a + b != 0
    assert not list(guards)
    assert a != zero + 1
    assert [guard.condition for guard in guards] == ["not (a-1*zero-1)==0"]


# Rules that lowering runs with expressions: int() loses them, range() compares without a guard.
RULES = (
    *("shared_rules", "metal_rules", "metal_convolution", "cpu_rules", "cuda_rules"),
    *("layouts", "operation"),
)


@pytest.mark.parametrize("name", RULES)
def test_rules_turn_no_size_into_a_plain_number(name: str) -> None:
    path = Path(next(iter(trace.__path__))) / f"{name}.py"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("int", "bool"), node.lineno
            if node.func.id == "range":
                # The number of axes is no size, and neither is a constant.
                assert ast.unparse(node.args[-1]).startswith(("len(", "_")), node.lineno


def test_a_number_of_blocks_rounded_up_is_compared_under_a_guard() -> None:
    guards = Guards({"L": 90, "experts": 8})
    rows = guards.sizes["L"] * guards.sizes["experts"]
    assert ceil_div(rows, 2048) <= 1
    holds = evaluator([guards.condition()], {})
    assert [holds({"L": length, "experts": 8}) for length in (256, 257)] == [(True,), (False,)]
