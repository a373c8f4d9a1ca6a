"""How long a prompt takes before its first token, from the operations of the model's layers."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.devices import Chip, chip_of
from memfit.estimators.mlx.kernels import has_nax
from memfit.estimators.results.estimate import FirstToken
from memfit.estimators.runtimes.facets import MlxLmPrograms
from memfit.estimators.runtimes.source import Formula
from memfit.estimators.sizing.decode_speed import weight_bytes_read
from memfit.estimators.sizing.prefill_time import (
    MATRIX,
    SIMD,
    Gpu,
    Subject,
    chunk_seconds,
    subject_of,
)
from memfit.estimators.sizing.sized_model import SizedModel

# fp32 operations of a core in a cycle, and those of an M5's matrix units.
_SIMD_FLOPS = 256
_MATRIX_FLOPS = 1024
# M1 and M2 compute bfloat16 as float32 and convert: half to three quarters of the rate.
_FIRST_BFLOAT16 = 15
_EMULATED_PERCENT = 60
# Percent of the seconds that published runs took: longer where a machine throttles.
_USUAL = (90, 130)
_MATRIX_UNITS = (80, 120)
_EMULATED = (70, 130)
_SHORT = (60, 140)
"""Of prompts below `SHORT_TOKENS`, where a run's start counts, which no kernel explains."""
SHORT_TOKENS = 1000
# The first chunks are computed one by one, of the later ones each by this percentage further on:
# beyond a window the seconds of a chunk grow with its position in a straight line.
_EACH = 8
_APART = 150


class RatedGpu(NamedTuple):
    """A GPU, and the percent of its seconds within which runs are."""

    gpu: Gpu
    range_percent: tuple[int, int]


def first_tokens(
    sized: SizedModel, workload: Workload, prompts: Iterable[int]
) -> tuple[FirstToken, ...]:
    """Return the seconds to the first token of a workload, and of other prompts in its place.

    There are none where the chip is not known, the operations are not described, several
    sequences run together, or the model runs over several ranks.
    """
    runtime_model, device = sized.runtime_model, sized.device
    chip = chip_of(device) if device else None
    if device is None or chip is None or runtime_model.facet(MlxLmPrograms) is None:
        return ()
    is_alone = workload.batch == 1 and not workload.images and sized.draft is None
    is_alone = is_alone and runtime_model.subject.rank is None
    if not (is_alone and isinstance(runtime_model.source, Formula)):
        return ()
    versions = runtime_model.runtime.versions
    subject = subject_of(sized.model, sized.footprint.plan, versions.mlx, workload.kv_bits)
    tokens = dict.fromkeys((workload.prompt_tokens, *prompts))
    least, step = workload.cached_tokens, workload.prefill_step
    rated = tuple(_rated(sized, chip, device))
    return tuple(
        _first_token(sized, subject, rated, least, each, step) for each in tokens if each > least
    )


def _first_token(
    sized: SizedModel,
    subject: Subject,
    rated: tuple[RatedGpu, ...],
    cached: int,
    tokens: int,
    step: int,
) -> FirstToken:
    seconds = [_seconds(sized, subject, each.gpu, cached, tokens, step) for each in rated]
    new = tokens - cached
    low, high = _SHORT if new < SHORT_TOKENS else rated[0].range_percent
    return FirstToken(
        prompt_tokens=tokens,
        # Of the GPU with the most cores that is sold with the memory.
        seconds=_rounded(min(seconds)),
        range_seconds=(_rounded(min(seconds) * low / 100), _rounded(max(seconds) * high / 100)),
    )


def _rounded(seconds: float) -> float:
    return round(seconds, 1 if seconds >= 1 else 2)


def _rated(sized: SizedModel, chip: Chip, device: Device) -> Iterator[RatedGpu]:
    """Yield what the GPU can do, with the most and with the fewest cores it may have."""
    fewest, most = chip.cores(device.memory_bytes)
    for cores in dict.fromkeys((most, fewest)):
        yield gpu_of(chip, cores, sized.model.dtype, has_matrix_units=has_nax(device))


def gpu_of(chip: Chip, cores: int, dtype: str, *, has_matrix_units: bool) -> RatedGpu:
    """Return what a GPU of a chip can do with a model's type, and the range of the seconds."""
    per_cycle, rates, ranges = _SIMD_FLOPS, SIMD, _USUAL
    if has_matrix_units:
        per_cycle, rates, ranges = _MATRIX_FLOPS, MATRIX, _MATRIX_UNITS
    flops = cores * per_cycle * chip.gpu_hertz
    if chip.generation < _FIRST_BFLOAT16:
        ranges = _EMULATED
        if dtype == "BF16":
            flops = flops * _EMULATED_PERCENT // 100
    return RatedGpu(Gpu(flops, chip.bandwidth_bytes, rates, has_matrix_units), ranges)


def _seconds(
    sized: SizedModel, subject: Subject, gpu: Gpu, cached: int, tokens: int, step: int
) -> float:
    """Return the seconds of the chunks, of the last token, and of the start of a run."""
    weights = sized.resident_bytes
    whole, rest = divmod(tokens - 1 - cached, step)
    chunk = partial(chunk_seconds, subject, gpu)
    total = _whole_chunks(whole, lambda number: chunk(step, cached + number * step))
    if rest:
        total += chunk(rest, cached + whole * step)
    last = weight_bytes_read(sized.footprint, sized.model) / gpu.bytes
    return total + last + gpu.rates.start_seconds_per_gb * weights / 1e9


def _whole_chunks(count: int, seconds: Callable[[int], float]) -> float:
    """Return the seconds of whole chunks, with straight lines between some of them.

    >>> _whole_chunks(100, lambda number: 2 + 3 * number)
    15050.0
    """
    if not count:
        return 0.0
    numbers = [*range(min(count, _EACH))]
    while numbers[-1] < count - 1:
        numbers.append(min(count - 1, numbers[-1] * _APART // 100))
    values = [seconds(number) for number in numbers]
    total = float(values[0])
    for (left, right), (before, after) in zip(pairwise(numbers), pairwise(values), strict=True):
        total += (right - left) * before + (after - before) * (right - left + 1) / 2
    return total
