"""Trees of what can follow from tests whose answers are not known."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from memfit.estimators.programs.sizes import Size, expression
from memfit.estimators.programs.steps import Marked, Question

Test: TypeAlias = Question | Marked
# Tests with their answers, in the order they are made.
Path: TypeAlias = tuple[tuple[Test, bool], ...]


class Fork(NamedTuple):
    """What follows from a test: ends of any type, or further forks."""

    test: Test
    then: Any
    otherwise: Any


def identity(value: Any) -> Any:
    """Return what equals that of another value, without a comparison of sizes."""
    if isinstance(value, tuple):
        return tuple(map(identity, value))
    return expression(value) if isinstance(value, Size) else value


def tree_of(ends: Sequence[tuple[Path, Any]]) -> Any:
    """Return the tree of ends; a test on which nothing depends is not in it."""
    path, end = ends[0]
    if not path:
        return end
    then, otherwise = (
        tree_of([(tests[1:], end) for tests, end in ends if tests[0][1] is answer])
        for answer in (True, False)
    )
    if identity(then) == identity(otherwise):
        return then
    return Fork(path[0][0], then, otherwise)


def ends_of(tree: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the ends of a tree, each with the way to it."""
    if not isinstance(tree, Fork):
        yield (), tree
        return
    for answer, branch in ((True, tree.then), (False, tree.otherwise)):
        for path, end in ends_of(branch):
            yield ((tree.test, answer), *path), end


def flags_of(tree: Any) -> list[int]:
    """Return the flags that a tree tests, each once."""
    tests = (test for path, _ in ends_of(tree) for test, _ in path)
    return list(dict.fromkeys(test.flag for test in tests if isinstance(test, Marked)))


def mapped(tree: Any, test: Callable[[Test], Test], end: Callable[[Any], Any]) -> Any:
    """Return a tree with other tests and ends."""
    if not isinstance(tree, Fork):
        return end(tree)
    return Fork(test(tree.test), mapped(tree.then, test, end), mapped(tree.otherwise, test, end))


def consistent(paths: Sequence[Path]) -> Path | None:
    """Return all tests of some ways, None where they contradict one another."""
    found: dict[Test, bool] = {}
    for test, answer in (each for path in paths for each in path):
        if found.setdefault(test, answer) is not answer:
            return None
    return tuple(found.items())
