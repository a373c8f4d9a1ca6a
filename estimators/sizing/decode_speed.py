"""Decode speed: an upper bound from the bytes that each token has to read from memory.

At small batches decoding is limited by memory: a step reads all weights it uses once, and the
cache of each sequence. Batch x bandwidth / bytes is never exceeded; how much of it runs reach was
measured (`python -m benchmarks.decode_speed`).
"""

from collections.abc import Sequence
from fractions import Fraction
from math import ceil

from msgspec import UNSET
from msgspec.structs import replace

from memfit.estimators.arch.model import Model, Part
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.chips import chip_of, chips
from memfit.estimators.machine.device import Device
from memfit.estimators.results.estimate import DecodeSpeed
from memfit.estimators.runtimes.facets import MlxLmPrograms, SplitMemory, decoding_rows
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.estimators.weights.footprint import WeightFootprint

# What every step reads whole. Of the embedding it reads a row, of a vision tower nothing; what is
# of no known part counts as nothing, so that the bound stays one.
_READ = (Part.ATTENTION, Part.MLP, Part.SHARED_EXPERTS, Part.ROUTER, Part.NORM)

# Percent of the bound that published runs of mlx_lm reach: 10th percentile, median, 90th. Runs of
# one sequence on an M5 Max with 128 GB, 4 to 8 bits, prompts of 128 to 8,192 tokens. Computed by
# benchmarks/decode_speed.py.
REACHED_PERCENT = {
    "dense": (43, 56, 79),
    "moe": (45, 49, 53),
    "hybrid dense": (69, 81, 84),
    "hybrid moe": (33, 39, 48),
}
MEASURED_ON = "m5-max"
# Percent of any published run on any Mac: no run is above the second. Other chips have another
# bandwidth for each kernel that they start, and few published runs: an M4 Max reaches 63 to 80 with
# a dense model and 39 to 52 with a mixture, an M3 Pro 74 (mlx-lm's BENCHMARKS.md and #1569).
OTHER_CHIPS_PERCENT = {
    "dense": (43, 85),
    "moe": (39, 85),
    "hybrid dense": (43, 85),
    "hybrid moe": (33, 85),
}


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
    group = kind(sized.model)
    is_measured = sized.device is not None and _is_measured(sized.device)
    reached: tuple[int, ...] = ()
    if (
        sized.runtime_model.facet(MlxLmPrograms)
        and sized.device
        and sized.device.backend == "metal"
    ):
        reached = REACHED_PERCENT[group] if is_measured else OTHER_CHIPS_PERCENT[group]
    shares = tuple(most * percent // 100 / 10 for percent in reached)
    return DecodeSpeed(
        bytes_per_step=read,
        bandwidth_bytes_per_second=ceil(read / seconds),
        most_tokens_per_second=most / 10,
        expected_tokens_per_second=shares if is_measured and shares else None,
        range_tokens_per_second=(shares[0], shares[-1]) if shares else None,
        host_bytes_per_step=on_host or UNSET,
        host_bandwidth_bytes_per_second=host.bandwidth_bytes if host and on_host else UNSET,
    )


def _is_measured(device: Device) -> bool:
    """Whether the published runs are of such a GPU: one with fewer cores has less bandwidth."""
    return chip_of(device) is chips()[MEASURED_ON]


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
