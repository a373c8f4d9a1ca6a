"""What llama.cpp reserves to compute with, and what is said of it."""

from typing import NamedTuple

from memfit.estimators.base.setting_names import setting
from memfit.estimators.base.units import open_size
from memfit.estimators.results.estimate import Note
from memfit.estimators.runtimes.llama_cpp.builder import Context


class Compute(NamedTuple):
    """Bytes of the compute buffers, and of the buffer of logits that the program reads."""

    gpu: int
    host: int
    output: int
    projector: int
    """A bound of what a vision projector computes its largest image with, on the GPU."""

    @property
    def nbytes(self) -> int:
        return sum(self)

    @property
    def on_gpu(self) -> int:
        """Bytes on the GPU, where it has a memory of its own."""
        return self.gpu + self.projector

    @property
    def on_host(self) -> int:
        """Bytes on the host of such a GPU."""
        return self.host + self.output


def projector_note(nbytes: int | None) -> Note | None:
    """Return what is counted of a vision projector, None without one."""
    if nbytes is None:
        text = "the weights of the vision projector are counted, what it computes with is not"
        return Note("warning", "projector", text)
    if not nbytes:
        return None
    text = (
        f"the vision projector computes its largest image in at most {open_size(nbytes)};"
        " tiles that are computed together take more"
    )
    return Note("info", "projector", text)


def prediction_note(state_bytes: int) -> Note:
    """Return what drafting with a file's own prediction layers (MTP) takes in addition.

    Source: src/llama-memory-recurrent.cpp (n_rs_seq) and src/llama-arch.cpp,
    llm_arch_supports_rs_rollback.
    """
    text = (
        f"drafting with the file's prediction layers ({setting('mtp_tokens')}) is not counted:"
        " their weights and a context of their own"
    )
    if state_bytes:
        text += (
            ", and for each drafted token the recurrent states again,"
            f" {open_size(state_bytes)} (Qwen3.5, Nemotron-H and LFM2; others keep one)"
        )
    return Note("info", "prediction-layers", text)


def explained(compute: Compute, context: Context, rest: int, used: int) -> tuple[str, ...]:
    """Return the lines that derive the compute buffers and the peak."""
    parts = " + ".join(f"{name} {nbytes}" for name, nbytes in compute._asdict().items())
    return (
        f"compute buffers for {context.room.microbatch} tokens on {context.room.full} cells ="
        f" {parts} = {compute.nbytes} bytes",
        f"peak = weights, caches and states {rest} + compute {used} = {rest + used} bytes",
    )
