"""What the figures of a model follow from: the one place that says it.

Programs that are recorded once and kept as data (`Recorded`) will be another member of the union.
"""

from typing import TYPE_CHECKING, ClassVar, Literal

from msgspec import Struct

from memfit.estimators.results.terms import Method

if TYPE_CHECKING:
    from memfit.estimators.runtimes.by_class import TracedWorkspace

MethodSetting = Literal["auto", "formula", "trace"]
"""How figures are to be computed: ``auto`` by the formulas where they describe the model."""


class Formula(Struct, frozen=True):
    """Formulas describe the model."""

    method: ClassVar[Method] = "formula"


class Interpolated(Struct, frozen=True, eq=False):
    """No formula describes the model: its workspace is between those of traced prompts."""

    workspace: "TracedWorkspace"

    method: ClassVar[Method] = "formula"


class Traced(Struct, frozen=True):
    """The class of the model is run lazily for each workload."""

    method: ClassVar[Method] = "trace"


class Measured(Struct, frozen=True):
    """A run on the device was measured."""

    method: ClassVar[Method] = "measure"


Source = Formula | Interpolated | Traced | Measured
