"""What callers share can never change."""

import importlib
import sys
from pathlib import Path

import pytest
from msgspec import Struct

from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.chips import chips, gpu_models
from memfit.estimators.machine.devices import find_device
from memfit.estimators.results.estimate import Component

RESULTS = Path(__file__).parents[2] / "estimators" / "results"
SHARED: dict[str, Struct] = {
    "component": Component(1, "exact"),
    "workload": Workload(prompt_tokens=1),
    "device": find_device("m1-8"),
    "chip": chips()["m1"],
    "gpu": next(iter(gpu_models().values())),
}


@pytest.mark.parametrize("name", SHARED)
def test_shared_values_reject_assignment(name: str) -> None:
    shared = SHARED[name]
    field = shared.__struct_fields__[0]
    with pytest.raises(AttributeError):
        setattr(shared, field, getattr(shared, field))
    with pytest.raises(AttributeError):
        delattr(shared, field)
    if sys.version_info < (3, 13):  # later ones let it change what a class in C made frozen
        with pytest.raises(TypeError):
            object.__setattr__(shared, field, None)
    with pytest.raises(AttributeError):
        setattr(shared, "other", None)  # noqa: B010 - what the type checker refuses


def test_every_result_is_frozen() -> None:
    names = [path.stem for path in RESULTS.glob("[a-z]*.py")]
    modules = [importlib.import_module(f"memfit.estimators.results.{name}") for name in names]
    structs = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Struct)
    }
    assert len(structs) > 60
    assert {each for each in structs if not each.__struct_config__.frozen} == {Struct}
