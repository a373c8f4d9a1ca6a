"""A layer as the one kind that a caller handles, None for every other kind."""

from memfit.estimators.arch.specs import (
    Attention,
    DenseMLP,
    FeedForward,
    GatedDelta,
    LatentAttention,
    Mixer,
    MixtureOfExperts,
    Recurrent,
    TracedMixer,
)
from memfit.estimators.base.dispatch import assert_never


def attention_of(mixer: Mixer) -> Attention | None:
    """Return attention with keys and values of its own, None for another kind."""
    match mixer:
        case Attention():
            return mixer
        case LatentAttention() | GatedDelta() | Recurrent() | TracedMixer():
            return None
        case _:
            assert_never(mixer)


def latent_of(mixer: Mixer) -> LatentAttention | None:
    """Return latent attention, None for another kind."""
    match mixer:
        case LatentAttention():
            return mixer
        case Attention() | GatedDelta() | Recurrent() | TracedMixer():
            return None
        case _:
            assert_never(mixer)


def recurrent_of(mixer: Mixer) -> Recurrent | None:
    """Return a recurrence, None for another kind."""
    match mixer:
        case Recurrent():
            return mixer
        case Attention() | LatentAttention() | GatedDelta() | TracedMixer():
            return None
        case _:
            assert_never(mixer)


def gated_delta_of(mixer: Mixer) -> GatedDelta | None:
    """Return a gated delta net, None for another kind."""
    match mixer:
        case GatedDelta():
            return mixer
        case Attention() | LatentAttention() | Recurrent() | TracedMixer():
            return None
        case _:
            assert_never(mixer)


def dense_of(block: FeedForward) -> DenseMLP | None:
    """Return a dense block, None for a mixture."""
    match block:
        case DenseMLP():
            return block
        case MixtureOfExperts():
            return None
        case _:
            assert_never(block)
