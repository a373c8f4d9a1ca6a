"""How long a prompt takes before its first token, from the operations of the model's layers."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from msgspec import UNSET, Struct
from msgspec.structs import replace

from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.chips import Chip, chip_of
from memfit.estimators.mlx.kernels import has_nax
from memfit.estimators.results.advice import FirstToken
from memfit.estimators.runtimes.facets import MlxLmPrograms
from memfit.estimators.runtimes.source import Formula
from memfit.estimators.sizing.decode_speed import decode_speed, weight_bytes_read
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
_STEP_COSTS = 1.05
"""How much slower a step has to be before that is said: closer ones change places between runs."""
# The first chunks are computed one by one, of the later ones each by this percentage further on:
# beyond a window the seconds of a chunk grow with its position in a straight line.
_EACH = 8
_APART = 150


class RatedGpu(NamedTuple):
    """A GPU, and the percent of its seconds within which runs are."""

    gpu: Gpu
    range_percent: tuple[int, int]


class _Prompt(Struct, frozen=True):
    """A workload of one sequence whose seconds can be computed."""

    sized: SizedModel
    workload: Workload
    subject: Subject
    gpus: tuple[RatedGpu, ...]
    """With the most cores that the machine may have, and with the fewest."""

    def first_token(self, tokens: int) -> FirstToken:
        """Return the seconds of a prompt of so many tokens, the cached ones included."""
        workload = replace(self.workload, prompt_tokens=tokens)
        parts = [self._seconds(workload, each.gpu) for each in self.gpus]
        own, usual_step = sum(parts[0]), self.sized.runtime_model.runtime.prefill_step
        percents = self._range_percent(workload)
        usual = own
        if workload.prefill_step != usual_step:
            usual = sum(self._seconds(replace(workload, prefill_step=usual_step), self.gpus[0].gpu))
        whole = _range(map(sum, parts), percents)
        reply = self._reply() if tokens == self.workload.prompt_tokens else None
        return FirstToken(
            prompt_tokens=tokens,
            seconds=_rounded(own),
            range_seconds=_both(whole),
            prefill_seconds=_rounded(parts[0][0]),
            prefill_range_seconds=_both(_range((prefill for prefill, _ in parts), percents)),
            decode_range_seconds=_both(reply) if reply else UNSET,
            turn_range_seconds=_both((whole[0] + reply[0], whole[1] + reply[1]))
            if reply
            else UNSET,
            at_usual_step_seconds=_rounded(usual) if own > usual * _STEP_COSTS else UNSET,
        )

    def _reply(self) -> tuple[float, float] | None:
        """Return the least and the most seconds of the reply, None without a speed or a reply."""
        generated = self.workload.max_tokens
        speed = decode_speed(self.sized, self.workload) if generated else None
        if speed is None or speed.range_tokens_per_second is None:
            return None
        slowest, fastest = speed.range_tokens_per_second
        return generated / fastest, generated / slowest

    def _range_percent(self, workload: Workload) -> tuple[int, int]:
        new = workload.prompt_tokens - workload.cached_tokens
        return _SHORT if new < SHORT_TOKENS else self.gpus[0].range_percent

    def _seconds(self, workload: Workload, gpu: Gpu) -> tuple[float, float]:
        """Return the seconds of a run's start and chunks, and of the prompt's last token."""
        cached, step = workload.cached_tokens, workload.prefill_step
        whole, rest = divmod(workload.prompt_tokens - 1 - cached, step)
        chunk = partial(chunk_seconds, self.subject, gpu)
        total = _whole_chunks(whole, lambda number: chunk(step, cached + number * step))
        if rest:
            total += chunk(rest, cached + whole * step)
        last = weight_bytes_read(self.sized.footprint, self.sized.model) / gpu.bytes
        start = gpu.rates.start_seconds_per_gb * self.sized.resident_bytes / 1e9
        return total + start, last


def first_tokens(
    sized: SizedModel, workload: Workload, prompts: Iterable[int] = ()
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
    fewest, most = chip.cores(device)
    gpus = tuple(
        gpu_of(chip, cores, sized.model.dtype, has_matrix_units=has_nax(device))
        for cores in dict.fromkeys((most, fewest))
    )
    prompt = _Prompt(sized, workload, subject, gpus)
    tokens = dict.fromkeys((workload.prompt_tokens, *prompts))
    return tuple(prompt.first_token(each) for each in tokens if each > workload.cached_tokens)


def _range(seconds: Iterable[float], percents: tuple[int, int]) -> tuple[float, float]:
    """Return the least and the most to expect, by the fastest GPU and by the slowest."""
    low, high = percents
    most = list(seconds)
    return min(most) * low / 100, max(most) * high / 100


def _both(seconds: tuple[float, float]) -> tuple[float, float]:
    return _rounded(seconds[0]), _rounded(seconds[1])


def _rounded(seconds: float) -> float:
    return round(seconds, 1 if seconds >= 1 else 2)


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
