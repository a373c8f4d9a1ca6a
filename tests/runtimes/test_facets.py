"""A runtime is a small core and facets; a sized model answers few questions by itself."""

import inspect

from msgspec import Struct

from memfit.estimators.runtimes import facets
from memfit.estimators.runtimes.interface import RuntimeModel
from memfit.estimators.runtimes.registry import _class, list_runtimes, offers
from memfit.estimators.sizing.sized_model import SizedModel

FACETS = [
    kind
    for _, kind in inspect.getmembers(facets, inspect.isclass)
    if kind.__module__ == facets.__name__ and not issubclass(kind, (tuple, Struct))
]


def members(kind: type) -> set[str]:
    """Return the public names that a class itself declares or defines."""
    return {name for name in {*vars(kind), *kind.__annotations__} if not name.startswith("_")}


def test_the_core_of_a_runtime_and_a_sized_model_stay_small() -> None:
    assert len(members(RuntimeModel)) <= 12, sorted(members(RuntimeModel))
    assert len(members(SizedModel)) <= 15, sorted(members(SizedModel))


def test_every_facet_is_of_some_runtimes_and_not_of_the_core() -> None:
    for facet in FACETS:
        assert not issubclass(RuntimeModel, facet)
        assert any(offers(runtime, facet) for runtime in list_runtimes()), facet.__name__


def test_no_flag_of_a_class_stands_for_the_class() -> None:
    flags = {
        f"{base.__name__}.{name}"
        for runtime in list_runtimes()
        for base in _class(runtime.name).__mro__
        for name, value in vars(base).items()
        if isinstance(value, bool) and not name.startswith("__")
    }
    assert flags == set()
