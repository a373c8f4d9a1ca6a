"""Where a model and its caches keep arrays, whatever their classes."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from memfit.estimators.trace.graph_format import Role


class Leaf(NamedTuple):
    """An array that a call reads, and the place where another can replace it."""

    array: Any
    role: Role
    name: str
    owner: Any
    key: Any

    def put(self, array: Any) -> None:
        """Put another array in its place."""
        self.owner[self.key] = array


class Modules:
    """A model's modules as they were built: calls add arrays, which `restore` removes."""

    def __init__(self, model: Any) -> None:
        self._modules = [(path, m, dict(m), dict(vars(m))) for path, m in model.named_modules()]

    def restore(self) -> None:
        """Put every module back to what it was when the model was built."""
        # A module is a dictionary of arrays and submodules with settings as attributes.
        for _, module, items, attributes in self._modules:
            dict.clear(module)
            dict.update(module, items)
            vars(module).clear()
            vars(module).update(attributes)

    def count(self) -> int:
        """Return the number of entries in all modules."""
        return sum(len(module) for _, module, _, _ in self._modules)

    def leaves(self) -> Iterator[Leaf]:
        """Yield the arrays of the modules: parameters, and constants that a class keeps."""
        for path, module, _, _ in self._modules:
            for key, value in list(module.items()):
                # No parameter begins with one (mlx nn/layers/base.py, valid_parameter_filter).
                role: Role = "constant" if key.startswith("_") else "weight"
                yield from _leaves(module, key, value, role, f"{path}.{key}" if path else key)


def caches_of(caches: list[Any]) -> Iterator[Leaf]:
    """Yield the arrays of all caches, in the order of the layers that own them."""
    for index in range(len(caches)):
        yield from _leaves(caches, index, caches[index], "cache", str(index))


def leaves_of(owner: Any, key: Any, role: Role, name: str = "") -> Iterator[Leaf]:
    """Yield the arrays of a tree, modules included, in the order that MLX flattens it."""
    value = owner[key]
    if isinstance(value, dict):
        inner = list(value)
    elif isinstance(value, (list, tuple)):
        inner = list(range(len(value)))
        # Settings of a module stay a tuple: a list would count as parameters.
        if isinstance(value, tuple) and any(not isinstance(item, (int, float)) for item in value):
            owner[key] = value = list(value)
    else:
        yield from _leaves(owner, key, value, role, name)
        return
    for each in inner:
        yield from leaves_of(value, each, role, f"{name}.{each}" if name else str(each))


def _leaves(owner: Any, key: Any, value: Any, role: Role, name: str) -> Iterator[Leaf]:
    import mlx.core as mx

    if isinstance(value, mx.array):
        yield Leaf(value, role, name, owner, key)
    elif isinstance(value, tuple) and any(isinstance(item, mx.array) for item in value):
        # A tuple cannot take another array; MLX's functions take a list as well.
        owner[key] = list(value)
        yield from _leaves(owner, key, owner[key], role, name)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(value, index, item, role, f"{name}.{index}")
    # A module is a dictionary too, and named_modules lists it by itself.
    elif isinstance(value, dict) and not hasattr(value, "named_modules"):
        for inner, item in list(value.items()):
            yield from _leaves(value, inner, item, role, f"{name}.{inner}")
    # Cache classes keep their arrays as attributes.
    elif role == "cache" and hasattr(value, "__dict__"):
        for attribute, item in list(vars(value).items()):
            yield from _leaves(vars(value), attribute, item, role, f"{name}.{attribute}")
