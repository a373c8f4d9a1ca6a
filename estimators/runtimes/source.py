"""What the figures of a model follow from: the one place that says it."""

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from msgspec import Struct

from memfit.estimators.results.terms import Method

if TYPE_CHECKING:
    from memfit.estimators.base.dtypes import Quantization
    from memfit.estimators.base.workload import Workload
    from memfit.estimators.machine.device import Device
    from memfit.estimators.mlx.versions import MlxVersions
    from memfit.estimators.results.terms import PeakMoment

TRACE_ERROR_PERCENT = 10
"""Of a workspace by a class's graphs; predicted against measured peaks: docs/accuracy.md."""

MethodSetting = Literal["auto", "formula", "trace"]
"""How figures are to be computed: ``auto`` by the formulas where they describe the model."""


class Formula(Struct, frozen=True):
    """Formulas describe the model."""

    method: ClassVar[Method] = "formula"


class ClassWorkspace(Protocol):
    """The workspace of a class that no formula describes."""

    def converted(self, quantize: "Quantization") -> "ClassWorkspace":
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

    workspace: ClassWorkspace
    """runtimes/by_class.py."""

    method: ClassVar[Method] = "formula"


class RecordedRuns(ClassWorkspace, Protocol):
    """The workspace of a class by its recorded graphs."""

    def converted(self, quantize: "Quantization") -> "RecordedRuns":
        """Return the workspace of the class with its weights converted."""

    def by_trace(self, model: Any) -> Any:
        """Return a runtime's model as the trace of its class."""


class Recorded(Struct, frozen=True, eq=False):
    """No formula describes the model: the graphs of its class are data of memfit."""

    workspace: RecordedRuns
    """runtimes/recorded.py."""

    method: ClassVar[Method] = "recorded"


class Traced(Struct, frozen=True):
    """The class of the model is run lazily for each workload."""

    method: ClassVar[Method] = "trace"


class Measured(Struct, frozen=True):
    """A run on the device was measured."""

    method: ClassVar[Method] = "measure"


Source = Formula | Interpolated | Recorded | Traced | Measured
