"""Smaller workloads that a command allows too: on a Mac one of them can take more.

MLX closes a command buffer by the elements of its arrays, so that fewer or shorter sequences can
leave more layers under way (docs/accuracy.md, "Not checked").
"""

from collections.abc import Iterator

from msgspec.structs import replace

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import ceil_div
from memfit.estimators.base.workload import Workload
from memfit.estimators.runtimes.facets import OnMlx, is_grouped
from memfit.estimators.runtimes.source import Formula
from memfit.estimators.sizing.sized_model import SizedModel

# Between two places where a layer less is under way the workspace grows with the tokens of a chunk
# and with the sequences: a sixteenth of them is a sixteenth of it, and its stated error a quarter.
_PARTS = 16


def can_take_more(sized: SizedModel) -> bool:
    """Whether a smaller workload can take more: on a GPU that MLX gives its work in batches.

    The bounds of other GPUs grow with the workload, and the CPU counts operations alone.
    """
    runtime_model = sized.runtime_model
    return bool(runtime_model.facet(OnMlx)) and runtime_model.subject.backend == "metal"


def are_compared(sized: SizedModel) -> bool:
    """Whether they are computed quickly: a trace takes seconds for each."""
    return isinstance(sized.runtime_model.source, Formula)


def largest_workload(sized: SizedModel, workload: Workload) -> Workload:
    """Return the one with the largest peak: ``workload``, fewer sequences or shorter prompts.

    The settings of the command stay, among them the prefill step. By trace it is ``workload``.

    Raises:
        UnsupportedError: when the runtime cannot run the workload.
    """
    if not (can_take_more(sized) and are_compared(sized)):
        return workload

    def peak_bytes(candidate: Workload) -> int:
        try:
            return sized.figures_for(candidate).moment.nbytes
        except UnsupportedError:
            if candidate == workload:
                raise
            return 0  # a class may run this number of sequences and fail on fewer (gemma2)

    rows = batches(workload, is_grouped=is_grouped(sized.runtime_model, workload))
    # Of equal peaks the first counts, which is the workload's own.
    by_batch = max((replace(workload, batch=batch) for batch in rows), key=peak_bytes)
    return max(
        (
            replace(each, prompt_tokens=tokens)
            for each in dict.fromkeys((workload, by_batch))
            for tokens in prompts(workload)
        ),
        key=peak_bytes,
    )


def batches(workload: Workload, *, is_grouped: bool) -> Iterator[int]:
    """Yield sequences together, the workload's first; a group's, and two, four, ... groups.

    >>> list(batches(Workload(prompt_tokens=1, batch=20), is_grouped=True))
    [20, 8, 7, 6, 5, 4, 3, 2, 1, 16]
    """
    batch = workload.batch
    yield batch
    group = min(batch, workload.prefill_batch) if is_grouped else batch
    yield from range(group, 0, -ceil_div(group, _PARTS))
    while group * 2 < batch:
        group *= 2
        yield group


def prompts(workload: Workload) -> Iterator[int]:
    """Yield lengths of prompts, the workload's first: the last two chunks in parts, and whole ones.

    mlx-lm leaves the last token of a prompt to itself, so that a chunk's end is one token more.

    >>> list(prompts(Workload(prompt_tokens=100, prefill_step=32)))[:12]
    [100, 97, 96, 65, 64, 33, 32, 99, 97, 95, 93, 91]
    """
    tokens, step = workload.prompt_tokens, workload.prefill_step
    least = workload.least_prompt_tokens
    yield tokens
    last = (tokens - 1) // step * step
    ends = (last - back * step + more for back in range(3) for more in (1, 0))
    yield from (each for each in ends if least <= each < tokens)
    # A power of two: many kernels differ where a chunk is a multiple of 256.
    part = max(1, 1 << (min(step, tokens) // _PARTS).bit_length() >> 1)
    first = (tokens - 1) // part * part
    lengths = range(first + 1, max(least, tokens - 2 * step) - 1, -part)
    yield from (each for each in lengths if each < tokens)
