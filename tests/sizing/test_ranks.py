"""Several ranks: what follows for the whole from the figures of each."""

from pathlib import Path

import pytest

from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.devices import find_device, working_set_device
from memfit.estimators.questions.target import Ranks
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.decode_speed import decode_speed
from memfit.estimators.sizing.estimate import estimate
from memfit.estimators.sizing.ranks import RankedModel, ranked, room
from memfit.estimators.sizing.sized_model import SizedModel

MODEL = str(Path(__file__).parents[1] / "arch" / "cases" / "qwen3_moe.json")
WORKLOAD = Workload(prompt_tokens=256)
SPLIT = (4, 1)


@pytest.fixture(scope="module")
def model() -> SizedModel:
    return Catalog().sized(MODEL, device=find_device("m4-max-128"))


def speed(shared: RankedModel) -> float:
    tightest = shared.tightest(WORKLOAD)
    found = shared.added(estimate(tightest, WORKLOAD, advises=False)).decode_speed
    assert found
    assert found.expected_tokens_per_second is None
    return found.most_tokens_per_second


def test_the_slowest_rank_bounds_the_decode_speed(model: SizedModel) -> None:
    alone = decode_speed(model, WORKLOAD)
    assert alone
    most = alone.most_tokens_per_second
    fast, slow = find_device("m4-max-128"), find_device("m4-pro-24")
    # A token passes the ranks of a pipeline one after the other; each reads a norm of its own.
    assert speed(ranked(model, Ranks(2, "pipeline"))) == pytest.approx(most, rel=0.01)
    assert most < speed(ranked(model, Ranks(2, "tensor"))) < 2 * most
    for parallel in ("tensor", "pipeline"):
        even = speed(ranked(model, Ranks(2, parallel, None, (fast, fast))))
        uneven = speed(ranked(model, Ranks(2, parallel, None, (fast, slow))))
        assert uneven < even


def test_a_rank_that_is_full_first_with_longer_prompts_is_said(model: SizedModel) -> None:
    def comfortable(index: int, tokens: int) -> int:
        part = ranked(model, Ranks(2, "pipeline", SPLIT)).ranks[index]
        return part.requirement(Workload(prompt_tokens=tokens)).peak_bytes * 10 // 9 + 10

    # Rank 0 has four layers and their caches: with more tokens it needs more than rank 1.
    devices = (working_set_device(comfortable(0, 2048)), working_set_device(comfortable(1, 4096)))
    shared = ranked(model.on(devices[0]), Ranks(2, "pipeline", SPLIT, devices))
    rooms = [room(rank, WORKLOAD) for rank in shared.ranks]
    assert rooms[1] < rooms[0]
    assert shared.full_first(WORKLOAD) is shared.ranks[0]
    result = shared.added(estimate(shared.tightest(WORKLOAD), WORKLOAD))
    assert result.recommendation.context_tokens.value == 4096
    said = [note.message for note in result.notes if note.code == "other-rank"]
    assert len(said) == 1
    assert said[0].startswith("another rank has room for 3328 tokens;")
