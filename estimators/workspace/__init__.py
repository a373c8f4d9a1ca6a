"""The transient memory of prefill and decode, and the peak it makes."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.modules import Module
from memfit.estimators.base.quantization import Quantization
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.versions import MLX_VERSION
from memfit.estimators.workspace.peak import PeakMoment, Workspace, prepare

__all__ = ["ERROR_PERCENT", "PeakMoment", "QuantizationPlan", "peak"]

# What the workspace is within: docs/accuracy.md has the measurements it was held against.
ERROR_PERCENT = 25
# Without a device: a Metal GPU of Max class.
_ANY_MAC = Device("any Mac", "metal", 0, 0, None, "flag", "s")


class QuantizationPlan(Protocol):
    """Says how each module is packed (components/weights, Plan)."""

    def quantization(self, path: str, module: Module) -> Quantization | None:
        """Return the format of a module's weight, None when it stays as it is."""


def peak(
    model: Model,
    workload: Workload,
    *,
    resident_bytes: int,
    plan: QuantizationPlan | None,
    device: Device | None,
) -> PeakMoment:
    """Return the largest moment of a run whose weights take ``resident_bytes``.

    What depends on the model alone is worked out once for each (model, plan, device).
    """
    workspace = _prepared(_Same(model), _Same(plan), device or _ANY_MAC)
    return workspace.peak(workload, weight_bytes=resident_bytes)


@dataclass(slots=True, eq=False)
class _Same:
    """A key that compares by identity: to hash a whole model costs more than a peak."""

    value: object

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


@lru_cache(maxsize=8)
def _prepared(model: _Same, plan: _Same, device: Device) -> Workspace:
    assert isinstance(model.value, Model)
    quantization = getattr(plan.value, "quantization", None)
    return prepare(model.value, device, mlx_version=MLX_VERSION, quantization=quantization)
