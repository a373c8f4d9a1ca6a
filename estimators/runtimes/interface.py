"""A runtime's rules: what a model with its weights takes at a workload; here those of mlx-lm."""

from typing import Protocol

from memfit.estimators.arch.model import Model
from memfit.estimators.base.records import record
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Backend, Device
from memfit.estimators.mlx.allocator import allocated
from memfit.estimators.mlx.kv_cache import KVCache, kv_cache
from memfit.estimators.mlx.recurrent_state import state_bytes
from memfit.estimators.results.estimate import Basis
from memfit.estimators.runtimes.registry import MLX_LM
from memfit.estimators.weights.footprint import WeightFootprint
from memfit.estimators.workspace import ERROR_PERCENT, PeakMoment, peak


@record(frozen=True, slots=True)
class Figures:
    """What one workload takes; ``moment`` is its largest moment."""

    kv: KVCache
    ssm_bytes: int
    moment: PeakMoment


class RuntimeModel(Protocol):
    """A runtime's rules. ``workspace_basis`` says how far its workspace is to be trusted."""

    @property
    def runtime(self) -> str:
        """The runtime's name."""

    @property
    def workspace_basis(self) -> tuple[Basis, int]:
        """The basis, and by how many percent a derived figure has been wrong."""

    def resident_bytes(self, footprint: WeightFootprint, backend: Backend) -> int:
        """Return the bytes of the weights as the runtime lays them out."""

    def figures(
        self, model: Model, footprint: WeightFootprint, workload: Workload, device: Device | None
    ) -> Figures:
        """Return what a workload takes.

        Raises:
            UnsupportedError: when the runtime cannot run it.
        """


@record(frozen=True, slots=True)
class MlxEngine:
    """mlx-lm: caches grow with the tokens, the workspace follows MLX's scheduler."""

    runtime: str = MLX_LM
    workspace_basis: tuple[Basis, int] = ("derived", ERROR_PERCENT)

    def resident_bytes(self, footprint: WeightFootprint, backend: Backend) -> int:
        """Return the bytes as the backend's allocator rounds them."""
        return sum(count * allocated(size, backend) for size, count in footprint.sizes.items())

    def figures(
        self, model: Model, footprint: WeightFootprint, workload: Workload, device: Device | None
    ) -> Figures:
        """Return what a workload takes, e.g. not KV bits on a rotating cache."""
        moment = peak(
            model,
            workload,
            resident_bytes=self.resident_bytes(footprint, device.backend if device else "metal"),
            plan=footprint.plan,
            device=device,
        )
        return Figures(kv_cache(model, workload), state_bytes(model, workload.batch), moment)


MLX = MlxEngine()
