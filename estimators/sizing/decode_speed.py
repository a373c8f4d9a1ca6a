"""Decode speed: an upper bound from the bytes that each token has to read from memory.

At small batches decoding is limited by memory: a step reads all weights it uses once, and the
cache of each sequence. Batch x bandwidth / bytes is never exceeded. What to expect of one sequence
is the time of these bytes and that of starting the kernels of each layer
(`python -m benchmarks.decode_speed` compares it with runs that it was not read from).
"""

from collections.abc import Sequence
from fractions import Fraction
from math import ceil, floor

from msgspec import UNSET
from msgspec.structs import replace

from memfit.estimators.arch.model import Model, Part
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.chips import chip_of
from memfit.estimators.results.estimate import DecodeSpeed
from memfit.estimators.runtimes.facets import MlxLmPrograms, SplitMemory, decoding_rows
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.estimators.weights.footprint import WeightFootprint

# What every step reads whole. Of the embedding it reads a row, of a vision tower nothing; what is
# of no known part counts as nothing, so that the bound stays one.
_READ = (Part.ATTENTION, Part.MLP, Part.SHARED_EXPERTS, Part.ROUTER, Part.NORM)

# One line through the seven runs of Qwen3-4B (16 to 4 bits) on an M4 Max in mlx-lm's BENCHMARKS.md,
# all within 2 %: bytes at this percent of the bandwidth, and seconds for each layer.
_BANDWIDTH_PERCENT = 91
_LAYER_SECONDS = 63e-6
# Of a layer with experts in addition: the four runs of Qwen3-30B-A3B there, within 3 %.
_EXPERTS_SECONDS = 44e-6
# Of the layers of a hybrid on average: Qwen3.5-9B on an M2 Max (Rapid-MLX, July 2026).
_STATES_SECONDS = 37e-6
_FITTED_HERTZ = 1.578e9
"""The clock of the M4 Max: of a chip with a slower one, kernels start as much later."""
RANGE_PERCENT = (75, 115)
"""Of the expected speed, within which published runs of mlx_lm on other chips are."""


def decode_speed(sized: SizedModel, workload: Workload) -> DecodeSpeed | None:
    """Return how fast a workload can decode at most, None where the device does not say.

    Raises:
        UnsupportedError: when the runtime cannot run the workload.
    """
    bandwidth = sized.device.bandwidth_bytes if sized.device else None
    if bandwidth is None:
        return None
    # A step reads the caches of the run, not those that are stored.
    workload = replace(workload, cached_tokens=0)
    figures = sized.figures_for(workload)
    # The cache when the prompt is done: the smallest of the run.
    rows = decoding_rows(sized.runtime_model, workload)
    generated = workload.max_tokens * rows * figures.kv.bytes_per_token
    cached = max(0, figures.kv.held_bytes - generated) + figures.ssm_bytes
    read = weight_bytes_read(sized.footprint, sized.model) + cached
    split = sized.runtime_model.facet(SplitMemory)
    host = split.host_reads(workload) if split else None
    # What is on the host is read by its processor, before or after what is on the GPU.
    on_host = min(read, host.nbytes) if host else 0
    seconds = Fraction(read - on_host, bandwidth)
    if host:
        seconds += Fraction(on_host, host.bandwidth_bytes)
    most = ceil(10 * rows / seconds)
    is_plain = rows == 1 and not host and not sized.draft
    expected = _expected(sized, seconds) if is_plain else None
    low, high = RANGE_PERCENT
    three: tuple[float, ...] = ()
    if expected:
        shares = (floor(10 * expected * percent / 100) for percent in (low, 100, high))
        three = tuple(min(most, share) / 10 for share in shares)
    return DecodeSpeed(
        bytes_per_step=read,
        bandwidth_bytes_per_second=ceil(read / seconds),
        most_tokens_per_second=most / 10,
        expected_tokens_per_second=three or None,
        range_tokens_per_second=(three[0], three[-1]) if three else None,
        host_bytes_per_step=on_host or UNSET,
        host_bandwidth_bytes_per_second=host.bandwidth_bytes if host and on_host else UNSET,
    )


def _expected(sized: SizedModel, least_seconds: Fraction) -> float | None:
    """Return the tokens a second to expect of mlx_lm, None where the chip is not known."""
    device, model = sized.device, sized.model
    chip = chip_of(device) if device and device.backend == "metal" else None
    if chip is None or not sized.runtime_model.facet(MlxLmPrograms):
        return None
    group, of_layer = kind(model), _LAYER_SECONDS
    of_layer += _EXPERTS_SECONDS if model.experts() else 0
    of_layer += _STATES_SECONDS if group.startswith("hybrid") else 0
    starts = len(model.layers) * of_layer * _FITTED_HERTZ / chip.gpu_hertz
    return 1 / (float(least_seconds) * 100 / _BANDWIDTH_PERCENT + starts)


def pipeline_speed(ranks: Sequence[SizedModel], workload: Workload) -> DecodeSpeed | None:
    """Return how fast a pipeline can decode at most, without the time of its messages.

    Its ranks read their layers one after the other, then all read the head (mlx-lm qwen2.py).
    """
    speeds = [decode_speed(sized, workload) for sized in ranks]
    layers = heads = Fraction()
    read = head_bytes = 0
    for sized, speed in zip(ranks, speeds, strict=True):
        if speed is None:
            return None
        head = _head(sized.footprint, sized.model)
        layers += Fraction(speed.bytes_per_step - head, speed.bandwidth_bytes_per_second)
        heads = max(heads, Fraction(head, speed.bandwidth_bytes_per_second))
        read, head_bytes = read + speed.bytes_per_step - head, max(head_bytes, head)
    seconds = layers + heads
    return DecodeSpeed(
        bytes_per_step=read + head_bytes,
        bandwidth_bytes_per_second=ceil((read + head_bytes) / seconds),
        most_tokens_per_second=ceil(10 * workload.batch / seconds) / 10,
        expected_tokens_per_second=None,
        range_tokens_per_second=None,
    )


def weight_bytes_read(footprint: WeightFootprint, model: Model) -> int:
    """Return the bytes of weights that a decode step of one sequence reads at least."""
    read = sum(footprint.kept(part) for part in _READ) + _head(footprint, model)
    routed = tuple(model.experts().values())
    if routed:
        chosen, there = sum(e.top_k for e in routed), sum(e.experts for e in routed)
        read += footprint.kept(Part.EXPERTS) * min(chosen, there) // there
    return read


def _head(footprint: WeightFootprint, model: Model) -> int:
    """The head, or the embedding as it reads it: no tables of other inputs (Gemma 3n, Gemma 4)."""
    if footprint.by_part[Part.HEAD.value]:
        return footprint.kept(Part.HEAD)
    tables = [module for module in model.modules if module.part is Part.EMBEDDING]
    head = [m.elements for m in tables if m.shape == (model.vocab_size, model.hidden_size)]
    if not head:
        return 0
    return footprint.kept(Part.EMBEDDING) * head[0] // sum(m.elements for m in tables)


def kind(model: Model) -> str:
    """Return the group of models with the measured share that applies."""
    mixture = "moe" if model.experts() else "dense"
    return f"hybrid {mixture}" if any(True for _ in model.states()) else mixture
