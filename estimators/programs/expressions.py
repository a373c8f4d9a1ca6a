"""Sizes as text, such as ``2*L*hidden_size``, evaluated on exact integers.

The grammar is a part of Python's: names, integers, strings, ``+ - * // %``, comparisons, ``and``,
``or``, ``not``, conditional expressions and indexing. Names are the caller's; nothing is called.
Any integers do, also ones that record how they are used.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from memfit.estimators.base.errors import UnsupportedError

_GRAMMAR = (
    ast.Expression,
    ast.Tuple,
    ast.Name,
    ast.Load,
    ast.Constant,
    ast.BinOp,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.FloorDiv,
    ast.Mod,
    ast.UnaryOp,
    ast.USub,
    ast.Not,
    ast.Compare,
    ast.Eq,
    ast.NotEq,
    ast.Lt,
    ast.LtE,
    ast.Gt,
    ast.GtE,
    ast.In,
    ast.NotIn,
    ast.BoolOp,
    ast.And,
    ast.Or,
    ast.IfExp,
    ast.Subscript,
)


class ExpressionError(UnsupportedError):
    """A text is no expression of the grammar, or names a value that is not given."""


def compiled(texts: Sequence[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Return a function from named values to the values of all expressions, in their order.

    Raises:
        ExpressionError: for a text that is outside the grammar, and, when the function is called,
            for a name or a division that has no value.
    """
    return _compiled(tuple(texts))


@lru_cache(maxsize=1024)
def _compiled(texts: tuple[str, ...]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    for text in texts:
        _check(text)
    code = compile(f"({''.join(f'({text}),' for text in texts)})", "<sizes>", "eval")

    def values(names: Mapping[str, Any]) -> tuple[Any, ...]:
        try:
            # Only the grammar's nodes are in the code, so that it reads names and computes.
            result: tuple[Any, ...] = eval(code, {"__builtins__": {}}, names)
        except (NameError, KeyError, IndexError, TypeError, ZeroDivisionError) as error:
            raise ExpressionError(f"no value: {error}") from None
        return result

    return values


def _check(text: str) -> None:
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError):
        raise ExpressionError(f"not an expression: {text!r}") from None
    for node in ast.walk(tree):
        if not isinstance(node, _GRAMMAR):
            raise ExpressionError(f"{type(node).__name__} is not allowed in {text!r}")
        if isinstance(node, ast.Constant) and not isinstance(node.value, (int, str, type(None))):
            raise ExpressionError(f"a size is an integer: {text!r}")


def evaluate(text: str, names: Mapping[str, Any]) -> Any:
    """Return the value of one expression.

    >>> evaluate("2*L*hidden_size//64", {"L": 3, "hidden_size": 128})
    12

    Raises:
        ExpressionError: as `compiled`.
    """
    [value] = compiled((text,))(names)
    return value
