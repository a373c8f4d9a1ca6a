"""The memory of training steps, by trace; each question is answered once."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Recipe
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import ANY_MAC, Device
from memfit.estimators.mlx.kernels import has_nax
from memfit.estimators.mlx.versions import MlxVersions

if TYPE_CHECKING:
    from memfit.estimators.trace.kernel_stubs import TraceTarget
    from memfit.estimators.trace.traced_model import TracedModel
    from memfit.estimators.trace.training_peak import LoopGrowth, TrainingPeak
    from memfit.estimators.trace.training_recorder import Training

# Iterations of a loop over tokens that is traced in part, and of all loops of a step about.
_FEWEST, _MOST, _LOOPS = 8, 48, 320


class TracedSteps:
    """One checkpoint on one device; classes and traces are kept."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: str, device: Device | None, versions: MlxVersions
    ) -> None:
        self._checkpoint, self._dtype = checkpoint, dtype
        self._machine, self._versions = device or ANY_MAC, versions
        self._loads: dict[Quantization | None, int] = {}
        self._built: dict[Quantization | None, TracedModel] = {}
        self._peaks: dict[tuple[Recipe, int, int | None, Quantization | None], TrainingPeak] = {}

    def peak(
        self,
        recipe: Recipe,
        tokens: int,
        *,
        validated: int | None = None,
        is_whole: bool = True,
        quantize: Quantization | None = None,
    ) -> "TrainingPeak":
        """Return the largest moments on batches of ``tokens``, and of a validation of others.

        Those of the first step are there if it ``is_whole``.

        Raises:
            UnsupportedError: when the class cannot be trained, or not traced.
        """
        from memfit.estimators.trace.recording import TooLargeError
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
            record = partial(
                self.built(quantize).record_training,
                recipe,
                tokens,
                self._target(),
                validated=validated,
            )
            few = self._few(recipe, quantize)
            try:
                # From here on the two short ones take less time.
                run, growth = record(is_whole=is_whole, longest_loop=4 * few), None
            except TooLargeError:
                run, growth = self._continued(record, few, tokens)
            self._peaks[key] = training_peak(run, self._machine, self._versions.mlx, growth)
        return self._peaks[key]

    def _few(self, recipe: Recipe, quantize: Quantization | None) -> int:
        """Return of how many tokens a loop is traced where it is not traced whole."""
        layers = recipe.num_layers if recipe.num_layers > 0 else self.built(quantize).layers
        # Checkpointed, the loops run once more.
        return max(_FEWEST, min(_MOST, _LOOPS // (layers * (1 + recipe.grad_checkpoint))))

    def _continued(
        self, record: "Callable[..., Training]", few: int, tokens: int
    ) -> "tuple[Training, LoopGrowth]":
        """Return a run with loops over twice as many tokens, and what it lacks."""
        from memfit.estimators.trace.training_peak import LoopGrowth

        shorter, longer = (record(iterations=count) for count in (few, 2 * few))
        lacking = max(0, tokens - 1 - 2 * few)
        growth = LoopGrowth(shorter, self._machine, self._versions.mlx, added=few, lacking=lacking)
        return longer, growth

    def run_bytes(self, recipe: Recipe, quantize: Quantization | None) -> int:
        """Return the most that a run takes on batches of the longest sequences, load included.

        Raises:
            UnsupportedError: as `peak`.
        """
        tokens = recipe.max_seq_length
        peak = self.peak(recipe, tokens, validated=tokens, quantize=quantize)
        return max(self.load_bytes(quantize), *(moment.nbytes for moment in peak.moments))

    def load_bytes(self, quantize: Quantization | None) -> int:
        """Return the peak of the load, 0 where the weights are kept as they are in files."""
        from memfit.estimators.trace.peak import load_peak

        if quantize not in self._loads:
            call = None
            with suppress(UnsupportedError):
                call = self.built(quantize).load(self._target())
            load = load_peak(call, self._machine, self._versions.mlx) if call else 0
            self._loads[quantize] = load
        return self._loads[quantize]

    def built(self, quantize: Quantization | None) -> "TracedModel":
        """Return the class."""
        from memfit.estimators.trace.traced_model import TracedModel

        if quantize not in self._built:
            self._built[quantize] = TracedModel(
                self._checkpoint.config,
                self._machine.backend,
                name=self._checkpoint.config_name,
                dtype=self._dtype,
                tensors=self._checkpoint.tensors,
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
