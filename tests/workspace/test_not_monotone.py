"""Where a larger workload takes less: MLX gives the GPU its work in batches, closed by elements."""

import pytest
from msgspec.structs import replace

from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.opening import open_sample
from memfit.estimators.machine.devices import find_device
from memfit.estimators.sizing.opening import size
from memfit.estimators.workspace.moments import RunMoments
from memfit.estimators.workspace.peak import prepared_model

QUANTISED = Workload(prompt_tokens=23518, kv_bits=4)


@pytest.mark.parametrize(
    ("smaller", "larger"),
    [
        ({"batch": 2}, {"batch": 3}),
        ({"prefill_step": 4096}, {"prefill_step": 6144}),
    ],
)
def test_a_larger_workload_takes_less_only_because_elements_close_batches(
    smaller: dict[str, int], larger: dict[str, int]
) -> None:
    device = find_device("m4-pro-24")
    subject = size(open_sample("qwen3-vl-4b"), device=device).runtime_model.subject
    prepared = prepared_model(subject.model, subject.footprint.plan, device)
    assert prepared.limits
    by_count = prepared.on(prepared.traits, replace(prepared.limits, max_mebi_elements=2**40))

    def full_chunk(model: object, changes: dict[str, int]) -> int:
        run = RunMoments(model, replace(QUANTISED, **changes), 0)  # type: ignore[arg-type]
        return max(moment.nbytes for moment in run.prefill() if moment.call == "full_chunk")

    assert full_chunk(prepared, larger) < full_chunk(prepared, smaller)
    assert full_chunk(by_count, larger) > full_chunk(by_count, smaller)
