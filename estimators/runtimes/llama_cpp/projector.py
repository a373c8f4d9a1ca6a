"""What a vision projector computes an image with: a bound for its largest image.

llama.cpp reserves the compute buffer for an image of medium size, and again for one that is larger
(tools/mtmd/clip.cpp, warmup and clip_encode, with llama-cpp-python 0.3.36). The layers are those
of clip_graph::build_vit with fused attention, as if all projections were copied.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from memfit.estimators.arch.fields import MAX_LAYERS, Fields, config_fields
from memfit.estimators.base.units import ceil_div
from memfit.estimators.machine.device import Backend
from memfit.estimators.runtimes.llama_cpp.ggml import Graph, Place, Stored, Tensor

PREFIX = "clip."
_FLOAT, _HALF = 4, 2
_LAYERS = 2  # of equal ones the second is laid out as all that follow
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
    return _laid_out(fields, _patches(fields, limit, patch), patch, limit.masked, backend)


def _patches(fields: Fields, limit: _Limit, patch: int) -> int:
    """The most patches of an image, with that of the class."""
    merge = fields.count("vision.projector.scale_factor", limit.merge)
    merge = fields.count("vision.spatial_merge_size", merge)
    if limit.tokens is None:
        side = fields.count("vision.image_size")
        return ceil_div(side, patch) ** 2 + 1
    return limit.tokens * merge**2 + 1


def _laid_out(fields: Fields, patches: int, patch: int, masked: bool, backend: Backend) -> int:
    width = fields.count("vision.embedding_length")
    feed_forward = fields.count("vision.feed_forward_length")
    heads = fields.count("vision.attention.head_count")
    fields.count("vision.block_count", most=MAX_LAYERS)
    is_fused = backend != "cpu" and width // heads in _FUSED_WIDTHS
    graph, weight = Graph(), Stored(0, Place.GPU, is_weight=True)
    row = _FLOAT * patches

    def product(columns: int, *sources: Tensor) -> Tensor:
        return graph.matrix(row * columns, weight, *sources)

    pixels = _CHANNELS * patch**2
    image = graph.input(row * pixels)
    mask = graph.input(row * patches) if masked else None
    hidden = graph.node(row * width, product(width, graph.node(row * pixels, image)))
    # cast once for the fused kernel
    cast = graph.node(_HALF * patches**2, mask) if mask else None
    for _ in range(_LAYERS):
        packed = product(3 * width, graph.node(row * width, hidden))
        queries, keys, values = (graph.node(row * width, packed) for _ in range(3))
        if is_fused:
            halves = [graph.node(_HALF * patches * width, part) for part in (keys, values)]
            masks = (cast,) if cast else ()
            mixed = graph.node(row * width, queries, *halves, *masks)
        else:
            scores = graph.node(row * patches * heads, queries, keys)
            mixed = graph.node(row * width, graph.node(row * patches * heads, scores), values)
        hidden = graph.node(row * width, product(width, mixed), hidden, inplace=True)
        normed = graph.node(row * width, hidden)
        up, gate = (product(feed_forward, normed) for _ in range(2))
        fed = product(width, graph.node(row * feed_forward, up, gate))
        hidden = graph.node(row * width, fed, hidden, inplace=True)
    joined = graph.node(row * width, hidden)
    out = product(width, product(width, joined))
    out.kept = True
    return sum(graph.reserve("cpu"))
