"""A model: its layers in order, and what is before and after them."""

from collections import Counter
from collections.abc import Iterator
from functools import cached_property

from msgspec import Struct

from memfit.estimators.arch.modules import Module, Modules, Part
from memfit.estimators.arch.specs import (
    DenseMLP,
    FeedForward,
    KVBuffer,
    Mixer,
    MixtureOfExperts,
    StateBuffer,
)
from memfit.estimators.base.dispatch import assert_never


class Layer(Struct, frozen=True):
    """One decoder layer; a layer may have several mixers (Falcon-H1) or none (Nemotron-H MLPs)."""

    mixers: tuple[Mixer, ...]
    feed_forward: FeedForward | None
    modules: Modules
    """Its parameters; paths are relative to the layer."""
    mixer_paths: tuple[str, ...] = ()
    """The path under which each mixer has its modules, where there are several mixers."""
    streams: int = 1
    """Hidden states carried side by side (Gemma 3n's alternating updates)."""
    norms_after: bool = False
    """Whether its two norms are of what its blocks make, not of what they read (OLMo 2)."""

    @property
    def experts(self) -> MixtureOfExperts | None:
        """Its mixture of experts, None where it has none."""
        match self.feed_forward:
            case MixtureOfExperts():
                return self.feed_forward
            case DenseMLP() | None:
                return None
            case _:
                assert_never(self.feed_forward)


class Model(Struct, frozen=True, kw_only=True, dict=True):
    """An architecture with every size filled in."""

    model_type: str = ""
    """That of the config, which is known where the class's row is looked up."""
    hidden_size: int
    vocab_size: int
    layers: tuple[Layer, ...]
    modules: Modules
    """Parameters outside the layers, with full paths."""
    layers_path: str = "model.layers"
    first_layer: int = 0
    """The number of the first of ``layers``: above 0 in the second part of a pipeline."""
    makes_own_cache: bool = False
    """Whether the mlx-lm class has ``make_cache``; ``max_kv_size`` then has no effect."""
    max_context: int | None = None
    attention_widths: frozenset[tuple[int, int]] = frozenset()
    """Of keys and values that the attention of a traced class is called with in prefill."""
    kv_quantizable: bool = True
    """False where its attention cannot read a quantised cache."""
    dtype: str = "BF16"
    deepstack_layers: int = 0
    """Layers, from the first, that add an input of their own: features of images."""
    notes: tuple[str, ...] = ()
    """Assumptions that the reader of a figure must know."""

    def all_modules(self) -> Iterator[tuple[str, Module]]:
        """Yield every module with its full path, as the mlx-lm class names it."""
        for module in self.modules:
            yield module.path, module
        for index, layer in enumerate(self.layers, self.first_layer):
            prefix = f"{self.layers_path}.{index}."
            for module in layer.modules:
                yield prefix + module.path, module

    @cached_property
    def module_paths(self) -> dict[Module, list[str]]:
        """The full paths of each kind of module: most layers have equal ones."""
        paths: dict[Module, list[str]] = {}
        for path, module in self.all_modules():
            paths.setdefault(module, []).append(path)
        return paths

    @property
    def tied_head(self) -> bool:
        """Whether the head reads the embedding's matrix."""
        return all(module.part is not Part.HEAD for module in self.modules)

    def mixers(self) -> Iterator[Mixer]:
        """Yield the mixers of all layers in order."""
        for layer in self.layers:
            yield from layer.mixers

    def kv_buffers(self) -> Iterator[KVBuffer]:
        """Yield the buffers that layers own, in order."""
        for mixer in self.mixers():
            if mixer.owns_cache:
                yield from mixer.kv_buffers()

    @cached_property
    def kv_buffer_counts(self) -> Counter[KVBuffer]:
        """How many there are of each buffer, in order of appearance: many layers are equal."""
        return Counter(self.kv_buffers())

    def states(self) -> Iterator[StateBuffer]:
        """Yield the recurrent and convolution states of all layers in order."""
        for mixer in self.mixers():
            yield from mixer.states()

    @cached_property
    def state_counts(self) -> Counter[StateBuffer]:
        """How many there are of each state, in order of appearance."""
        return Counter(self.states())

    def experts(self) -> dict[int, MixtureOfExperts]:
        """Return the mixtures of experts by the number of their layer."""
        numbered = enumerate(self.layers, self.first_layer)
        found = ((index, layer.experts) for index, layer in numbered)
        return {index: experts for index, experts in found if experts}

    def layer_kinds(self) -> dict[str, int]:
        """Return how many mixers of each kind there are, in order of appearance."""
        return dict(Counter(mixer.kind for mixer in self.mixers()))
