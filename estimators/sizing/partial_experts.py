"""Which part of its experts a mixture can keep on a machine that is too small for all of them."""

from collections.abc import Sequence

from msgspec import Struct

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.results.advice import PartialExperts
from memfit.estimators.runtimes.expert_capacity import capacity_of_inventory, whole_slots
from memfit.estimators.runtimes.facets import MlxLmPrograms
from memfit.estimators.runtimes.runtime import Need, judge
from memfit.estimators.sizing.expert_rules import TEXTS, published, warnings_of, worth
from memfit.estimators.sizing.joint import JointSearch
from memfit.estimators.sizing.search import first_fitting
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.estimators.weights.expert_slots import Inventory, inventory, startup_bytes


class RunMemory(Struct, frozen=True):
    """Memory of a run in addition to weights, at ``context_tokens``."""

    context_tokens: int
    kv_bytes: int
    state_bytes: int
    workspace_bytes: int
    max_context: int | None = None
    """The model's own limit."""


def run_memory(sized: SizedModel, workload: Workload) -> RunMemory:
    """Return what a workload takes in addition to weights.

    Raises:
        UnsupportedError: when the runtime cannot run it.
    """
    figures = sized.figures_for(workload)
    return RunMemory(
        workload.prompt_tokens,
        figures.kv.nbytes,
        figures.ssm_bytes,
        figures.moment.workspace_bytes,
        sized.model.max_context,
    )


def experts_of(sized: SizedModel) -> Inventory:
    """Return the experts of a model, those of a converted one by its conversion.

    Raises:
        UnsupportedError: as `inventory`.
    """
    plan = sized.footprint.plan
    tensors = None if plan and plan.converting else sized.checkpoint.tensors
    return inventory(sized.model, tensors, sized.footprint)


def running_bytes(experts: Inventory, run: RunMemory, capacities: Sequence[int]) -> int:
    """Return the peak of a run that keeps these experts of each layer, after start-up."""
    weights = experts.non_expert_bytes + experts.held_bytes(capacities)
    return weights + experts.lookup_bytes + run.kv_bytes + run.state_bytes + run.workspace_bytes


def most_experts(
    experts: Inventory, run: RunMemory, device: Device | None, *, starting: bool
) -> int | None:
    """Return the most experts of each layer with which the run fits, None when too few do.

    With ``starting`` its start-up fits too.
    """
    if device is None:
        return None

    def fits(capacity: int) -> bool:
        capacities = [capacity] * len(experts.layers)
        need = running_bytes(experts, run, capacities)
        if starting:
            need = max(need, startup_bytes(experts, capacities))
        return judge(Need(need, 0), device)[0] == "fits"

    if fits(experts.experts):
        return experts.experts
    fewer = range(experts.experts - 1, experts.top_k - 1, -1)
    largest = first_fitting(fewer, fits, monotone=True)
    return None if largest is None else whole_slots(largest)


def partial_experts(search: JointSearch) -> PartialExperts | None:
    """Return the experts that the machine of a search can keep, of weights in the fewest bits.

    By mlx-moe's rule, and no more than fit with the request. None where all fit or too few do, and
    for a model that no part of the experts is planned for.
    """
    bits = search.weight_bits[-1] if search.weight_bits else None
    try:
        sized = search.model(bits)
        device = sized.device
        programs = sized.runtime_model.facet(MlxLmPrograms)
        if device is None or device.backend != "metal" or programs is None:
            return None
        experts, run = experts_of(sized), run_memory(sized, search.workload)
    except UnsupportedError:
        return None
    fitting = most_experts(experts, run, device, starting=True)
    if fitting is None or fitting == experts.experts:
        return None
    capacity = min(fitting, capacity_of_inventory(experts, device.working_set_bytes))
    if capacity < experts.top_k:
        return None
    capacities, model_type = [capacity] * len(experts.layers), sized.model.model_type
    running, starting = running_bytes(experts, run, capacities), startup_bytes(experts, capacities)
    warned = tuple(warnings_of(experts, device, model_type, capacity, max(running, starting)))
    pays = worth(experts, None, capacity)
    known = published(experts, model_type)
    return PartialExperts(
        experts=capacity,
        of=experts.experts,
        weight_bits=bits,
        running_bytes=running,
        startup_bytes=starting,
        pays=pays.pays,
        warned=bool(warned),
        reasons=(
            *(TEXTS[code].format(known=known, top_k=experts.top_k) for code in warned),
            *pays.reasons,
        ),
    )
