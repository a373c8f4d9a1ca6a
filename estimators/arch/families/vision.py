"""What a multimodal checkpoint has in addition to its text model: counted on disk, not loaded."""

from collections.abc import Iterator

from msgspec.structs import replace

from memfit.estimators.arch.families import (
    towers_gemma,
    towers_gemma3n,
    towers_glm,
    towers_llama,
    towers_qwen,
)
from memfit.estimators.arch.families.tower_blocks import Tower
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Model
from memfit.estimators.arch.modules import Module, Modules, Part
from memfit.estimators.arch.structural import unread_keys

# (model type, model type of the tower's section without "_vision" or "_audio") -> tower.
VISION: dict[tuple[str, str], Tower] = {
    ("gemma3", "siglip_vision_model"): towers_gemma.siglip,
    ("gemma3n", "gemma3n"): towers_gemma3n.mobilenet,
    ("gemma4", "gemma4"): towers_gemma.gemma4_vision,
    ("gemma4_unified", "gemma4_unified"): towers_gemma.gemma4_unified_vision,
    ("glm4v", "glm4v"): towers_glm.glm4v,
    ("glm4v_moe", "glm4v_moe"): towers_glm.glm4v,
    ("glm_ocr", "glm_ocr"): towers_glm.glm_ocr,
    ("internvl_chat", "intern_vit_6b"): towers_llama.intern_vit,
    ("llama4", "llama4_vision_model"): towers_llama.llama4,
    ("llava", "clip_vision_model"): towers_llama.clip,
    ("llava", "pixtral"): towers_llama.llava,
    ("mistral3", "pixtral"): towers_llama.mistral3,
    ("mllama", "mllama_vision_model"): towers_llama.mllama,
    ("qwen2_5_vl", "qwen2_5_vl"): towers_qwen.qwen2_5_vl,
    ("qwen2_vl", "qwen2_vl"): towers_qwen.qwen2_vl,
    ("qwen3_5", "qwen3_5"): towers_qwen.qwen3_vl,
    ("qwen3_5_moe", "qwen3_5_moe"): towers_qwen.qwen3_vl,
    ("qwen3_vl", "qwen3_vl"): towers_qwen.qwen3_vl,
    ("qwen3_vl_moe", "qwen3_vl_moe"): towers_qwen.qwen3_vl,
}
AUDIO: dict[tuple[str, str], Tower] = {
    ("gemma3n", "gemma3n"): towers_gemma3n.audio,
    ("gemma4", "gemma4"): towers_gemma.gemma4_audio,
    ("gemma4_unified", "gemma4_unified"): towers_gemma.gemma4_unified_audio,
}
_TABLES = {"vision": VISION, "audio": AUDIO}
# Root keys of multimodal configs that shape nothing where the tower does not read them.
_IGNORED = (
    "vision_feature_layer",
    "spatial_merge_size",
    "image_seq_length",
    "image_grid_pinpoints",
)


def with_towers(model: Model, fields: Fields) -> Model:
    """Return the model with the towers of its config, or a note on each that is not described.

    Their parameters are marked as not loaded: mlx-lm drops them when it reads the checkpoint.
    """
    modules, notes = model.modules, model.notes
    for kind in _TABLES:
        if not fields.has(f"{kind}_config"):
            continue
        tower = _tower(kind, fields, model.hidden_size)
        modules += tower
        if not tower:
            notes += (f"the {kind} tower is not counted on disk; mlx-lm does not load it",)
    fields.ignore(*_IGNORED)
    return replace(model, modules=modules, notes=notes)


def _tower(kind: str, fields: Fields, hidden: int) -> Modules:
    """Return a tower's parameters, none when it is not wholly described."""
    section = fields.untracked(f"{kind}_config")
    model_type = fields.text("model_type")
    own_type = section.text("model_type", model_type).removesuffix(f"_{kind}")
    describe = _TABLES[kind].get((model_type, own_type))
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
