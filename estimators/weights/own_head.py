"""Heads that files decide about: some classes build one, and take it out where files have none."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.modules import Part, linear
from memfit.estimators.arch.registry import sanitize_of
from memfit.estimators.checkpoint.manifest import Tensor


def with_own_head(model: Model, tensors: tuple[Tensor, ...] | None) -> Model:
    """Return the model with the head that the headers list, or without, whatever the config says.

    Without headers the config decides, and so it does for every other class.
    """
    path = sanitize_of(model.model_type).own_head
    if not path or tensors is None:
        return model
    has_head = any(tensor.name == f"{path}.weight" for tensor in tensors)
    if has_head != model.tied_head:
        return model
    if has_head:
        head = linear(path, model.hidden_size, model.vocab_size, Part.HEAD)
        return replace(model, modules=(*model.modules, head))
    kept = tuple(module for module in model.modules if module.part is not Part.HEAD)
    return replace(model, modules=kept)


def ties_head(config: Mapping[str, Any]) -> bool:
    """Return whether a config ties their head; the root of a wrapper decides before its section."""
    section = config.get("text_config")
    places = (config, section) if isinstance(section, Mapping) else (config,)
    said = (place["tie_word_embeddings"] for place in places if "tie_word_embeddings" in place)
    return bool(next(said, True))
