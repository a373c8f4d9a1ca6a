"""What a vision projector computes an image with: a bound for its largest image.

llama.cpp reserves the compute buffer for an image of medium size, and again for one that is larger
(tools/mtmd/clip.cpp, warmup and clip_encode, with llama-cpp-python 0.3.36). The layers are those
of clip_graph::build_vit, with rotated queries and keys and a gate, as if nothing were freed before
half a layer has run.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from memfit.estimators.arch.fields import Fields, config_fields
from memfit.estimators.base.units import ceil_div
from memfit.estimators.machine.device import Backend

PREFIX = "clip."
_FLOAT, _HALF = 4, 2
# Tensors as wide as the model in attention: the hidden state, its norm and that scaled, three
# projections, two rotated in halves and joined, keys and values in half precision, the result, its
# projection and the sum. In the feed-forward: hidden state, norm, scaled, projection and sum.
_ATTENTION, _FEED_FORWARD = 14, 5
_BRANCHES = 3  # the feed-forward's two, and their product
_CHANNELS = 3


class _Limit(NamedTuple):
    """The most tokens of an image, None for one of fixed size, and patches joined on each side."""

    tokens: int | None = None
    merge: int = 1
    masked: bool = False
    """Whether windows are a mask over all patches."""


# clip.cpp, the parameters of each projector: set_limit_image_tokens, n_merge.
_LIMITS = {
    **dict.fromkeys(("qwen2vl_merger", "qwen3vl_merger", "ling3vl", "glm4v"), _Limit(4096, 2)),
    "qwen2.5vl_merger": _Limit(4096, 2, masked=True),
    **dict.fromkeys(("pixtral", "kimivl"), _Limit(1024)),
    **dict.fromkeys(("gemma4v", "gemma4uv"), _Limit(1120, 3)),
    "lfm2": _Limit(256),
    **dict.fromkeys(("mlp", "ldp", "ldpv2", "cogvlm", "gemma3", "internvl", "idefics3"), _Limit()),
    **dict.fromkeys(("llama4", "janus_pro", "nemotron_v2_vl"), _Limit()),
}
# Widths of heads that Metal and CUDA fuse (ggml-metal-device.m, ggml-cuda/fattn.cu); of others all
# scores exist.
_FUSED_WIDTHS = (64, 72, 80, 96, 112, 128, 256)


def projector_bytes(metadata: Mapping[str, Any], backend: Backend, name: str) -> int | None:
    """Return a bound of the compute buffer, 0 without a projector, None for one of another kind.

    Raises:
        ConfigError: when a key of the projector is missing or holds a wrong value.
    """
    found = {k.removeprefix(PREFIX): v for k, v in metadata.items() if k.startswith(PREFIX)}
    if not found:
        return 0
    fields = config_fields(found, name, ("clip",))
    kind = fields.text("projector_type", "") or fields.text("vision.projector_type", "")
    limit = _LIMITS.get(kind)
    if limit is None:
        return None
    patch = fields.count("vision.patch_size")
    return _largest_half(fields, _patches(fields, limit, patch), patch, limit.masked, backend)


def _patches(fields: Fields, limit: _Limit, patch: int) -> int:
    """The most patches of an image, with that of the class."""
    merge = fields.count("vision.projector.scale_factor", limit.merge)
    merge = fields.count("vision.spatial_merge_size", merge)
    if limit.tokens is None:
        side = fields.count("vision.image_size")
        return ceil_div(side, patch) ** 2 + 1
    return limit.tokens * merge**2 + 1


def _largest_half(fields: Fields, patches: int, patch: int, masked: bool, backend: Backend) -> int:
    """All tensors of the larger half of a layer, and the inputs in both memories."""
    width = fields.count("vision.embedding_length")
    feed_forward = fields.count("vision.feed_forward_length")
    heads = fields.count("vision.attention.head_count")
    is_fused = backend != "cpu" and width // heads in _FUSED_WIDTHS
    scores = 0 if is_fused else 2 * patches * heads
    row = max(_ATTENTION * width + scores, _FEED_FORWARD * width + _BRANCHES * feed_forward)
    # The image, on the GPU once more and as a matrix of patches; a mask also in half precision.
    inputs = 3 * _FLOAT * patches * _CHANNELS * patch**2
    mask = (2 * _FLOAT + _HALF) * patches**2 if masked else 0
    return _FLOAT * patches * row + inputs + mask
