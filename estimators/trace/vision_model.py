"""mlx-vlm's class for a config, built once for many prompts, with images or without."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from msgspec.structs import replace

from memfit.estimators.arch.model import Model
from memfit.estimators.base.ranks import Rank
from memfit.estimators.base.workload import Workload
from memfit.estimators.images.plan import ImagePlan
from memfit.estimators.trace.cache_stepper import PROMPT_LIMIT, leaves
from memfit.estimators.trace.class_description import describe, first_call, watching
from memfit.estimators.trace.declared_format import unread_by_mlx_vlm
from memfit.estimators.trace.graph_format import Call
from memfit.estimators.trace.kernel_stubs import TraceTarget, library_for
from memfit.estimators.trace.libraries import vision_versions
from memfit.estimators.trace.load_recorder import record_load
from memfit.estimators.trace.model_builder import loaded, settings_of
from memfit.estimators.trace.traced_model import FEW_TOKENS, BuiltClass
from memfit.estimators.trace.vision_builder import build_vision, mlx_vlm_class
from memfit.estimators.trace.vision_recorder import VisionRun, record_vision

_NO_IMAGES = ImagePlan((), ())
# Tokens up to which the last cache of a layer keeps the heads of a prompt that its latents give:
# glm5_next/language.py, _MAX_PROJECTED_PREFILL_TOKENS.
_PROJECTED = {"glm5_next": 32768}


class TracedVisionModel(BuiltClass):
    """mlx-vlm's class for a config, built once for many prompts."""

    library = "mlx-vlm"
    _unread_format = staticmethod(unread_by_mlx_vlm)
    _installed = staticmethod(vision_versions)

    def _build(self, arrays: dict[str, Any] | None, _: Rank | None) -> Any:
        return build_vision(
            library_for(self._backend),
            self._config,
            self._name,
            dtype=self._dtype,
            arrays=arrays,
            quantize=self._quantize,
        )

    def _inspect(self, _: Mapping[str, Any]) -> Mapping[str, int]:
        from mlx.utils import tree_flatten

        flat: Any = tree_flatten(self._model.parameters())
        # A head may be the array of the embedding: one array counts once.
        return dict({id(array): (path, array.nbytes) for path, array in flat}.values())

    def load(self, target: TraceTarget) -> Call | None:
        """Return the load of the tensors, None without headers and for a conversion.

        Raises:
            GraphError: when its graph cannot be recorded.
        """
        # What a conversion has written is loaded as it is.
        if self._tensors is None or self._quantize:
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
            caches = self._caches(FEW_TOKENS)
            # Enough tokens for a row of every cache that has one for several.
            groups = (getattr(cache, "ratio", 1) for cache in leaves(caches))
            few = replace(FEW_TOKENS, prompt_tokens=max(FEW_TOKENS.prompt_tokens, 2 * max(groups)))
            with watching(load("mlx_vlm.models.switch_layers")) as seen:
                self._recorded(_NO_IMAGES, few, TraceTarget(backend=self._backend), caches)
            # The last call was on one token.
            first = first_call(self._model, caches, seen, 1)
            of = mlx_vlm_class(load("mlx_vlm.utils"), self._model)
            return describe(of, first, model_type=self._model_type, dtype=self._dtype)

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
        if (limit := _PROJECTED.get(self._model_type)) is not None:
            for nested in (each.caches for each in made if hasattr(each, "caches")):
                setattr(nested[-1], PROMPT_LIMIT, limit)
        return made

    def _recorded(
        self, plan: ImagePlan, workload: Workload, target: TraceTarget, caches: list[Any]
    ) -> VisionRun:
        try:
            with self._named_errors():
                return record_vision(self._model, self._modules, plan, workload, target, caches)
        finally:
            self._modules.restore()
