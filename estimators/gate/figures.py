"""The figures of a target that limits are set on and that a baseline keeps."""

from collections.abc import Iterator
from math import ceil

from msgspec import UNSET, Struct, UnsetType

from memfit.estimators.base.units import Bytes, Count, Positive, Tokens
from memfit.estimators.base.workload import Workload
from memfit.estimators.results.terms import Basis
from memfit.estimators.runtimes.expert_capacity import capacity_of
from memfit.estimators.runtimes.facets import load_bytes, loaded_weights
from memfit.estimators.sizing.prefill_speed import first_tokens
from memfit.estimators.sizing.run_limits import server_buffers
from memfit.estimators.sizing.search import largest_workload, longest_context, longest_prompt
from memfit.estimators.sizing.sized_model import SizedModel, held_of


class SmallerRun(Struct, frozen=True, forbid_unknown_fields=True):
    """A workload that the target's command allows too, and that takes more."""

    batch: Positive
    prompt_tokens: Positive


class GateFigures(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The figures that limits are set on and that a baseline keeps: bytes or tokens."""

    weights_bytes: Bytes
    kv_bytes_per_token: Bytes
    kv_bytes: Bytes
    state_bytes: Bytes
    workspace_bytes: Bytes
    """Workspace of the run with the largest peak, bytes."""
    peak_bytes: Bytes
    """Largest peak of the target's workload and of smaller ones (``peak_of``), bytes."""
    load_peak_bytes: Bytes
    """Most bytes in use while the weights are loaded, for mlx-moe while its slots are filled; never
    a measurement."""
    wired_limit_bytes: Bytes
    """Bytes that must stay resident: the peak with the margin of memfit estimate."""
    context_tokens: Tokens | None
    """Longest prompt that fits nine tenths of the working set, None when none does."""
    expert_capacity: Count | None
    """Experts of each layer that fit, None for a model without experts."""
    experts: Count | None
    """Experts a layer has, None for a model without experts."""
    basis: Basis
    """Basis of the figure of the weights: how far it can be trusted."""
    held_bytes: Bytes | None = None
    """Most bytes that MLX holds in the run with the largest peak, with freed ones that it keeps;
    None where they are not known."""
    buffers: Count | None = None
    """Buffers of Metal when ``mlx_lm.server`` has generated the target's tokens; None elsewhere."""
    first_token_ms: Count | None = None
    """Most milliseconds to expect to the first token; None where the chip is not known, or the
    workload is not one sequence by formula."""
    training_peak_bytes: Bytes | None = None
    """Most bytes while mlx_lm.lora runs the target's recipe, None without one."""
    workspace_basis: Basis | None = None
    """Basis of the figure of the workspace; None in the baseline of an older memfit."""
    peak_of: SmallerRun | UnsetType = UNSET
    """Smaller workload with the largest peak, where that is above the target's own."""


class FigureChange(Struct, frozen=True):
    """One figure in the baseline and now; None where there is none."""

    figure: str
    before: Count | None
    now: Count | None
    by: int | None
    """Now less before."""


COMPARED = {
    "weights_bytes": "weights",
    "kv_bytes_per_token": "KV per token",
    "state_bytes": "recurrent state",
    "workspace_bytes": "workspace",
    "peak_bytes": "peak",
    "training_peak_bytes": "training peak",
    "context_tokens": "longest context",
    "expert_capacity": "expert capacity",
}
"""The figures that a report compares with the baseline's, and what it calls them."""


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
    capacity = capacity_of(sized.runtime_model)
    return GateFigures(
        weights_bytes=loaded_weights(sized.runtime_model).loaded_bytes,
        kv_bytes_per_token=at.kv.bytes_per_token,
        kv_bytes=at.kv.nbytes,
        state_bytes=at.ssm_bytes,
        workspace_bytes=moment.workspace_bytes,
        peak_bytes=moment.nbytes,
        load_peak_bytes=max(load_bytes(sized.runtime_model), sized.resident_bytes),
        wired_limit_bytes=sized.requirement(largest).peak_bytes,
        held_bytes=held_of(sized, largest),
        buffers=server_buffers(sized.runtime_model, workload),
        first_token_ms=_first_token_ms(sized, workload),
        # As memfit estimate recommends it.
        context_tokens=longest_context(sized, workload, longest_prompt(sized))
        if with_context
        else None,
        expert_capacity=capacity.experts if capacity else None,
        experts=capacity.of if capacity else None,
        basis=sized.footprint.basis,
        workspace_basis=sized.runtime_model.basis("workspace", largest)[0],
        peak_of=UNSET if largest == workload else SmallerRun(largest.batch, largest.prompt_tokens),
    )


def _first_token_ms(sized: SizedModel, workload: Workload) -> int | None:
    """Return the upper end of the seconds that an estimate shows, rounded up."""
    expected = first_tokens(sized, workload, ())
    return ceil(1000 * expected[0].range_seconds[1]) if expected else None


def changes(before: GateFigures, now: GateFigures) -> Iterator[FigureChange]:
    """Yield the compared figures, those that did not change as well."""
    for name in COMPARED:
        old, new = getattr(before, name), getattr(now, name)
        if name == "training_peak_bytes" and old is new is None:
            continue  # neither is trained
        yield FigureChange(name, old, new, None if old is None or new is None else new - old)
