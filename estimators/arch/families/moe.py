"""Decoders of grouped-query attention with experts: one description for all, by their traits.

Source: the mlx-lm module of the model type's name. The defaults are what most of them share.
"""

from collections.abc import Callable, Mapping

from msgspec import field
from msgspec.structs import replace

from memfit.estimators.arch import blocks
from memfit.estimators.arch.families.dense import (
    Dense,
    Flag,
    LayerSizes,
    decoder_of,
    dense_mlp,
    is_on,
    sizes_of,
)
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Model, Modules, Part, array, linear, under
from memfit.estimators.arch.specs import MixtureOfExperts


class MoE(Dense, frozen=True, kw_only=True):
    """A class that has experts in some layers or all, and is like a dense one otherwise."""

    experts: str
    """The key of their number."""
    top_k: str = "num_experts_per_tok"
    expert_width: str = "intermediate_size"
    """The key of the width of one expert."""
    shared_width: str | None = None
    """The key of the width of the shared expert."""
    shared_count: str | None = None
    """The key of how many shared experts there are, each as wide as a routed one."""
    routed_bias: bool = True
    """Whether routed experts have the bias of the MLPs too."""
    block: str = "mlp"
    router: str = "gate"
    router_is_linear: bool = True
    correction: str | None = None
    """The path of the router's correction of its scores."""
    float32_correction: bool = True
    """Whether the correction stays float32 for any type of the model."""
    float32_scores: bool = False
    """As `MixtureOfExperts.float32_scores`."""
    float32_router: bool = False
    """As `MixtureOfExperts.float32_router`."""
    dense: Callable[[Fields, int], frozenset[int]] = lambda fields, count: frozenset()
    """Which layers are dense."""
    tied: Flag = False
    forced_values: Mapping[str, int | bool] = field(default_factory=dict)
    """What it takes for any value in the config."""
    zero_is_absent: tuple[str, ...] = ()
    """Keys where a 0 is no size."""

    def describe(self, fields: Fields) -> Model:
        """Return the model of a config."""
        sizes, count = sizes_of(fields, self), fields.layers()
        dense_layers = self.dense(fields, count)
        sparse = len(dense_layers & set(range(count))) < count
        dense = dense_mlp(fields, self, sizes)
        block = _experts(fields, self, sizes) if sparse else dense
        for key, value in self.forced_values.items():
            fields.expect(key, value)
        fields.ignore("sliding_window", self.experts, self.top_k, self.expert_width, *self.ignored)
        feed_forwards = [dense if index in dense_layers else block for index in range(count)]
        return decoder_of(fields, self, sizes, (None,) * count, feed_forwards)


def _experts(fields: Fields, traits: MoE, sizes: LayerSizes) -> blocks.FeedForwardBlock:
    bias = is_on(fields, traits.mlp_bias)
    width = _size(fields, traits, traits.expert_width) or sizes.width
    shared = _size(fields, traits, traits.shared_width) if traits.shared_width else 0
    if traits.shared_count and not fields.null(traits.shared_count):
        shared = width * _size(fields, traits, traits.shared_count)
    spec = blocks.mixture(fields, traits.experts, traits.top_k, width=width, shared_width=shared)
    spec = replace(spec, float32_scores=traits.float32_scores, float32_router=traits.float32_router)
    modules = blocks.expert_modules(
        spec,
        sizes.hidden,
        _router(traits, spec, sizes.hidden),
        stack=traits.stack,
        shared="shared_expert" if traits.shared_width else "shared_experts",
        bias=bias,
        routed_bias=bias and traits.routed_bias,
    )
    return spec, under(traits.block, modules)


def _size(fields: Fields, traits: MoE, key: str) -> int:
    return fields.count(key, least=0 if key in traits.zero_is_absent else 1)


def _router(traits: MoE, spec: MixtureOfExperts, hidden: int) -> Modules:
    modules: Modules = (linear(traits.router, hidden, spec.experts, Part.ROUTER),)
    if not traits.router_is_linear:
        modules = (array(traits.router, (spec.experts, hidden), Part.ROUTER),)
    if traits.correction:
        modules += (
            array(
                traits.correction, (spec.experts,), Part.ROUTER, float32=traits.float32_correction
            ),
        )
    if traits.shared_width:
        modules += (linear("shared_expert_gate", hidden, 1, Part.SHARED_EXPERTS),)
    return modules
