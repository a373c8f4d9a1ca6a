"""What can be said of a model with an architecture that nothing describes."""

import re

from memfit.estimators.arch.registry import FAMILIES
from memfit.estimators.base.errors import OtherKindError, UnknownArchitectureError, UnsupportedError
from memfit.estimators.base.files import printable
from memfit.estimators.base.setting_names import setting
from memfit.estimators.base.units import format_limit
from memfit.estimators.checkpoint.kinds import other_kind
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import Device, name_as_sold

_EMBEDDING = re.compile(r"emb|wte")


def unknown_architecture(
    checkpoint: Checkpoint, fault: UnsupportedError, device: Device | None
) -> UnknownArchitectureError:
    """Return the fault, with what is known of the weights and what can be done."""
    ways = "missing: KV cache and workspace; ways on: a newer mlx-lm with a class for it"
    if proposed := _proposed(checkpoint):
        ways += f", {setting('as_type')} {proposed} (an assumption)"
    return UnknownArchitectureError(str(fault), _known(checkpoint, device), ways)


def require_language_model(checkpoint: Checkpoint, device: Device | None) -> None:
    """Raise for an encoder, a drafter and other models that are not sized as a generator.

    Raises:
        OtherKindError: with what it is, its exact weights, and what is not decided.
    """
    if checkpoint.source == "gguf" or not (kind := other_kind(checkpoint)):
        return  # a GGUF file has its own names
    name, undecided = kind
    raise OtherKindError(
        f"{checkpoint.config_name}: {printable(name)}",
        _known(checkpoint, device),
        f"not decided: {undecided}",
    )


def _proposed(checkpoint: Checkpoint) -> str:
    """The model type that can be assumed; a described one is taken at its word."""
    # Only a model that cannot be sized needs it.
    from memfit.estimators.arch.likeness import is_other_kind, like

    config, tensors = checkpoint.config, checkpoint.tensors
    if is_other_kind(config):
        return ""
    if tensors is not None and not any(_EMBEDDING.search(each.name) for each in tensors):
        return ""  # a part of a model, such as a head that drafts
    kind = str(config.get("model_type"))
    return kind if kind in FAMILIES else like(config)


def _known(checkpoint: Checkpoint, device: Device | None) -> str:
    if checkpoint.tensors is None:
        return "weights: no headers were read, so that nothing is known of the total"
    nbytes = sum(tensor.nbytes for tensor in checkpoint.tensors)
    text = f"weights: {nbytes} bytes (exact), so at least {format_limit(nbytes)} if all are loaded"
    if device is None:
        return text
    budget = format_limit(device.working_set_bytes)
    return f"{text}, of {budget} on {name_as_sold(device.name)}"
