"""What another version of mlx-lm or mlx-vlm changes for models."""

from msgspec import Struct

from memfit.estimators.base.units import Bytes, Count
from memfit.estimators.results.result import Result


class PeakChange(Struct, frozen=True, forbid_unknown_fields=True):
    """The peak of one prompt, in bytes; null where a version cannot run it."""

    prompt_tokens: Count
    old_bytes: Bytes | None
    new_bytes: Bytes | None

    def grows(self) -> bool:
        """Whether both are known, and the new one is higher."""
        known = self.old_bytes is not None and self.new_bytes is not None
        return known and (self.new_bytes or 0) > (self.old_bytes or 0)


class ModelChange(Struct, frozen=True, forbid_unknown_fields=True):
    """A model under both versions."""

    model: str
    peaks: tuple[PeakChange, ...]
    old_message: str | None
    """Why the old version has no figure."""
    new_message: str | None


CallShape = tuple[Count, Count]
"""The tokens of a call, and those that logits are made of."""


class LoopChange(Struct, frozen=True, forbid_unknown_fields=True):
    """The calls that generate_step makes for a prompt and three generated tokens."""

    prompt_tokens: Count
    old_calls: tuple[CallShape, ...]
    new_calls: tuple[CallShape, ...]


class LibraryDiff(Result, frozen=True, kw_only=True, tag="memfit.diff/1"):
    """The answer of ``memfit diff``."""

    package: str
    old_version: str
    new_version: str
    mlx_version: str
    device: str
    image: str | None
    models: tuple[ModelChange, ...]
    loops: tuple[LoopChange, ...]
    """Only prompts whose calls differ."""

    def grows(self) -> bool:
        """Whether a peak is higher under the new version."""
        return any(peak.grows() for model in self.models for peak in model.peaks)

    def undecided(self) -> tuple[str, ...]:
        """The models that the new version cannot run, or neither can."""
        return tuple(model.model for model in self.models if model.new_message is not None)

    def changes(self) -> bool:
        """Whether any figure or any loop differs."""
        peaks = (peak for model in self.models for peak in model.peaks)
        return bool(self.loops) or any(peak.old_bytes != peak.new_bytes for peak in peaks)
