"""The figures of a target that limits are set on and that a baseline keeps."""

from dataclasses import replace

from memfit.estimators.base.records import record
from memfit.estimators.base.workload import Workload
from memfit.estimators.results.estimate import Basis
from memfit.estimators.runtimes.budget import judge
from memfit.estimators.sizing.recommend import UNBOUNDED_CONTEXT, capacity_of
from memfit.estimators.sizing.search import longest_context
from memfit.estimators.sizing.sized_model import SizedModel

# What memfit estimate keeps free above the peak when not told (--margin), so that both recommend
# the same context.
MARGIN_BYTES = 64_000_000


@record(frozen=True, slots=True, kw_only=True)
class Figures:
    """Integers are bytes or tokens.

    ``peak_bytes`` is the peak as memfit estimate gives it, ``wired_limit_bytes`` the same with
    its margin: what must stay resident; ``load_peak_bytes`` are the weights once loaded.
    ``context_tokens`` is the longest prompt that fits nine tenths of the working set, None when
    none does; ``expert_capacity`` and ``experts`` are None for a model without experts.
    """

    weights_bytes: int
    kv_bytes_per_token: int
    kv_bytes: int
    state_bytes: int
    workspace_bytes: int
    peak_bytes: int
    load_peak_bytes: int
    wired_limit_bytes: int
    context_tokens: int | None
    expert_capacity: int | None
    experts: int | None
    basis: Basis


def figures_of(sized: SizedModel, workload: Workload, *, with_context: bool = True) -> Figures:
    """Return the figures of a sizing that has a device; the context costs a search.

    Raises:
        UnsupportedError: when the runtime cannot run the workload.
    """
    at = sized.figures_for(workload)
    capacity = capacity_of(sized, sized.device) if sized.device else None
    return Figures(
        weights_bytes=sized.footprint.loaded_bytes,
        kv_bytes_per_token=at.kv.bytes_per_token,
        kv_bytes=at.kv.nbytes,
        state_bytes=at.ssm_bytes,
        workspace_bytes=at.moment.workspace_bytes,
        peak_bytes=at.moment.nbytes,
        load_peak_bytes=sized.resident_bytes,
        wired_limit_bytes=sized.requirement(workload).peak_bytes,
        context_tokens=_context(sized, workload) if with_context else None,
        expert_capacity=capacity.experts if capacity else None,
        experts=capacity.of if capacity else None,
        basis=sized.footprint.basis,
    )


def fits(sized: SizedModel, workload: Workload, tokens: int) -> bool:
    """Whether a prompt of so many tokens fits nine tenths of the working set."""
    prompt = replace(workload, prompt_tokens=tokens, max_tokens=0)
    return judge(sized.requirement(prompt), sized.device)[0] == "fits"


def _context(sized: SizedModel, workload: Workload) -> int | None:
    """The context memfit estimate recommends."""
    return longest_context(
        lambda tokens: fits(sized, workload, tokens), sized.model.max_context or UNBOUNDED_CONTEXT
    )
