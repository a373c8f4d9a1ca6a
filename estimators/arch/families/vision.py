"""What a multimodal checkpoint has in addition to its text model: counted on disk, not loaded."""

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from memfit.estimators.arch.families.tower_blocks import Tower
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Model
from memfit.estimators.arch.modules import Module, Modules, Part
from memfit.estimators.arch.structural import unread_keys

# By the model type of the tower's section without "_vision" or "_audio".
Towers = Mapping[str, Tower]

# Root keys of multimodal configs that shape nothing where the tower does not read them.
_IGNORED = (
    "vision_feature_layer",
    "spatial_merge_size",
    "image_seq_length",
    "image_grid_pinpoints",
)


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
