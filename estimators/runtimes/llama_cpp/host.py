"""The host of a GPU: its memory, and what a token reads from it."""

from msgspec import Struct

from memfit.estimators.arch.model import Model
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.setting_names import setting
from memfit.estimators.base.units import open_limit
from memfit.estimators.machine.device import Device
from memfit.estimators.runtimes.llama_cpp.ggml import Place
from memfit.estimators.runtimes.llama_cpp.placement import Placement, Weights
from memfit.estimators.runtimes.llama_cpp.settings import LlamaCppRuntime

# Two channels of DDR5-5600, 2 x 8 bytes x 5,600 million transfers: the most of Intel's desktop
# processors (data sheet of the Core i9-14900K: 2 channels, DDR5 5600 MT/s, 89.6 GB/s).
USUAL_BANDWIDTH = 2 * 8 * 5_600_000_000


class Host(Struct, frozen=True):
    """The memory beside that of a GPU."""

    memory_bytes: int | None
    """None where its size is not known."""
    bandwidth_bytes: int
    """Bytes a second."""
    is_usual: bool
    """Whether the bandwidth is that of a usual host, since none was given."""


def host_of(device: Device | None, settings: LlamaCppRuntime) -> Host | None:
    """Return the host of a GPU, None where there is none with a memory of its own.

    Raises:
        InputError: when settings describe one that there is not.
    """
    given = {
        "host_memory": settings.host_memory_bytes,
        "host_bandwidth": settings.host_bandwidth_bytes,
    }
    if device is None or not device.has_host:
        if name := next((name for name, value in given.items() if value), ""):
            where = f"{device.name} has one memory" if device else "no device is named"
            raise InputError(f"{setting(name)}: {where}; it is of the host of an NVIDIA card")
        return None
    return Host(
        settings.host_memory_bytes or device.host_memory_bytes,
        settings.host_bandwidth_bytes or USUAL_BANDWIDTH,
        settings.host_bandwidth_bytes is None,
    )


def weights_read(model: Model, weights: Weights, placement: Placement) -> int:
    """Return the bytes of weights on the host that a decode step of one sequence reads.

    Of a mixture those of the chosen experts; of the embedding only a row, unless it is the head.
    """
    read = weights.tied_bytes if placement.of(weights.blocks) is Place.HOST else 0
    for matrix in weights.matrices:
        if matrix.layer is None or placement.of_matrix(matrix) is Place.GPU:
            continue
        experts = model.layers[matrix.layer].experts if matrix.is_expert else None
        if experts:
            chosen = min(experts.top_k, experts.experts)
            read += matrix.nbytes * chosen // experts.experts
        else:
            read += matrix.nbytes
    return read


def host_text(host: Host) -> str:
    """What is assumed of a host."""
    size = open_limit(host.memory_bytes) if host.memory_bytes else "unknown size"
    usual = ", as two channels of DDR5-5600 are" if host.is_usual else ""
    return (
        f"the host has a memory of {size} (--host-memory), read at"
        f" {open_limit(host.bandwidth_bytes)}/s{usual} (--host-bandwidth)"
    )
