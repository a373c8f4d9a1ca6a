"""A question about what runs where is resolved once, and whole."""

from msgspec.structs import replace

from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.devices import find_device
from memfit.estimators.questions.question import WorkloadQuestion
from memfit.estimators.questions.target import Ranks
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.resolved import TargetQuestion
from memfit.estimators.sizing.sized_model import SizedModel

QUESTION = TargetQuestion(
    reference="sample:qwen3-0.6b",
    device=find_device("m4-pro-24"),
    workload=WorkloadQuestion(prompt_tokens=1000),
)


def test_an_equal_question_has_the_same_target() -> None:
    catalog = Catalog()
    target = catalog.resolve(QUESTION)
    assert catalog.resolve(replace(QUESTION)) is target
    other = catalog.resolve(replace(QUESTION, workload=WorkloadQuestion(prompt_tokens=1001)))
    assert (other is target, other.sized is target.sized) == (False, True)


def test_a_target_is_the_rank_that_decides_on_its_machine() -> None:
    target = Catalog().resolve(replace(QUESTION, ranks=Ranks(2, "tensor")))
    assert target.sized is target.ranks.tightest(target.workload)
    assert target.device == QUESTION.device
    assert target.sized.resident_bytes < Catalog().resolve(QUESTION).sized.resident_bytes


def test_measurements_are_looked_for_at_each_question() -> None:
    catalog, workloads = Catalog(), list[Workload]()

    def measured(sized: SizedModel, workload: Workload) -> SizedModel:
        workloads.append(workload)
        return sized

    for _ in range(2):
        catalog.resolve(QUESTION, measured)
    assert [workload.prompt_tokens for workload in workloads] == [1000, 1000]
