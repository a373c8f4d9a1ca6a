"""From a config to a model: the row of its model type, and the family that describes it.

Rows are plain data, in the file of arch/families/ that builds the class's layers; weights/,
ranks.py and the formulas interpret them. A row holds what differs from the defaults.
"""

from collections.abc import Callable, Mapping
from enum import Enum
from importlib import import_module
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from memfit.estimators.arch.fields import Fields, config_fields, unread_keys
from memfit.estimators.arch.model import Model
from memfit.estimators.base import dtypes
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.checkpoint.kinds import MTP_HEAD, attends_both_ways


class Cut(Enum):
    """Where tensor-parallel ranks divide a matrix. Source: mlx nn/layers/distributed.py."""

    OUTPUTS = "all-to-sharded"  # its rows, and its bias
    INPUTS = "sharded-to-all"  # its columns; every rank has the whole bias
    FIRST = "first axis"  # heads or channels, cut by the class itself
    SLICE = "a slice"  # heads, without a copy: the whole array stays in memory
    KV_HEADS = "kv heads"  # rows, repeated where there are fewer heads than ranks (qwen3_5.py)


Cuts = Mapping[str, Cut]


def projections(path: str) -> Cuts:
    """Return the cuts of a SwiGLU-like MLP or of stacked experts."""
    return {
        f"{path}.gate_proj": Cut.OUTPUTS,
        f"{path}.up_proj": Cut.OUTPUTS,
        f"{path}.down_proj": Cut.INPUTS,
    }


HEADS: Cuts = {
    **{f"self_attn.{name}_proj": Cut.OUTPUTS for name in "qkv"},
    "self_attn.o_proj": Cut.INPUTS,
}
DENSE: Cuts = {**HEADS, **projections("mlp")}
EXPERTS: Cuts = projections("mlp.switch_mlp")
SHARED_EXPERTS: Cuts = projections("mlp.shared_experts")


class Fp8(Enum):
    """How a class's ``sanitize`` multiplies FP8 weights with their ``weight_scale_inv``."""

    BLOCKS = "blocks"  # a scale for each block of 128 x 128 (deepseek_v3.py)
    PADDED_BLOCKS = "padded blocks"  # the weight is padded to its scales (mimo_v2_flash.py)
    SCALAR = "scalar"  # one scale for the matrix, which gives it its type (ministral3.py)


ROTARY, ROPE = r"self_attn\.rotary_emb\.inv_freq", r"attention\.rope\.inv_freq"
"""Frequencies that old versions of transformers saved and mlx-lm computes (llama.py, sanitize)."""
HEAD = r"^lm_head\.weight$"
W_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Mixtral's names of the matrices of an expert."""
_SAME_NAMES = {name: name for name in W_NAMES.values()}
GATE_UP = (
    (".experts.gate_up_proj", ("gate_proj", "up_proj")),
    (".experts.down_proj", ("down_proj",)),
)
INPUT_OUTPUT = (
    (".input_linear.weight", ("gate_proj", "up_proj")),
    (".output_linear.weight", ("down_proj",)),
)
NESTED = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^(?!language_model\.)", "language_model."),
)
"""Newer exports put the language model under one "model", older ones have it at the root."""


class VisionTraits(Struct, frozen=True):
    """What one class does with images in addition to the blocks that all towers have."""

    rotates: bool = True
    """Whether queries and keys are rotated."""
    norms_heads: bool = False
    """Whether they are normed before."""
    pads_heads: bool = False
    """Whether attention is padded to a width with a fused kernel."""
    masks_patches: bool = False
    """Whether a mask of all patches by all patches is an array."""
    one_hot_positions: bool = False
    """Whether positions of patches are multiplied as one-hot rows, in float32."""
    masks_each_block: bool = False
    """Whether every block makes such a mask, which attention writes out for all heads."""
    joins: Literal["", "tiles", "rest", "all"] = ""
    """What attends to each other: tiles of an image, images after the second, or all of them."""
    patch_multiple: int = 1
    """What the patches of a tile are padded to a multiple of."""
    float32: bool = False
    """Whether the tower computes in float32, as its pixels are not cast; its weights are."""
    stacks_blocks: bool = False
    """Whether the outputs of all blocks are stacked, and some of them are features too."""
    crosses: bool = False
    """Whether layers of text attend to the features, which stay, and turn float32 as these are."""
    convolves: bool = False
    """Whether the tower is of convolutions (MobileNetV5)."""
    merges: int = 1
    """How often embeddings of all tokens are replaced: where kinds have tokens of their own."""
    tower: str = ""
    """The one type of tower that mlx-vlm's class takes of those that are described."""


