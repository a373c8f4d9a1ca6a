"""zinc's memory plan: fixed bytes and bytes a token, and the contexts that follow.

The counterparts of zinc's src/gpu/memory_plan.zig as described on 2026-06-12 that an answer needs,
under their own names in snake case, here, in ``requests.py`` and ``auto_context.py``. ``profile``
repeats that description, faults included: activations and cache in float32, cache and recurrent
state charged to every layer.
"""

from msgspec import Struct

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.specs import (
    Attention,
    DenseMLP,
    GatedDelta,
    LatentAttention,
    MixtureOfExperts,
    Recurrent,
    TracedMixer,
)
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import round_down
from memfit.estimators.runtimes.auto_context import RuntimeMemoryProfile

auto_context_floor_tokens = 4096
AUTO_CONTEXT_PERCENT = 85  # auto_context_utilization
AUTO_CONTEXT_STEP = 512  # auto_context_alignment_tokens
_FLOAT = 4


class ModelConfig(Struct, kw_only=True):
    """A model's dimensions as zinc normalises them; 0 where it has none of the kind."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    vocab_size: int
    context_length: int
    intermediate_dim: int = 0
    shared_expert_intermediate_dim: int = 0
    n_experts: int = 0
    n_experts_used: int = 0
    ssm_d_conv: int = 0
    ssm_d_inner: int = 0
    ssm_d_state: int = 0
    ssm_dt_rank: int = 0
    ssm_n_group: int = 0


def profile(config: ModelConfig) -> RuntimeMemoryProfile:
    """Return zinc's profile of a model: one token's buffers, states and cache in float32."""
    hidden, logits = _FLOAT * config.hidden_dim, _FLOAT * config.vocab_size
    queries = _FLOAT * config.n_heads * config.head_dim
    keys = _FLOAT * config.n_kv_heads * config.head_dim
    inter = config.intermediate_dim or 4 * config.hidden_dim
    shared = config.shared_expert_intermediate_dim or inter
    used = config.n_experts_used or 8
    conv = _conv_channels(config)
    widest = max(inter, shared, config.ssm_d_inner or inter, conv)
    router = _FLOAT * max(config.n_experts, 1)
    states = _state_bytes(config)
    return RuntimeMemoryProfile(
        fixed_device_local_bytes=6 * hidden
        + logits
        + queries
        + 2 * keys
        + max(2 * queries, _FLOAT * conv)
        + 3 * max(_FLOAT * widest, used * inter * _FLOAT)
        + max(hidden, used * hidden)
        + router
        + states,
        fixed_host_visible_bytes=logits
        + hidden
        + router
        + max(hidden, _FLOAT * config.ssm_d_inner)
        + used * 8,
        device_local_bytes_per_token=config.n_layers * 2 * keys,
        host_visible_bytes_per_token=4,
        gpu_ssm_bytes=states,
    )


def auto_context_tokens_for_device_budget(
    profile_value: RuntimeMemoryProfile,
    weights_bytes: int,
    device_budget_bytes: int,
    architectural_ceiling: int,
) -> int:
    """Return the context zinc chooses: 85 % of the budget, multiples of 512, 4096 at least.

    The floor holds even where it does not fit: ``fitting_context_tokens`` is the right answer.
    """
    fitting = fitting_context_tokens(
        profile_value, weights_bytes, device_budget_bytes, architectural_ceiling
    )
    return min(max(fitting, auto_context_floor_tokens), architectural_ceiling)


def fitting_context_tokens(
    profile_value: RuntimeMemoryProfile,
    weights_bytes: int,
    device_budget_bytes: int,
    architectural_ceiling: int,
) -> int:
    """Return the same without the floor: 0 where nothing fits."""
    budget_bytes = device_budget_bytes * AUTO_CONTEXT_PERCENT // 100
    most = profile_value.max_context_tokens_for_device_local_budget(
        weights_bytes, budget_bytes, architectural_ceiling
    )
    return round_down(most, AUTO_CONTEXT_STEP)


def model_config(model: Model) -> ModelConfig:
    """Return the config zinc would read of a model.

    Raises:
        UnsupportedError: for recurrent layers that zinc's plan has no names for.
    """
    config = ModelConfig(
        n_layers=len(model.layers),
        n_heads=0,
        n_kv_heads=0,
        head_dim=0,
        hidden_dim=model.hidden_size,
        vocab_size=model.vocab_size,
        context_length=model.max_context or 2**20,
    )
    for mixer in filter(lambda mixer: mixer.owns_cache, model.mixers()):
        match mixer:
            case Attention():
                config.n_heads, config.n_kv_heads = mixer.heads, mixer.kv_heads
                config.head_dim = max(mixer.key_dim, mixer.value_dim)
            case LatentAttention():
                config.n_heads = config.n_kv_heads = mixer.heads
                config.head_dim = mixer.nope_dim + mixer.rope_dim
            case GatedDelta():
                _add_delta(config, mixer)
            case Recurrent() | TracedMixer():
                raise UnsupportedError(
                    f"{model.model_type}: {mixer.kind} layers have no place in zinc's memory plan"
                )
            case _:
                assert_never(mixer)
    for layer in model.layers:
        _add_feed_forward(config, layer.feed_forward)
    return config


def _add_delta(config: ModelConfig, mixer: GatedDelta) -> None:
    config.ssm_d_conv, config.ssm_d_state = mixer.kernel, mixer.key_dim
    config.ssm_dt_rank, config.ssm_n_group = mixer.value_heads, mixer.key_heads
    config.ssm_d_inner = mixer.value_heads * mixer.value_dim


def _add_feed_forward(config: ModelConfig, block: DenseMLP | MixtureOfExperts | None) -> None:
    match block:
        case MixtureOfExperts():
            config.intermediate_dim, config.n_experts = block.intermediate, block.experts
            config.n_experts_used = block.top_k
            config.shared_expert_intermediate_dim = block.shared_intermediate
        case DenseMLP():
            if not config.n_experts:
                config.intermediate_dim = max(config.intermediate_dim, block.intermediate)
        case None:
            pass
        case _:
            assert_never(block)


def _conv_channels(config: ModelConfig) -> int:
    if not config.ssm_d_inner:
        return 0
    return config.ssm_d_inner + 2 * config.ssm_n_group * config.ssm_d_state


def _state_bytes(config: ModelConfig) -> int:
    """Convolution and recurrent states of every layer, as zinc counts them."""
    if not config.ssm_d_inner or not config.ssm_dt_rank:
        return 0
    head = config.ssm_d_inner // config.ssm_dt_rank
    conv = (config.ssm_d_conv - 1) * _conv_channels(config)
    return config.n_layers * _FLOAT * (conv + config.ssm_dt_rank * head * head)
