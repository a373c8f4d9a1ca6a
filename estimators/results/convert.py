"""A plan of a conversion as data: renderers show it and compute nothing."""

from msgspec import UNSET, UnsetType

from memfit.estimators.results.advice import ConversionMemory
from memfit.estimators.results.estimate import DeviceSummary, Note
from memfit.estimators.results.result import Result


class ConvertPlan(Result, frozen=True, kw_only=True, tag="memfit.plan-convert/1"):
    """The result of ``memfit plan convert``."""

    model: str
    format: str
    """Bits and mode of the weights that are written."""
    mlx_lm_version: str
    device: DeviceSummary | UnsetType = UNSET
    """The machine; absent: any Mac."""
    conversion: ConversionMemory
    commands: tuple[str, ...]
    """To paste into a shell; empty where the conversion does not fit the machine."""
    notes: tuple[Note, ...] = ()
