"""What can be said of a model with an architecture that nothing describes."""

from memfit.estimators.arch.registry import FAMILIES, has_no_like
from memfit.estimators.base.errors import UnknownArchitectureError, UnsupportedError
from memfit.estimators.base.nearest import nearest
from memfit.estimators.base.units import format_bytes
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import Device


def unknown_architecture(
    checkpoint: Checkpoint, fault: UnsupportedError, device: Device | None
) -> UnknownArchitectureError:
    """Return the fault, with what is known of the weights and what can be done."""
    kind = str(checkpoint.config.get("model_type"))
    ways = "missing: KV cache and workspace; ways on: a newer mlx-lm with a class for it"
    if not has_no_like(kind):
        like = kind if kind in FAMILIES else nearest(kind, FAMILIES, most=1) or "TYPE"
        ways += f", --as {like} (an assumption)"
    return UnknownArchitectureError(str(fault), _known(checkpoint, device), ways)


def _known(checkpoint: Checkpoint, device: Device | None) -> str:
    if checkpoint.tensors is None:
        return "weights: no headers were read, so that nothing is known of the total"
    nbytes = sum(tensor.nbytes for tensor in checkpoint.tensors)
    text = f"weights: {nbytes} bytes (exact), so at least {format_bytes(nbytes)} if all are loaded"
    if device is None:
        return text
    return f"{text}, of {format_bytes(device.working_set_bytes)} on {device.name}"
