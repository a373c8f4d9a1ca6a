"""A model as its layers in order, with what stands before and after them."""

from collections import Counter
from collections.abc import Iterator

from memfit.estimators.arch.modules import Module, Modules, Part
from memfit.estimators.arch.specs import FeedForward, Mixer
from memfit.estimators.base.records import record


@record(frozen=True, slots=True)
class Layer:
    """One decoder layer; a layer may have several mixers (Falcon-H1) or none (Nemotron-H MLPs)."""

    mixers: tuple[Mixer, ...]
    feed_forward: FeedForward | None
    modules: Modules  # paths relative to the layer


@record(frozen=True, slots=True, kw_only=True)
class Model:
    """An architecture with every size put in.

    ``makes_own_cache`` is True when the mlx-lm class has ``make_cache``; ``max_kv_size`` then
    has no effect. ``kv_quantizable`` is False where its attention cannot read a quantised cache.
    ``notes`` are assumptions the reader of a figure must know.
    """

    model_type: str
    hidden_size: int
    vocab_size: int
    layers: tuple[Layer, ...]
    modules: Modules  # outside the layers, full paths
    layers_path: str = "model.layers"
    makes_own_cache: bool = False
    max_context: int | None = None
    kv_quantizable: bool = True
    dtype: str = "BF16"
    notes: tuple[str, ...] = ()

    def all_modules(self) -> Iterator[tuple[str, Module]]:
        """Yield every module with its full path, as the mlx-lm class names it."""
        for module in self.modules:
            yield module.path, module
        for index, layer in enumerate(self.layers):
            prefix = f"{self.layers_path}.{index}."
            for module in layer.modules:
                yield prefix + module.path, module

    @property
    def tied_head(self) -> bool:
        """Whether the head reads the embedding's matrix."""
        return all(module.part is not Part.HEAD for module in self.modules)

    def layer_kinds(self) -> dict[str, int]:
        """Return how many mixers of each kind there are, in order of appearance."""
        return dict(Counter(mixer.kind for layer in self.layers for mixer in layer.mixers))
