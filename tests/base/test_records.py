"""Records behave like frozen dataclasses, as the type checker sees them."""

import pickle
from copy import deepcopy
from dataclasses import FrozenInstanceError, asdict, field, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.base.records import record
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.apple import chips
from memfit.estimators.machine.devices import find_device
from memfit.estimators.machine.nvidia import gpu_models
from memfit.estimators.results.estimate import KV, Component


@record(frozen=True, slots=True)
class Aside:
    name: str
    remark: str = field(default="", compare=False)


figures = st.builds(Component, st.integers(0, 3), st.sampled_from(["exact", "bound"]))


@given(figures, figures)
def test_records_are_equal_when_their_values_are(one: Component, other: Component) -> None:
    same = asdict(one) == asdict(other)
    assert (one == other) is same
    assert len({one, other}) == (1 if same else 2)


def test_a_record_equals_nothing_of_another_class() -> None:
    kv = KV(1, "exact", 1, 1, 1, 1)
    everything: list[object] = [kv, Component(1, "exact"), (1, "exact")]
    assert [everything.index(each) for each in everything] == [0, 1, 2]


def test_a_field_can_be_excluded_from_comparison() -> None:
    assert Aside("a", "one") == Aside("a", "two")
    assert hash(Aside("a", "one")) == hash(Aside("a", "two"))
    assert repr(Aside("a", "one")) == "Aside(name='a', remark='one')"


def test_records_are_copied_and_replaced() -> None:
    component = Component(1, "exact")
    assert pickle.loads(pickle.dumps(component)) == deepcopy(component) == component
    assert replace(component, bytes=2) == Component(2, "exact")


def test_a_record_has_no_other_attributes_than_its_fields() -> None:
    with pytest.raises(AttributeError):
        setattr(Component(1, "exact"), "nbytes", 2)  # noqa: B010 - what the type checker refuses


def test_shared_or_validated_classes_reject_assignment() -> None:
    gpu = next(iter(gpu_models().values()))
    for each in (Workload(prompt_tokens=1), find_device("m1-8"), chips()["m1"], gpu):
        name = fields(each)[0].name
        with pytest.raises(FrozenInstanceError):
            setattr(each, name, getattr(each, name))
