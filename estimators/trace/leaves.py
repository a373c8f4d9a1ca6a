"""Where a model and its caches keep arrays, whatever their classes."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from memfit.estimators.trace.nodes import Role


class Leaf(NamedTuple):
    """An array that a call is given, and how to put another in its place."""

    array: Any
    role: Role
    name: str
    put: Callable[[Any], None]


class Untouched:
    """A model's modules as they were made: what its calls make for themselves is not in them."""

    def __init__(self, model: Any) -> None:
        self._modules = [(m, dict(m), dict(vars(m))) for m in model.modules()]

    def restore(self) -> None:
        """Forget what calls have made."""
        for module, items, attributes in self._modules:
            dict.clear(module)
            dict.update(module, items)
            vars(module).clear()
            vars(module).update(attributes)


def weights_of(model: Any) -> Iterator[Leaf]:
    """Yield the arrays of a model's modules: its parameters, and what they made for themselves."""
    for path, module in model.named_modules():
        for key, value in list(module.items()):
            role: Role = "constant" if key.startswith("_") else "weight"
            yield from _leaves(module, key, value, role, f"{path}.{key}" if path else key)


def caches_of(caches: list[Any]) -> Iterator[Leaf]:
    """Yield the arrays of all caches, in the order of the layers that own them."""
    for index in range(len(caches)):
        yield from _leaves(caches, index, caches[index], "cache", str(index))


def _leaves(owner: Any, key: Any, value: Any, role: Role, name: str) -> Iterator[Leaf]:
    import mlx.core as mx

    if isinstance(value, mx.array):
        yield Leaf(value, role, name, _setter(owner, key))
    elif isinstance(value, tuple) and any(isinstance(item, mx.array) for item in value):
        # A tuple cannot take another array; MLX's functions take a list as well.
        owner[key] = list(value)
        yield from _leaves(owner, key, owner[key], role, name)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(value, index, item, role, f"{name}.{index}")
    elif isinstance(value, dict) and not hasattr(value, "named_modules"):
        for inner, item in list(value.items()):
            yield from _leaves(value, inner, item, role, f"{name}.{inner}")
    elif role == "cache" and hasattr(value, "__dict__"):
        for attribute, item in list(vars(value).items()):
            yield from _leaves(vars(value), attribute, item, role, f"{name}.{attribute}")


def _setter(owner: Any, key: Any) -> Callable[[Any], None]:
    return lambda array: owner.__setitem__(key, array)
