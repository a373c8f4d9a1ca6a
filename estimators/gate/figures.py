"""The figures of a target that limits are set on and that a baseline keeps."""

from msgspec import UNSET

from memfit.estimators.base.workload import Workload
from memfit.estimators.results.gate import GateFigures, SmallerRun
from memfit.estimators.runtimes.facets import load_bytes, loaded_weights
from memfit.estimators.sizing.recommend import capacity_of
from memfit.estimators.sizing.search import longest_context, longest_prompt
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.estimators.sizing.smaller_workloads import largest_workload


def figures_of(
    sized: SizedModel, workload: Workload, *, with_context: bool = True, with_smaller: bool = True
) -> GateFigures:
    """Return the figures of a model on a device; the context costs a search.

    The peak is the largest of the workload and, unless ``with_smaller`` is false, of smaller ones.

    Raises:
        UnsupportedError: when the runtime cannot run the workload.
    """
    at = sized.figures_for(workload)
    largest = largest_workload(sized, workload) if with_smaller else workload
    moment = sized.figures_for(largest).moment
    capacity = capacity_of(sized)
    return GateFigures(
        weights_bytes=loaded_weights(sized.runtime_model).loaded_bytes,
        kv_bytes_per_token=at.kv.bytes_per_token,
        kv_bytes=at.kv.nbytes,
        state_bytes=at.ssm_bytes,
        workspace_bytes=moment.workspace_bytes,
        peak_bytes=moment.nbytes,
        load_peak_bytes=max(load_bytes(sized.runtime_model), sized.resident_bytes),
        wired_limit_bytes=sized.requirement(largest).peak_bytes,
        context_tokens=_context(sized, workload) if with_context else None,
        expert_capacity=capacity.experts if capacity else None,
        experts=capacity.of if capacity else None,
        basis=sized.footprint.basis,
        workspace_basis=sized.runtime_model.basis("workspace", largest)[0],
        peak_of=UNSET if largest == workload else SmallerRun(largest.batch, largest.prompt_tokens),
    )


def _context(sized: SizedModel, workload: Workload) -> int | None:
    """The context memfit estimate recommends."""
    return longest_context(sized, workload, longest_prompt(sized))
