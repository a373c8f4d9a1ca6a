"""mlx-vlm's class for a config, built once for many prompts with images."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Tensor
from memfit.estimators.images.plan import ImagePlan
from memfit.estimators.machine.device import Backend
from memfit.estimators.trace.isolation import tracing
from memfit.estimators.trace.kernel_stubs import TraceTarget, library_for
from memfit.estimators.trace.leaves import Modules
from memfit.estimators.trace.libraries import vision_versions
from memfit.estimators.trace.model_builder import arrays_of, class_errors
from memfit.estimators.trace.recording import GraphError
from memfit.estimators.trace.vision_builder import build_vision
from memfit.estimators.trace.vision_recorder import VisionRun, record_vision


class TracedVisionModel:
    """mlx-vlm's class for a config, as mlx-vlm loads ``tensors`` or, without them, converts it.

    ``name`` is the name of the config in messages.

    Raises:
        MachineError: when MLX, mlx-lm or mlx-vlm is not installed.
        UnsupportedError: when mlx-vlm has no class for the config, or the class fails on it.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        backend: Backend,
        *,
        name: str = "config.json",
        dtype: str = "BF16",
        tensors: Iterable[Tensor] | None = None,
    ) -> None:
        self._config, self._backend, self._name = config, backend, name
        self.versions = vision_versions()
        """The installed versions of MLX and mlx-vlm."""
        with self._tracing():
            from mlx.utils import tree_flatten

            arrays = None if tensors is None else arrays_of(tensors)
            self._model = build_vision(
                library_for(backend), config, name, dtype=dtype, arrays=arrays
            )
            self._modules = Modules(self._model)
            flat: Any = tree_flatten(self._model.parameters())
            self.weights: Mapping[str, int] = {path: array.nbytes for path, array in flat}
            """Bytes of each parameter by path."""

    def record(self, plan: ImagePlan, workload: Workload, target: TraceTarget) -> VisionRun:
        """Return the run of a prompt with images until its second token.

        Raises:
            GraphError: when its graph cannot be recorded.
        """
        with self._tracing():
            try:
                return record_vision(self._model, self._modules, plan, workload, target)
            except GraphError as error:
                raise GraphError(f"{self._name}: {self._config['model_type']}: {error}") from None
            finally:
                self._modules.restore()

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        with tracing(), class_errors(self._name, self._config, "mlx-vlm"):
            yield
