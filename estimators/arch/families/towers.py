"""Vision and audio towers: what they are made of, and how a model gets those of its config."""

from collections.abc import Callable, Iterator, Mapping

from msgspec.structs import replace

from memfit.estimators.arch.fields import MAX_LAYERS, Fields, unread_keys
from memfit.estimators.arch.model import Model, Module, Modules, Part, linear, norm, under

# From the tower's own section, the whole config and the text model's width to parameters.
Tower = Callable[[Fields, Fields, int], Modules]
# By the model type of the tower's section without "_vision" or "_audio".
Towers = Mapping[str, Tower]

# Root keys of multimodal configs that shape nothing where the tower does not read them.
_IGNORED = (
    "vision_feature_layer",
    "spatial_merge_size",
    "image_seq_length",
    "image_grid_pinpoints",
)


def tower_layers(section: Fields, key: str, default: int) -> int:
    """Return how many layers a tower has."""
    return section.count(key, default, most=MAX_LAYERS)


def repeated(path: str, count: int, block: Modules) -> Modules:
    """Return ``count`` blocks at ``path.0``, ``path.1`` and so on."""
    return tuple(module for index in range(count) for module in under(f"{path}.{index}", block))


def dense(path: str, inputs: int, outputs: int, *, bias: bool = True) -> Module:
    """A Linear of a tower."""
    return linear(path, inputs, outputs, Part.VISION, bias=bias)


def weight(path: str, *shape: int, bias: int = 0) -> Module:
    """A convolution, a table of positions or any other parameter of a tower."""
    return Module(path, shape, Part.VISION, bias)


def projections(hidden: int, inner: int, *, output: str = "o_proj", bias: bool = True) -> Modules:
    """Query, key, value and output projections of ``inner`` width, side by side."""
    return (
        *(dense(name, hidden, inner, bias=bias) for name in ("q_proj", "k_proj", "v_proj")),
        dense(output, inner, hidden, bias=bias),
    )


def fused_attention(width: int, *, bias: bool = True) -> Modules:
    """One projection to queries, keys and values, and the one of the output."""
    return dense("attn.qkv", width, 3 * width, bias=bias), dense(
        "attn.proj", width, width, bias=bias
    )


def plain_mlp(width: int, intermediate: int, *, prefix: str = "mlp.") -> Modules:
    """An MLP without a gate."""
    return dense(f"{prefix}fc1", width, intermediate), dense(f"{prefix}fc2", intermediate, width)


def layer_norms(hidden: int, *names: str) -> Modules:
    return tuple(norm(name, hidden, bias=True) for name in names)


def rms_norms(hidden: int, *names: str) -> Modules:
    return tuple(norm(name, hidden) for name in names)


def vision_transformer(section: Fields, patch: int, *, is_clip: bool = False) -> Modules:
    """Blocks of SigLIP; CLIP has a class token, a norm before them and patches without a bias."""
    width, size = section.count("hidden_size", 768), section.count("patch_size", patch)
    intermediate = section.count("intermediate_size", 3072)
    block = (
        *layer_norms(width, "layer_norm1", "layer_norm2"),
        *under("self_attn", projections(width, width, output="out_proj")),
        *plain_mlp(width, intermediate),
    )
    section.ignore("num_attention_heads")
    positions = (section.count("image_size", 224) // size) ** 2
    channels = section.count("num_channels", 3)
    bias = 0 if is_clip else width
    tower = (
        weight("embeddings.patch_embedding", width, size, size, channels, bias=bias),
        weight("embeddings.position_embedding", positions + is_clip, width),
        *repeated("encoder.layers", tower_layers(section, "num_hidden_layers", 12), block),
        *layer_norms(width, "post_layernorm"),
    )
    if is_clip:
        tower += (weight("embeddings.class_embedding", width), *layer_norms(width, "pre_layrnorm"))
    return tower


def with_towers(model: Model, fields: Fields, vision: Towers, audio: Towers) -> Model:
    """Return the model with the towers of its config, or a note on each that is not described.

    Their parameters are marked as not loaded: mlx-lm drops them when it reads the checkpoint.
    """
    modules, notes = model.modules, model.notes
    for kind, towers in (("vision", vision), ("audio", audio)):
        if not fields.has(f"{kind}_config"):
            continue
        tower = _tower(kind, towers, fields, model.hidden_size)
        modules += tower
        if not tower:
            notes += (f"the {kind} tower is not counted on disk; mlx-lm does not load it",)
    fields.ignore(*_IGNORED)
    return replace(model, modules=modules, notes=notes)


def _tower(kind: str, towers: Towers, fields: Fields, hidden: int) -> Modules:
    """Return a tower's parameters, none when it is not wholly described."""
    section = fields.untracked(f"{kind}_config")
    own_type = section.text("model_type", fields.text("model_type")).removesuffix(f"_{kind}")
    describe = towers.get(own_type)
    if describe is None:
        return ()
    modules = describe(section, fields, hidden)
    return () if list(unread_keys(section)) else tuple(_unloaded(modules))


def _unloaded(modules: Modules) -> Iterator[Module]:
    for module in modules:
        # What no name shows to be of a tower is packed with the text model (mlx_vlm/utils.py).
        if module.part is Part.OTHER:
            yield module
        else:
            yield replace(module, part=Part.VISION, quantizable=False, loaded=False)
