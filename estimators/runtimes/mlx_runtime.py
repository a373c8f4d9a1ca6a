"""What all runtimes on MLX have: its allocator, and mlx-lm's function that loads a model."""

from collections.abc import Iterator

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.runtimes.facets import OnMlx
from memfit.estimators.runtimes.interface import RuntimeModel


class MlxRuntimeModel(RuntimeModel, OnMlx, frozen=True):
    """A model as a runtime on MLX runs it, which mlx-lm's own function loads (utils.py)."""

    @classmethod
    def loads(cls, checkpoint: Checkpoint) -> None:
        if checkpoint.source == "gguf":
            raise UnsupportedError(
                f"{checkpoint.id}: {cls.defaults.name} loads no GGUF file; size it for llama.cpp,"
                " or convert it first"
            )

    def resident_bytes(self) -> int:
        return self.subject.allocated_bytes

    def load_bytes(self) -> int:
        return self.resident_bytes()

    def refusal(self) -> str:
        """Return why mlx_lm/utils.py, load_model, does not load the checkpoint."""
        checkpoint = self.subject.checkpoint
        # Of an assumed type the class is not known, nor what it takes.
        if checkpoint.assumed_from:
            return ""
        return self._refused_files() or self.subject.footprint.refusal

    def _refused_files(self) -> str:
        checkpoint = self.subject.checkpoint
        if checkpoint.has_other_names:
            return "mlx-lm loads only model*.safetensors, and the weights are in other files"
        if checkpoint.config.get("model_file") is not None:
            return "model_file in the config: mlx-lm runs no code of a model unless it is trusted"
        return ""

    def _premises(self) -> Iterator[str]:
        yield from super()._premises()
        if self.subject.device is None:
            yield (
                "no device is named: the workspace follows MLX's rules for a Metal GPU of Max class"
            )

    def _allocation(self) -> Iterator[str]:
        yield from super()._allocation()
        yield f"the workspace follows the operations of {self._library()}'s class of this model"

    def _library(self) -> str:
        """Return the library with the class of the model."""
        return "mlx-lm"
