"""The memory of training steps, by trace; each question is answered once."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.quantization import Quantization
from memfit.estimators.base.recipe import Recipe
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import ANY_MAC, Device
from memfit.estimators.mlx.kernels import has_nax
from memfit.estimators.mlx.versions import MlxVersions

if TYPE_CHECKING:
    from memfit.estimators.trace.kernel_stubs import TraceTarget
    from memfit.estimators.trace.traced_model import TracedModel
    from memfit.estimators.trace.training_peak import TrainingPeak


class TracedSteps:
    """One checkpoint on one device; classes and traces are kept."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: str, device: Device | None, versions: MlxVersions
    ) -> None:
        self._checkpoint, self._dtype = checkpoint, dtype
        self._machine, self._versions = device or ANY_MAC, versions
        self._built: dict[Quantization | None, TracedModel] = {}
        self._peaks: dict[tuple[Recipe, int, int | None, Quantization | None], TrainingPeak] = {}

    def peak(
        self,
        recipe: Recipe,
        tokens: int,
        *,
        validated: int | None = None,
        is_whole: bool = False,
        quantize: Quantization | None = None,
    ) -> "TrainingPeak":
        """Return the largest moments on batches of ``tokens``, and of a validation of others.

        Raises:
            UnsupportedError: when the class cannot be trained, or not traced.
        """
        from memfit.estimators.trace.training_peak import training_peak
        from memfit.estimators.trace.training_recorder import KINDS

        # The number of accumulated steps changes nothing from the third on.
        recipe = replace(
            recipe,
            max_seq_length=max(2, tokens),
            grad_accumulation_steps=min(KINDS, recipe.grad_accumulation_steps),
        )
        key = recipe, tokens, validated, quantize
        if key not in self._peaks or (is_whole and self._peaks[key].first is None):
            run = self.built(quantize).record_training(
                recipe,
                tokens,
                self._target(),
                validated=validated,
                is_whole=is_whole,
            )
            self._peaks[key] = training_peak(run, self._machine, self._versions.mlx)
        return self._peaks[key]

    def run_bytes(self, recipe: Recipe, quantize: Quantization | None) -> int:
        """Return the most that a run takes on batches of the longest sequences, load included.

        Raises:
            UnsupportedError: as `peak`.
        """
        tokens = recipe.max_seq_length
        peak = self.peak(recipe, tokens, validated=tokens, quantize=quantize)
        moments = [moment.nbytes for moment in (peak.later, peak.validation) if moment]
        return max(self.load_bytes(quantize), *moments)

    def load_bytes(self, quantize: Quantization | None) -> int:
        """Return the peak of the load, 0 where the weights are kept as they are in files."""
        from memfit.estimators.trace.peak import load_peak

        try:
            call = self.built(quantize).load(self._target())
        except UnsupportedError:
            return 0
        return load_peak(call, self._machine, self._versions.mlx) if call else 0

    def built(self, quantize: Quantization | None) -> "TracedModel":
        """Return the class."""
        from memfit.estimators.trace.traced_model import TracedModel

        if quantize not in self._built:
            self._built[quantize] = TracedModel(
                self._checkpoint.config,
                self._machine.backend,
                name=self._checkpoint.config_name,
                dtype=self._dtype,
                tensors=self._checkpoint.tensors if quantize is None else None,
                quantize=quantize,
            )
        return self._built[quantize]

    def _target(self) -> "TraceTarget":
        from memfit.estimators.trace.kernel_stubs import TraceTarget

        machine = self._machine
        return TraceTarget(
            backend=machine.backend,
            nax=has_nax(machine),
            compute_capability=machine.generation if machine.backend == "cuda" else None,
            versions=self._versions,
        )


def most_fitting(
    values: Sequence[int],
    needed: Callable[[int], int],
    limit: int,
    known: Sequence[int],
    *,
    floor: int = 0,
) -> int:
    """Return the largest of ascending values with a need within the limit, 0 when none has.

    The need grows with the value. It is computed for few values: those that are ``known`` or their
    neighbours, then where the line through two of them reaches the limit. ``floor`` is about the
    need of nothing.

    >>> most_fitting(range(1, 1000), lambda value: value * value, 5000, [10])
    70
    """
    points = {0: floor}
    low, high = 0, len(values)
    guesses = [min(range(high), key=lambda index: abs(values[index] - value)) for value in known]
    count = 0
    while low < high:
        # Every third time the middle: a need with steps would come near from one side only.
        guess = (low + high) // 2 if count % 3 == 2 else _reached(values, points, limit)
        guess = max(low, min(high - 1, guesses.pop(0) if guesses else guess))
        points[values[guess]] = needed(values[guess])
        if points[values[guess]] <= limit:
            low = guess + 1
        else:
            high = guess
        count += not guesses
    return values[low - 1] if low else 0


def _reached(values: Sequence[int], points: Mapping[int, int], limit: int) -> int:
    """Return the index of about the last value with a need within the limit."""
    # The two points around the limit, or the two next to it.
    near = sorted(points, key=lambda value: (abs(points[value] - limit), value))[:2]
    low, high = min(near), max(near)
    rise = points[high] - points[low] if len(near) > 1 else 0
    if rise <= 0:
        return len(values) // 2
    return bisect_right(values, low + (limit - points[low]) * (high - low) // rise) - 1
