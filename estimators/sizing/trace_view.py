"""Of a run by trace, the calls that can hold its peak."""

from collections.abc import Callable

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import ALL_PHASES, CallPhase, Workload
from memfit.estimators.mlx.call_plan import CHUNKS, PREFILL
from memfit.estimators.sizing.sized_model import SizedModel, error_bytes_of, for_phases, is_known


def peak_view(sized: SizedModel, formula: SizedModel, workload: Workload) -> SizedModel:
    """Return what has the peak of a workload by trace, of as few calls as the formula allows.

    A call is left out if, with the formula's error, it takes less than another.
    """
    if is_known(sized, workload) or sized.draft:
        return sized
    if formula.runtime_model.basis("workspace", workload)[0] != "derived":
        return sized
    low = lower_calls(formula, workload)
    return _of_higher_chunks(sized, formula, workload, low) or for_phases(sized, ALL_PHASES - low)


def _of_higher_chunks(
    sized: SizedModel, formula: SizedModel, workload: Workload, low: frozenset[CallPhase]
) -> SizedModel | None:
    """What has the peak without a chunk that takes less than the others by trace, if one does."""
    # The first is mostly kept from another run.
    chunks = _below(formula, workload, errors=1) & CHUNKS - {"first_chunk"} - low
    if not chunks:
        return None
    view = for_phases(sized, ALL_PHASES - low - chunks)
    try:
        traced = view.figures_for(workload).moment.nbytes
    except UnsupportedError:
        return None
    call_bytes = formula.figures_for(workload).moment.call_bytes
    most = max(call_bytes[call] for call in chunks) + error_bytes_of(formula, workload)
    is_traced = view.runtime_model.basis("workspace", workload)[0] == "traced"
    return view if is_traced and most < traced else None


def lower_calls(formula: SizedModel, workload: Workload) -> frozenset[CallPhase]:
    """Return the calls below the peak by more than the formula may be wrong for two of them."""
    return _below(formula, workload, errors=2)


def _below(formula: SizedModel, workload: Workload, *, errors: int) -> frozenset[CallPhase]:
    moment = formula.figures_for(workload).moment
    limit = moment.nbytes - errors * error_bytes_of(formula, workload)
    lower = frozenset[CallPhase]()
    if moment.decode_bytes is not None and moment.decode_bytes < limit:
        lower |= ALL_PHASES - PREFILL
    # Of prompts whose cache is quantised on the way the formula follows other chunks.
    if workload.kv_bits is None or not workload.quantized_kv_start:
        lower |= {call for call, nbytes in moment.call_bytes.items() if nbytes < limit}
    return lower


def call_over(
    formula: SizedModel, workload: Workload, is_over: Callable[[int], bool]
) -> CallPhase | None:
    """Return a call of the prompt whose need alone ``is_over``, the quickest to trace."""
    calls = formula.figures_for(workload).moment.call_bytes
    over = [
        call
        for call, nbytes in calls.items()
        if call in PREFILL and is_over(nbytes + formula.margin_bytes)
    ]
    # Where it can hold the peak, it is needed for the others too.
    if "first_chunk" in over and "first_chunk" not in lower_calls(formula, workload):
        return "first_chunk"
    return over[-1] if over else None
