"""The figures of a target that limits are set on and that a baseline keeps."""

from collections.abc import Iterator
from math import ceil
from pathlib import Path

from msgspec import UNSET, Struct, UnsetType

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import printable
from memfit.estimators.base.units import Bytes, Count, Positive, Tokens, ceil_div
from memfit.estimators.base.workload import Workload
from memfit.estimators.gate.limit_values import MISSES
from memfit.estimators.machine.device import ANY_MAC
from memfit.estimators.plans.offload.session_cache import PLAIN_BITS, storage_of
from memfit.estimators.results.terms import Basis
from memfit.estimators.runtimes.expert_capacity import capacity_of
from memfit.estimators.runtimes.facets import MlxLmPrograms, load_bytes, loaded_weights
from memfit.estimators.sizing.partial_experts import experts_of
from memfit.estimators.sizing.prefill_speed import first_tokens
from memfit.estimators.sizing.run_limits import server_buffers
from memfit.estimators.sizing.search import largest_workload, longest_context, longest_prompt
from memfit.estimators.sizing.sized_model import SizedModel, held_of, peak_of


class SmallerRun(Struct, frozen=True, forbid_unknown_fields=True):
    """A workload that the target's command allows too, and that takes more."""

    batch: Positive
    prompt_tokens: Positive


class OtherRuns(Struct, frozen=True):
    """What figures beside the run are of; they are computed only where a limit needs them."""

    routing: Path | None = None
    """Recorded choices of experts, for `GateFigures.misses_per_1000_tokens`."""
    restores: bool = False
    """Whether a stored cache is restored, for `GateFigures.restore_peak_bytes`."""
    stored_bits: int | None = None
    """Its bits; None: as the workload keeps it in memory."""


RUN_ALONE = OtherRuns()


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
    misses_per_1000_tokens: Count | None = None
    """Chosen experts that mlx-moe has not in memory for 1000 generated tokens, rounded up, by a
    replay of recorded routing; None without one, or where too few experts fit for a token."""
    restore_peak_bytes: Bytes | None = None
    """Weights and the most that restoring the workload's stored cache takes; None where no limit
    needs it, or the runtime has no caches of mlx-lm."""
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
    sized: SizedModel,
    workload: Workload,
    others: OtherRuns = RUN_ALONE,
    *,
    with_context: bool = True,
    with_smaller: bool = True,
) -> GateFigures:
    """Return the figures of a model on a device; the context costs a search.

    The peak is the largest of the workload and, unless ``with_smaller`` is false, of smaller ones.

    Raises:
        InputError: when recorded routing cannot be read, or is of another model.
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
        peak_bytes=peak_of(sized, largest),
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
        misses_per_1000_tokens=_misses(sized, others.routing) if others.routing else None,
        restore_peak_bytes=_restore_peak(sized, workload, others) if others.restores else None,
        basis=sized.footprint.basis,
        workspace_basis=sized.runtime_model.basis("workspace", largest)[0],
        peak_of=UNSET if largest == workload else SmallerRun(largest.batch, largest.prompt_tokens),
    )


def _first_token_ms(sized: SizedModel, workload: Workload) -> int | None:
    """Return the upper end of the seconds that an estimate shows, rounded up."""
    expected = first_tokens(sized, workload, ())
    return ceil(1000 * expected[0].range_seconds[1]) if expected else None


def _misses(sized: SizedModel, routing: Path) -> int | None:
    """Replay what mlx-moe does, as memfit plan experts --routing."""
    # Only targets with recorded routing need these.
    from memfit.estimators.plans.experts.recording import read_recording
    from memfit.estimators.plans.experts.replay import Replay

    layers, capacity = experts_of(sized).layers, capacity_of(sized.runtime_model)
    replay = Replay(*read_recording(routing, layers, sized.model.model_type), layers)
    if capacity is None or capacity.experts < layers[0].top_k:
        return None
    found = replay.at("swap", capacity.experts)
    if not found.tokens:
        raise InputError(f"{printable(routing)}: no generated token that counts")
    return ceil_div(MISSES * found.misses, found.tokens)


def _restore_peak(sized: SizedModel, workload: Workload, others: OtherRuns) -> int | None:
    """Return the peak of a restore that dequantises all layers together, as in plan offload.

    A cache that the workload keeps in the bits of the file is read as it is.
    """
    if not sized.runtime_model.facet(MlxLmPrograms):
        return None
    kept = workload.kv_bits or PLAIN_BITS
    storage = storage_of(
        sized.model,
        bits=others.stored_bits or kept,
        group_size=workload.kv_group_size,
        prefill_step=workload.prefill_step,
    )
    tokens = workload.cached_tokens or workload.prompt_tokens
    as_stored = storage.stored_bytes(tokens)
    bulk, _ = storage.restore(tokens, sized.device or ANY_MAC)
    return sized.resident_bytes + (as_stored if storage.bits == kept else bulk)


def changes(before: GateFigures, now: GateFigures) -> Iterator[FigureChange]:
    """Yield the compared figures, those that did not change as well."""
    for name in COMPARED:
        old, new = getattr(before, name), getattr(now, name)
        if name == "training_peak_bytes" and old is new is None:
            continue  # neither is trained
        yield FigureChange(name, old, new, None if old is None or new is None else new - old)
