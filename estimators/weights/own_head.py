"""Heads that files decide about: some classes build one, and take it out where files have none."""

from msgspec.structs import replace

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.modules import Part, linear
from memfit.estimators.checkpoint.manifest import Tensor

# mlx-lm gemma3_text.py (gemma3.py calls it) and recurrent_gemma.py, sanitize.
_OWN_HEAD = {
    "gemma3": "language_model.lm_head",
    "gemma3_text": "lm_head",
    "recurrent_gemma": "lm_head",
}


def with_own_head(model: Model, tensors: tuple[Tensor, ...] | None) -> Model:
    """Return the model with the head that the headers list, or without, whatever the config says.

    Without headers the config decides, and so it does for every other class.
    """
    path = _OWN_HEAD.get(model.model_type)
    if path is None or tensors is None:
        return model
    has_head = any(tensor.name == f"{path}.weight" for tensor in tensors)
    if has_head != model.tied_head:
        return model
    if has_head:
        head = linear(path, model.hidden_size, model.vocab_size, Part.HEAD)
        return replace(model, modules=(*model.modules, head))
    kept = tuple(module for module in model.modules if module.part is not Part.HEAD)
    return replace(model, modules=kept)
