"""mlx-vlm's class for a config, built once for many prompts, with images or without."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from memfit.estimators.arch.model import Model
from memfit.estimators.base.quantization import Quantization
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Tensor
from memfit.estimators.images.plan import ImagePlan
from memfit.estimators.machine.device import Backend
from memfit.estimators.trace.class_description import describe, first_call, watching
from memfit.estimators.trace.graph_format import Call
from memfit.estimators.trace.isolation import tracing
from memfit.estimators.trace.kernel_stubs import TraceTarget, library_for
from memfit.estimators.trace.leaves import Modules
from memfit.estimators.trace.libraries import vision_versions
from memfit.estimators.trace.load_recorder import record_load
from memfit.estimators.trace.model_builder import arrays_of, class_errors, settings_of
from memfit.estimators.trace.recording import GraphError
from memfit.estimators.trace.unconverted import to_convert
from memfit.estimators.trace.vision_builder import (
    build_vision,
    loaded,
    mlx_vlm_class,
    unread_format,
)
from memfit.estimators.trace.vision_recorder import VisionRun, record_vision

_FEW_TOKENS = Workload(prompt_tokens=64)
_NO_IMAGES = ImagePlan((), ())


class TracedVisionModel:
    """mlx-vlm's class for a config, loaded from ``tensors`` or, without them, cast to ``dtype``.

    ``name`` is the name of the config in messages. ``quantize`` then converts it.

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
        quantize: Quantization | None = None,
    ) -> None:
        if quantize:
            config, tensors = to_convert(config, tensors)
        self._config, self._backend, self._name, self._dtype = config, backend, name, dtype
        self.unread_format = None if tensors is not None else unread_format(config)
        """The quantisation method that the config declares and the weights are not sized in."""
        self.versions = vision_versions()
        """The installed versions of MLX and mlx-vlm."""
        with self._tracing():
            from mlx.utils import tree_flatten

            tensors = None if tensors is None else list(tensors)
            # What a conversion has written is loaded as it is.
            self._tensors = None if quantize else tensors
            arrays = None if tensors is None else arrays_of(tensors)
            self._model = build_vision(
                library_for(backend), config, name, dtype=dtype, arrays=arrays, quantize=quantize
            )
            self._modules = Modules(self._model)
            flat: Any = tree_flatten(self._model.parameters())
            # A head may be the array of the embedding.
            each = {id(array): (path, array.nbytes) for path, array in flat}
            self.weights: Mapping[str, int] = dict(each.values())
            """Bytes of each parameter by path, of one array once."""

    def load(self, target: TraceTarget) -> Call | None:
        """Return the load of the tensors, None without headers and for a conversion.

        Raises:
            GraphError: when its graph cannot be recorded.
        """
        if self._tensors is None:
            return None
        with self._tracing():
            utils = library_for(self._backend).load("mlx_vlm.utils")
            settings = settings_of(utils, self._config)
            return record_load(partial(loaded, utils, settings), self._tensors, target)

    def describe(self) -> Model:
        """Return the description of a model that was built unquantised.

        Raises:
            UnsupportedError: also, for a cache or experts that are not described.
        """
        with self._tracing():
            load = library_for(self._backend).load
            caches = self._caches(_FEW_TOKENS)
            with watching(load("mlx_vlm.models.switch_layers")) as seen:
                self._recorded(_NO_IMAGES, _FEW_TOKENS, TraceTarget(backend=self._backend), caches)
            # The last call was on one token.
            first = first_call(self._model, caches, seen, 1)
            of = mlx_vlm_class(load("mlx_vlm.utils"), self._model)
            model_type = str(self._config["model_type"])
            return describe(of, first, model_type=model_type, dtype=self._dtype)

    def record(self, plan: ImagePlan, workload: Workload, target: TraceTarget) -> VisionRun:
        """Return the run of a prompt until its second token.

        Raises:
            GraphError: when its graph cannot be recorded.
        """
        with self._tracing():
            return self._recorded(plan, workload, target, self._caches(workload))

    def _caches(self, workload: Workload) -> list[Any]:
        cache = library_for(self._backend).load("mlx_vlm.models.cache")
        made: list[Any] = cache.make_prompt_cache(self._model.language_model, workload.max_kv_size)
        return made

    def _recorded(
        self, plan: ImagePlan, workload: Workload, target: TraceTarget, caches: list[Any]
    ) -> VisionRun:
        try:
            return record_vision(self._model, self._modules, plan, workload, target, caches)
        except GraphError as error:
            raise GraphError(f"{self._name}: {self._config['model_type']}: {error}") from None
        finally:
            self._modules.restore()

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        with tracing(), class_errors(self._name, self._config, "mlx-vlm"):
            yield