class ClassRow(Struct, frozen=True, kw_only=True):
    """One model class of mlx-lm or mlx-vlm; its kinds of row say how the layers are built."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The class's own values for absent keys of the config."""
    # What its ``sanitize`` does to the tensors of a checkpoint before the strict load.
    drops: str = ""
    """A pattern of the names that it removes."""
    drops_when_tied: str = ""
    """A pattern of the heads that it removes where the config ties the head to the embedding."""
    drops_in_layout: tuple[str, str] = ("", "")
    """A part of a name, and the pattern of what it removes where some tensor has that part."""
    drops_later_layers: bool = False
    """Whether it removes layers after the model's last, which predict further tokens."""
    drops_next_layer: str = ""
    """The pattern before the number of the one layer after the model's last that it removes."""
    renames: tuple[tuple[str, str], ...] = ()
    """Patterns of names and their replacements; the first that is found is replaced."""
    expert_names: Mapping[str, str] = field(default_factory=lambda: _SAME_NAMES)
    """The class's names of the matrices it stacks, by those of single experts in a checkpoint."""
    stack: str = "switch_mlp"
    """The path of the stacked experts in their block, which it stacks single ones to."""
    joined: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Ends of names with several matrices in one tensor, and the class's names of these."""
    keeps_shapes: bool = False
    """Whether it neither splits ``kv_b_proj`` nor transposes: the Hub's own files do not load."""
    copies_embedding: bool = False
    """Whether the embedding becomes the head where files have none, tied or not."""
    own_head: str = ""
    """The path of a head that the class builds, and takes out where files have none."""
    normalises_head: bool = False
    """Whether it divides the head by its columns' norms where the config says ``norm_head``."""
    fp8: Fp8 | None = None
    """How it dequantises FP8 weights; None: it does not."""
    unpacks_integers: bool = False
    """Whether it takes compressed-tensors' packed integers for MLX's own."""
    splits_mxfp4: bool = False
    """Whether it splits OpenAI's interleaved MXFP4 experts."""
    by_text_class: bool = False
    """Whether the class of ``text_config`` converts the formats of other libraries."""

    # How it runs, on one machine or several.
    tensor: Cuts | None = None
    """What its ``shard`` cuts, by paths in a layer or full paths; None: it has none."""
    pipeline: bool = False
    """Whether its ``model`` has a ``pipeline``, as mlx-lm's sharded_load looks for it."""
    since: tuple[int, ...] = ()
    """The first package of mlx-lm with a class for it; empty: the oldest that is described."""
    rewritten: tuple[tuple[int, ...], str] | None = None
    """The first package with the class as it is described, and its commit, where it changed."""
    only_mlx_vlm: bool = False
    """Whether mlx-vlm has the class and mlx-lm has none."""
    text_keys: Mapping[str, Any] = field(default_factory=dict)
    """Keys that mlx-lm's class needs in ``text_config``, and what mlx-vlm's takes without them."""
    vision: VisionTraits | None = None
    """How mlx-vlm's class runs its tower; None: no formula has it."""

    def missing_key(self, config: Mapping[str, Any]) -> str:
        """Return the first of ``text_keys`` that a config does not have; else nothing."""
        text = config.get("text_config")
        given = text if isinstance(text, Mapping) else config
        return next((key for key in self.text_keys if key not in given), "")

    def build(self, fields: Fields) -> Model:
        """Return the model of a config, or of a section of one."""
        return self.describe(fields.with_overrides({}, self.defaults))

    def describe(self, fields: Fields) -> Model:
        """Return the model of a config with the defaults; every key is read through ``fields``."""
        raise NotImplementedError


class Irregular(ClassRow, frozen=True, kw_only=True):
    """A class with layers like no other's, built by a function of its own file."""

    builder: Callable[[Fields], Model]

    def describe(self, fields: Fields) -> Model:
        """Return the model of a config."""
        return self.builder(fields)


