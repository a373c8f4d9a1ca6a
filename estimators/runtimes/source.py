"""What the figures of a model follow from: the one place that says it.

Programs that are recorded once and kept as data (`Recorded`) will be another member of the union.
"""

from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from msgspec import Struct

from memfit.estimators.results.terms import Method

if TYPE_CHECKING:
    from memfit.estimators.base.dtypes import Quantization
    from memfit.estimators.base.workload import Workload
    from memfit.estimators.machine.device import Device
    from memfit.estimators.mlx.versions import MlxVersions
    from memfit.estimators.results.terms import PeakMoment

MethodSetting = Literal["auto", "formula", "trace"]
"""How figures are to be computed: ``auto`` by the formulas where they describe the model."""


class Formula(Struct, frozen=True):
    """Formulas describe the model."""

    method: ClassVar[Method] = "formula"


class WorkspaceBetweenTraces(Protocol):
    """The workspace of a class between traced prompts (runtimes/by_class.py)."""

    def converted(self, quantize: "Quantization") -> "WorkspaceBetweenTraces":
        """Return the workspace of the class with its weights converted."""

    def peak(
        self,
        workload: "Workload",
        device: "Device | None",
        versions: "MlxVersions",
        kept_bytes: int,
    ) -> "PeakMoment":
        """Return the peak of a workload that keeps ``kept_bytes`` of weights, caches and states.

        Raises:
            UnsupportedError: when mlx-lm cannot run the workload, or its graphs are too large.
        """


class Interpolated(Struct, frozen=True, eq=False):
    """No formula describes the model: its workspace is between those of traced prompts."""

    workspace: WorkspaceBetweenTraces

    method: ClassVar[Method] = "formula"


class Traced(Struct, frozen=True):
    """The class of the model is run lazily for each workload."""

    method: ClassVar[Method] = "trace"


class Measured(Struct, frozen=True):
    """A run on the device was measured."""

    method: ClassVar[Method] = "measure"


Source = Formula | Interpolated | Traced | Measured
