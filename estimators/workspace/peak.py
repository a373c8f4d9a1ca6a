"""The largest moment of a run by the formula: load, every chunk of prefill, decode.

The transient is derived, not fitted: each layer's operations are written down as mlx-lm's class
makes them, and follow MLX's scheduler. docs/accuracy.md compares it with measurements.
"""

from collections.abc import Sequence
from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.arch.model import Model
from memfit.estimators.base.workload import CallPhase, Workload
from memfit.estimators.machine.device import ANY_MAC, Device
from memfit.estimators.mlx.scheduler import BatchLimits
from memfit.estimators.mlx.versions import MlxVersions
from memfit.estimators.results.terms import PeakMoment
from memfit.estimators.weights.derived import QuantizationPlan
from memfit.estimators.workspace.call import BackendTraits
from memfit.estimators.workspace.moments import CallMoment, RunMoments
from memfit.estimators.workspace.prepared import PreparedModel, backend_traits, prepare
from memfit.estimators.workspace.schedule import formula_limits

ERROR_PERCENT = 25
"""How far the workspace may be off: docs/accuracy.md has the measurements."""


def peak(
    model: Model,
    workload: Workload,
    *,
    resident_bytes: int,
    plan: QuantizationPlan | None,
    device: Device | None,
    versions: MlxVersions = MlxVersions(),  # noqa: B008 - a tuple
    keeps_up: bool = False,
    has_decode: bool = True,
) -> PeakMoment:
    """Return the largest moment of a run with weights of ``resident_bytes``.

    What depends on the model alone is computed once for each (model, plan, device, versions). A
    GPU that ``keeps_up`` has run each batch of work when the next is given. Without ``has_decode``
    it ends with the chunks of the prompt.

    Raises:
        UnsupportedError: when MLX is older than the oldest kernels described.
    """
    prepared = prepared_model(model, plan, device, versions)
    if keeps_up and prepared.limits:
        prepared = prepared.on(prepared.traits, replace(prepared.limits, in_flight=0))
    run = RunMoments(prepared, workload, resident_bytes)
    moments = list(run.moments(has_decode=has_decode))
    best = max(moments, key=lambda moment: moment.nbytes)
    largest, name = max(
        (prepared.largest_weight, "weight"), *((m.largest, m.largest_name) for m in moments)
    )
    return PeakMoment(
        phase=best.phase,
        nbytes=best.nbytes,
        # The largest moment can be in a chunk, before the caches have their final size.
        workspace_bytes=max(0, best.nbytes - resident_bytes - run.caches.kept_bytes()),
        largest_buffer_bytes=largest,
        largest_buffer=name,
        explanation=(best.explanation,),
        # Loading comes before the first token, so it belongs to prefill.
        prefill_bytes=max(m.nbytes for m in moments if m.phase != "decode"),
        decode_bytes=max((m.nbytes for m in moments if m.phase == "decode"), default=None),
        call_bytes=_of_calls(moments),
    )


def _of_calls(moments: Sequence[CallMoment]) -> dict[CallPhase, int]:
    """The most in use during each call: a conversion may be above the chunk that it follows."""
    result: dict[CallPhase, int] = {}
    for moment in moments:
        if moment.call:
            result[moment.call] = max(moment.nbytes, result.get(moment.call, 0))
    return result


def prepared_model(
    model: Model,
    plan: QuantizationPlan | None,
    device: Device | None,
    versions: MlxVersions = MlxVersions(),  # noqa: B008 - a tuple
) -> PreparedModel:
    """Return what of a model on a device no workload changes; the same for the same objects."""
    device = device or ANY_MAC
    # By what the formula needs of the device: many Macs differ in their memory alone.
    traits, limits = backend_traits(device, versions), formula_limits(device)
    return _prepared(_Same(model), _Same(plan), traits, limits)


class _Same(Struct, eq=False):
    """A key that compares by identity: to hash a whole model costs more than a peak."""

    value: object

    def __hash__(self) -> int:
        # The key refers to the value, so no other object can get its id while the key exists.
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


# A grid has a plan for each number of bits, on a few kinds of GPU.
@lru_cache(maxsize=32)
def _prepared(
    model: _Same, plan: _Same, traits: BackendTraits, limits: BatchLimits | None
) -> PreparedModel:
    return _planned(model, plan).on(traits, limits)


@lru_cache(maxsize=8)
def _planned(model: _Same, plan: _Same) -> PreparedModel:
    assert isinstance(model.value, Model)
    packing = plan.value if isinstance(plan.value, QuantizationPlan) else None
    return prepare(model.value, ANY_MAC, versions=MlxVersions(), packing=packing)
