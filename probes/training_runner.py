"""A few steps of mlx-lm's own trainer on the loaded model: the child's part."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from msgspec import Struct

from memfit.estimators.base.unfinished import unfinished_folder
from memfit.estimators.base.units import Bytes, Count
from memfit.estimators.base.workload import Recipe
from memfit.estimators.trace.libraries import Silent, changed
from memfit.estimators.trace.training_recorder import prepare
from memfit.probes.loading import memory_errors
from memfit.probes.model_runner import ModelRunner

_NEVER = 10**9


class TrainingRun(Struct, frozen=True, kw_only=True):
    """The largest moment of each part of a training run, by mx.get_peak_memory()."""

    validation_bytes: Bytes
    first_step_bytes: Bytes
    """Until the first update of the optimizer."""
    later_steps_bytes: Bytes
    steps: Count


class TrainingRunner(ModelRunner):
    """Trains one model with mlx-lm's own trainer."""

    def train(self, recipe: Recipe, tokens: int, updates: int) -> TrainingRun:
        """Train on batches of ``tokens`` tokens, for some updates after the first one.

        Raises:
            UnsupportedError: when mlx-lm cannot train the class.
            MachineError: when there is not enough memory.
        """
        import mlx.core as mx

        trainer = import_module("mlx_lm.tuner.trainer")
        model, first = self.model, recipe.grad_accumulation_steps
        peaks: list[int] = []

        def evaluated(threshold: int) -> None:
            peaks.append(mx.get_peak_memory())
            if mx.get_cache_memory() > threshold:
                mx.clear_cache()
            mx.reset_peak_memory()
            self.report({})  # a sign of life after each step

        def batches(*_: Any, loop: bool = False, **__: Any) -> Iterator[Any]:
            shape = recipe.batch_size, tokens
            while True:
                # Memory does not depend on the tokens.
                yield mx.ones(shape, mx.int32), mx.array([[0, tokens]] * recipe.batch_size)
                if not loop:
                    return

        with self.errors(), memory_errors(), unfinished_folder() as folder:
            optimizer = prepare(import_module, model, recipe)
            arguments = trainer.TrainingArgs(
                iters=first * (1 + updates),
                batch_size=recipe.batch_size,
                val_batches=1,
                steps_per_report=_NEVER,
                steps_per_eval=_NEVER,
                steps_per_save=_NEVER,
                adapter_file=f"{folder}/adapters.safetensors",
                grad_checkpoint=recipe.grad_checkpoint,
                grad_accumulation_steps=first,
            )
            mx.reset_peak_memory()
            with changed(trainer, {"_clear_cache": evaluated, "TrainUI": _Quiet}):
                data = [0] * recipe.batch_size
                trainer.train(model, optimizer, data, data, arguments, iterate_batches=batches)
        # The trainer validates before the first and before the last step.
        steps = [*peaks[1:-2], peaks[-1]]
        return TrainingRun(
            validation_bytes=max(peaks[0], peaks[-2]),
            first_step_bytes=max(steps[:first]),
            later_steps_bytes=max(steps[first:]),
            steps=len(steps),
        )


class _Quiet(Silent):
    """What shows a run of the trainer, without showing it."""

    def val_task(self, _: int) -> Any:
        """Return a context with a function that counts batches."""
        return _Counting()


class _Counting(Silent):
    def __enter__(self) -> Any:
        return lambda *_: None
