"""What mlx_lm.convert takes for a model: files read and written, and the memory on the way."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import prod

from msgspec.structs import replace

from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.kernels import allocated
from memfit.estimators.results.advice import ConversionMemory
from memfit.estimators.runtimes.facets import MlxLmPrograms
from memfit.estimators.runtimes.runtime import Need, judge
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.estimators.trace.conversion_peak import Parameter, conversion_peak
from memfit.estimators.weights.conversion import (
    class_order,
    conversion_type,
    converted_parameters,
    described_tensors,
)
from memfit.estimators.weights.derived import TensorGroup
from memfit.estimators.weights.loading import Conversion, layer_of

# mlx-lm utils.py, MAX_FILE_SIZE_GB and make_shards: a larger array has a shard of its own.
_SHARD_BYTES = 5 << 30
# Of more files these are followed, each by itself: most have the same layers in other numbers.
_FOLLOWED = 4
ERROR_PERCENT = 12
"""By how much a published peak on a Mac differs from the upper end at most: docs/accuracy.md."""
_ANY_MAC = Device("Mac", "metal", 0, 0, None, "flag", "s", None)


def conversion_memory(sized: SizedModel) -> ConversionMemory | None:
    """Return what the conversion of a model takes on its device, or on a Mac without one.

    There is none for a model that is not converted, or not by mlx_lm.convert.
    """
    plan = sized.footprint.plan
    is_converted = plan is not None and plan.converting and not sized.footprint.of_original
    subject = sized.runtime_model.subject
    if not is_converted or subject.rank or not sized.runtime_model.facet(MlxLmPrograms):
        return None
    parameters = tuple(_parameters(sized))
    written = [each for parameter in parameters for each in parameter.written]
    shards = _shards(written)
    sizes = {each.name: each.nbytes for each in written}
    shard_bytes = [sum(sizes[name] for name in shard) for shard in shards]
    peaks = _peaks(parameters, shards, sized.device or _ANY_MAC)
    result = ConversionMemory(
        source_bytes=sized.checkpoint.file_bytes or sum(p.source.nbytes for p in parameters),
        is_local=sized.checkpoint.source == "local",
        output_bytes=sum(shard_bytes),
        shards=len(shards),
        largest_shard_bytes=max(shard_bytes),
        largest_array_bytes=max(max(p.source.nbytes, p.cast.nbytes) for p in parameters),
        least_peak_bytes=min(peaks),
        peak_bytes=max(peaks),
        verdict="unknown",
    )
    return judged(result, sized)


def judged(conversion: ConversionMemory, sized: SizedModel) -> ConversionMemory:
    """Return what a conversion takes with the verdict on a model's device."""
    device = sized.device or _ANY_MAC
    error_percent = ERROR_PERCENT if device.backend == "metal" else 0
    need = Need(
        conversion.peak_bytes + sized.margin_bytes,
        allocated(conversion.largest_array_bytes, device.backend),
        error_bytes=conversion.peak_bytes * error_percent // 100,
    )
    return replace(conversion, verdict=judge(need, sized.device)[0])


def _peaks(parameters: Sequence[Parameter], shards: list[list[str]], device: Device) -> list[int]:
    """Return the peak of each order that is followed."""
    by_name = {each.name: parameter for parameter in parameters for each in parameter.written}
    # The order of evaluation is that of a C++ hash map over the names, which differs between
    # standard libraries.
    orders = _STACKED if any(parameter.reads > 1 for parameter in parameters) else _MIXED
    runs = _followed(shards)
    return [
        max(conversion_peak(by_name, map(order, run), device) for run in runs) for order in orders
    ]


def _parameters(sized: SizedModel) -> Iterator[Parameter]:
    """Yield what the converter loads, in the order of the class, with what it writes of it."""
    footprint, model, config = sized.footprint, sized.model, sized.checkpoint.config
    assert footprint.plan is not None
    order = {path: place for place, (path, _) in enumerate(class_order(model))}
    stored = sorted(
        footprint.converted_from or described_tensors(model),
        key=lambda group: order.get(group.name, order.get(group.name.rpartition(".")[0], 0)),
    )
    made = {(each.layer, each.elements): each for each in footprint.converter_reads}
    for each in converted_parameters(stored, model, footprint.plan, conversion_type(config)):
        reads, temporary_bytes = 1, 0
        if footprint.converted_from:
            reads, temporary_bytes = _reads(each.source, made)
        elif len(each.source.shape) > 2 and each.module.quantizable:
            # Without headers: the Hub has one matrix for each expert, which takes the most.
            reads = each.source.shape[0]
        yield Parameter(each.source, each.cast, each.written, reads, temporary_bytes)


def _reads(source: TensorGroup, made: dict[tuple[str, int], Conversion]) -> tuple[int, int]:
    """Return of how many arrays of files a parameter is stacked, and what each takes on the way."""
    conversion = made.get((layer_of(source.name), prod(source.shape)))
    if conversion is None:
        return 1, 0
    is_stacked = len(source.shape) > 1 and conversion.reads == source.shape[0]
    return (conversion.reads if is_stacked else 1), conversion.temporary


def _shards(written: Iterable[TensorGroup]) -> list[list[str]]:
    """Return the names of each file's arrays, as make_shards of mlx-lm divides them."""
    shards: list[list[str]] = []
    nbytes = 0
    for each in written:
        if not shards or nbytes + each.nbytes > _SHARD_BYTES:
            shards.append([])
            nbytes = 0
        shards[-1].append(each.name)
        nbytes += each.nbytes
    return shards


def _followed(shards: list[list[str]]) -> list[list[list[str]]]:
    """Return the files to follow, in the runs of them that are followed together."""
    if len(shards) <= _FOLLOWED:
        return [shards]
    # The first has the embedding, the last two the head.
    return [[shards[place]] for place in (0, len(shards) // 2, -2, -1)]


def _shuffled(shard: Sequence[str], seed: int) -> Sequence[str]:
    # The same in every run: nothing here is a secret.
    return random.Random(seed).sample(shard, len(shard))


def _by_leaf(shard: Sequence[str]) -> Sequence[str]:
    """Return all words, then all scales and biases: then most stacks wait for one another."""
    return sorted(shard, key=lambda name: _LEAVES.get(name.rpartition(".")[2], 0))


_LEAVES = {"scales": 1, "biases": 2}
_Order = Callable[[Sequence[str]], Sequence[str]]
_MIXED: tuple[_Order, ...] = (
    lambda shard: shard,
    lambda shard: shard[::-1],
    partial(_shuffled, seed=0),
    partial(_shuffled, seed=1),
)
_STACKED: tuple[_Order, ...] = (_MIXED[0], _by_leaf)