# The files of arch/families/ with rows, and the model types of each; a file is imported only when
# one of its types is asked for.
_FILES: dict[str, str] = {
    "bailing_moe": "bailing_moe",
    "deepseek": "deepseek_v2 deepseek_v3 deepseek_v32 glm_moe_dsa joyai_llm_flash kimi_k2 minicpm3",
    "dense_models": """
        apertus cohere cohere2 ernie4_5 exaone4 gemma gemma2 gemma3_text glm glm4 granite helium
        hunyuan_v1_dense internlm3 iquestcoder llama mimo minicpm ministral3 mistral nemotron olmo2
        olmo3 phi3 qwen2 qwen3 seed_oss smollm3 stablelm telechat3 xverse
        """,
    "dense_other_names": "exaone gpt2 gpt_neox internlm2 phi qwen starcoder2",
    "falcon_h1": "falcon_h1",
    "gemma3n": "gemma3n",
    "gemma4": "gemma4_text",
    "gpt_oss": "gpt_oss",
    "granitemoehybrid": "granitemoehybrid",
    "hunyuan": "hunyuan",
    "jamba": "jamba",
    "kimi_linear": "kimi_linear",
    "lfm2": "lfm2 lfm2_moe",
    "llama4": "llama4_text",
    "mamba": "falcon_mamba mamba mamba2",
    "mimo_v2_flash": "mimo_v2_flash",
    "moe_models": """
        dots1 ernie4_5_moe glm4_moe granitemoe minimax minimax_m2 mixtral olmoe phimoe qwen2_moe
        qwen3_moe solar_open
        """,
    "nemotron_h": "nemotron_h",
    "qwen3_next": "qwen3_5 qwen3_5_moe qwen3_next",
    "recurrent_gemma": "recurrent_gemma",
    "rwkv7": "rwkv7",
    "step3p5": "step3p5",
    "vision_wrappers": "glm4v glm4v_moe glm_ocr internvl_chat mllama",
    "wrappers": """
        gemma3 gemma4 gemma4_unified kimi_k25 kimi_vl lfm2-vl llama4 llava mistral3 pixtral
        qwen2_5_vl qwen2_vl qwen3_vl qwen3_vl_moe
        """,
}
FAMILIES: dict[str, str] = {
    model_type: file
    for model_type, file in sorted(
        (model_type, file) for file, types in _FILES.items() for model_type in types.split()
    )
}
"""The file with the row of each described model type."""

# Drafters of mlx-vlm, which are no models by themselves.
_HEADS = {MTP_HEAD: ClassRow(joined=GATE_UP)}

_MAX_CONTEXT_KEYS = (
    "max_position_embeddings",
    "max_sequence_length",
    "model_max_length",
    "max_seq_len",
    "n_positions",
    "seq_length",
)


def build_model(config: Mapping[str, Any], name: str, *, assumed: bool = False) -> Model:
    """Return the model a config describes; ``name`` is how messages name the config.

    Where its type is only ``assumed``, keys that look structural and that nobody read become notes.

    Raises:
        ConfigError: when a key is missing or holds a wrong value.
        UnsupportedError: when the model type is not described, or a key that looks
            structural was read by nobody.
    """
    fields = config_fields(config, name)
    model_type = fields.text("model_type")
    row = class_row(model_type)
    if row is None:
        raise UnsupportedError(f"{name}: model_type: {model_type[:60]!r} is not described")
    if attends_both_ways(config):
        raise UnsupportedError(
            f"{name}: use_bidirectional_attention: an encoder, which makes embeddings and keeps no"
            " cache; it is not sized as a generator"
        )
    model = row.build(fields)
    unknown = list(unread_keys(fields))
    if unknown and assumed:
        text = f"{', '.join(unknown[:5])}: unknown to {model_type}, and ignored"
        model = replace(model, notes=(*model.notes, text))
    elif unknown:
        raise UnsupportedError(
            f"{name}: {', '.join(unknown[:5])}: looks structural and is not described for"
            f" model type {model_type!r}; its caches and workspace cannot be given"
        )
    for section in _sections(fields):
        _hold_layer_types(section, len(model.layers))
    return replace(
        model,
        model_type=model_type,
        dtype=dtype_of(fields, name),
        max_context=model.max_context or context_limit(fields),
    )


def _hold_layer_types(section: Fields, layers: int) -> None:
    """A class that does without the list still shows, by a short one, that the config is cut."""
    kinds = section.texts("layer_types")
    if kinds is not None and len(kinds) < layers:
        raise section.fail("layer_types", f"{len(kinds)} entries for {layers} layers")


def class_row(model_type: str) -> ClassRow | None:
    """Return what is known of the class of a model type; None where nothing describes it."""
    file = FAMILIES.get(model_type)
    if file is None:
        return None
    rows: dict[str, ClassRow] = import_module(f"memfit.estimators.arch.families.{file}").CLASSES
    return rows[model_type]


def row_or_default(model_type: str) -> ClassRow:
    """Return what is known of the class of a model type; defaults where nothing describes it."""
    return class_row(model_type) or _HEADS.get(model_type) or ClassRow()


def _sections(fields: Fields) -> tuple[Fields, ...]:
    return (fields, fields.section("text_config")) if fields.has("text_config") else (fields,)


def dtype_of(fields: Fields, name: str) -> str:
    """Return the type of activations that the config names, bfloat16 when it names none."""
    for section in _sections(fields):
        for key in ("dtype", "torch_dtype"):
            if section.has(key):
                where = f"{name}: {section.full_path(key)}"
                return dtypes.from_config_name(section.text(key), where=where)
    return "BF16"


def context_limit(fields: Fields) -> int | None:
    """Return the longest context the config names, in tokens."""
    for section in reversed(_sections(fields)):
        for key in _MAX_CONTEXT_KEYS:
            if section.has(key):
                return section.count(key)
    return None
