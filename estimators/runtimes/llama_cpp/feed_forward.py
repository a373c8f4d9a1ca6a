"""The operations of feed-forward blocks, as llama.cpp puts them into its graph.

Source: src/llama-graph.cpp, build_ffn and build_moe_ffn (commit 0c1e57098).
"""

from memfit.estimators.arch.specs import DenseMLP, FeedForward, MixtureOfExperts
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.runtimes.llama_cpp.builder import Builder
from memfit.estimators.runtimes.llama_cpp.ggml import Tensor

# llama-graph.cpp, weight_before_ffn: their experts' inputs are scaled, not what they return.
_WEIGHTED_FIRST = ("llama4", "llama4_text")


def feed(to: Builder, spec: FeedForward, normed: Tensor) -> Tensor:
    """Add a feed-forward block."""
    match spec:
        case MixtureOfExperts():
            total = _experts(to, spec, normed)
            # GroveMoE has a second mixture, of no larger experts (grovemoe.cpp).
            if "ffn_up_chexps.weight" in to.weights.largest:
                total = to.over(total, _experts(to, spec, normed))
            return total
        case DenseMLP():
            return _dense(to, "", spec.intermediate, normed, gated=spec.gated)
        case _:
            assert_never(spec)


def _dense(to: Builder, suffix: str, inner: int, normed: Tensor, *, gated: bool) -> Tensor:
    if gated and to.weights.joins_gate(suffix):
        active = to.op(inner, to.product(f"ffn_up{suffix}", normed, 2 * inner))
    elif gated:
        gate = to.product(f"ffn_gate{suffix}", normed, inner)
        active = to.op(inner, gate, to.product(f"ffn_up{suffix}", normed, inner))
    else:
        active = to.over(to.product(f"ffn_up{suffix}", normed, inner))
    return to.product(f"ffn_down{suffix}", active, to.hidden)


def _experts(to: Builder, spec: MixtureOfExperts, normed: Tensor) -> Tensor:
    logits = to.product("ffn_gate_inp", normed, spec.experts)
    scores = to.over(logits)
    picked = to.op(spec.experts, scores)
    shares = to.over(to.op(spec.top_k, to.view(scores), picked))
    to.graph.expand(shares)
    width, inner = spec.latent_dim or to.hidden, spec.intermediate
    routed = to.view(normed)
    if to.model.model_type in _WEIGHTED_FIRST:
        routed = to.over(to.op(spec.top_k * width, routed), shares)

    def product(name: str, tensor: Tensor, inputs: int, outputs: int) -> Tensor:
        elements = spec.experts * inputs * outputs
        place = to.where(f"ffn_{name}_exps", to.experts_place)
        weight = to.weight(f"ffn_{name}_exps", elements, place)
        nbytes = to.nbytes(spec.top_k * outputs)
        return to.placed(to.graph.matrix(nbytes, weight, tensor, picked), place)

    if spec.gated and to.weights.joins_gate("_exps"):
        active = to.op(spec.top_k * inner, product("gate_up", routed, width, 2 * inner))
    elif spec.gated:
        gate = product("gate", routed, width, inner)
        active = to.op(spec.top_k * inner, gate, product("up", routed, width, inner))
    else:
        active = to.over(product("up", routed, width, inner))
    each = to.over(product("down", active, inner, width), shares)
    to.graph.expand(each)
    views = to.view(each, width), to.view(each, width)
    total = to.op(width, *views[: min(spec.top_k, 2)])
    if spec.top_k > 2:  # as often as there are experts, in the same room
        total = to.over(total, views[0])
    to.graph.expand(total)
    if spec.shared_intermediate:
        shared = _dense(to, "_shexp", spec.shared_intermediate, normed, gated=spec.gated)
        total = to.over(total, shared)
    return total
