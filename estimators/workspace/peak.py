"""The largest moment of a run by the formula: load, every chunk of prefill, decode.

The transient is derived, not fitted: each layer's operations are written down as mlx-lm's class
makes them, and follow MLX's scheduler. docs/accuracy.md compares it with measurements.

mx.eval(model.parameters()) reads every file's arrays and stacks or converts them (mlx-lm utils.py,
load_model). The arrays that it starts from are in use until the device has made the others.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import groupby
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.arch.model import Model
from memfit.estimators.base.units import ceil_div
from memfit.estimators.base.workload import CallPhase, Workload
from memfit.estimators.machine.device import ANY_MAC, Backend, Device
from memfit.estimators.mlx.kernels import KEPT_BYTES, allocated
from memfit.estimators.mlx.scheduler import (
    CPU_DISPATCHES_PER_TASK,
    MAX_ACTIVE_TASKS,
    BatchLimits,
    BatchQueue,
    ReadQueue,
    TaskQueue,
    WorkQueue,
    command_buffer_limits,
    gpu_limits,
)
from memfit.estimators.mlx.versions import MlxVersions
from memfit.estimators.results.terms import PeakMoment
from memfit.estimators.weights.derived import QuantizationPlan
from memfit.estimators.weights.loading import Conversion, CutArray, FirstArray
from memfit.estimators.workspace.call import BackendTraits
from memfit.estimators.workspace.moments import CallMoment, RunMoments
from memfit.estimators.workspace.prepared import PreparedModel, backend_traits, prepare
from memfit.estimators.workspace.tape import formula_limits

ERROR_PERCENT = 25
"""How far the workspace may be off: docs/accuracy.md has the measurements."""


def peak(
    model: Model,
    workload: Workload,
    *,
    resident_bytes: int,
    plan: QuantizationPlan | None,
    device: Device | None,
    versions: MlxVersions = MlxVersions(),  # noqa: B008 - a tuple
    keeps_up: bool = False,
    has_decode: bool = True,
) -> PeakMoment:
    """Return the largest moment of a run with weights of ``resident_bytes``.

    What depends on the model alone is computed once for each (model, plan, device, versions). A
    GPU that ``keeps_up`` has run each batch of work when the next is given. Without ``has_decode``
    it ends with the chunks of the prompt.

    Raises:
        UnsupportedError: when MLX is older than the oldest kernels described.
    """
    prepared = prepared_model(model, plan, device, versions)
    if keeps_up and prepared.limits:
        prepared = prepared.on(prepared.traits, replace(prepared.limits, in_flight=0))
    run = RunMoments(prepared, workload, resident_bytes)
    moments = list(run.moments(has_decode=has_decode))
    best = max(moments, key=lambda moment: moment.nbytes)
    held, phase = max((moment.nbytes + _kept(moment, prepared), moment.phase) for moment in moments)
    largest, name = max(
        (prepared.largest_weight, "weight"), *((m.largest, m.largest_name) for m in moments)
    )
    return PeakMoment(
        phase=best.phase,
        nbytes=best.nbytes,
        # The largest moment can be in a chunk, before the caches have their final size.
        workspace_bytes=max(0, best.nbytes - resident_bytes - run.caches.kept_bytes()),
        largest_buffer_bytes=largest,
        largest_buffer=name,
        explanation=(best.explanation,),
        # Loading comes before the first token, so it belongs to prefill.
        prefill_bytes=max(m.nbytes for m in moments if m.phase != "decode"),
        decode_bytes=max((m.nbytes for m in moments if m.phase == "decode"), default=None),
        call_bytes=_of_calls(moments),
        held_bytes=held,
        held_phase=phase,
    )


def _kept(moment: CallMoment, prepared: PreparedModel) -> int:
    """Return what MLX keeps of the caches that a call replaces: the next ones are too large for it.

    mlx-lm clears after each chunk and every 256 tokens, in which a cache grows once. The workspace
    is taken as reused from operation to operation.
    """
    most = KEPT_BYTES[prepared.traits.backend]
    return moment.replaced_bytes if most is None else min(moment.replaced_bytes, most)


def _of_calls(moments: Sequence[CallMoment]) -> dict[CallPhase, int]:
    """The most in use during each call: a conversion may be above the chunk that it follows."""
    result: dict[CallPhase, int] = {}
    for moment in moments:
        if moment.call:
            result[moment.call] = max(moment.nbytes, result.get(moment.call, 0))
    return result


def prepared_model(
    model: Model,
    plan: QuantizationPlan | None,
    device: Device | None,
    versions: MlxVersions = MlxVersions(),  # noqa: B008 - a tuple
) -> PreparedModel:
    """Return what of a model on a device no workload changes; the same for the same objects."""
    device = device or ANY_MAC
    # By what the formula needs of the device: many Macs differ in their memory alone.
    traits, limits = backend_traits(device, versions), formula_limits(device)
    return _prepared(_Same(model), _Same(plan), traits, limits)


class _Same(Struct, eq=False):
    """A key that compares by identity: to hash a whole model costs more than a peak."""

    value: object

    def __hash__(self) -> int:
        # The key refers to the value, so no other object can get its id while the key exists.
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


# A grid has a plan for each number of bits, on a few kinds of GPU.
@lru_cache(maxsize=32)
def _prepared(
    model: _Same, plan: _Same, traits: BackendTraits, limits: BatchLimits | None
) -> PreparedModel:
    return _planned(model, plan).on(traits, limits)


@lru_cache(maxsize=8)
def _planned(model: _Same, plan: _Same) -> PreparedModel:
    assert isinstance(model.value, Model)
    packing = plan.value if isinstance(plan.value, QuantizationPlan) else None
    return prepare(model.value, ANY_MAC, versions=MlxVersions(), packing=packing)


# Arrays that wait on MLX's tape (mlx utils.h, MLX_BFS_MAX_WIDTH): they are read, a view each, and
# copied before the first of them is done with.
_WIDTH = 20
# Dispatches of the tasks under way and of the open one; ten reads are a task (mlx common/load.cpp).
_IN_FLIGHT = (MAX_ACTIVE_TASKS + 1) * CPU_DISPATCHES_PER_TASK
_READ_AND_VIEW = 2
# As many batches of a large GPU, each closed above this many elements, of four bytes.
_LIMITS = command_buffer_limits("s")
_GPU_TEMPORARIES = (MAX_ACTIVE_TASKS + 1) * (_LIMITS.max_mebi_elements << 20) * 4


class CutLoad(NamedTuple):
    """The most bytes in use while a rank reads whole arrays and copies its part of each."""

    expected: int
    """With reads and copies done in their order: what is under way is limited in number."""
    most: int
    """With files that are in the system's cache: reads take no time, and the GPU falls behind by
    all the batches that MLX lets it."""


@lru_cache(maxsize=8)
def cut_load(cut: tuple[CutArray, ...], device: Device) -> CutLoad:
    """Return the load of a tensor-parallel rank.

    MLX reads as many arrays as wait on its tape, then copies these (mlx transforms.cpp, eval_impl).
    It waits for the GPU and for reads by counting tasks: which of them are done first depends on
    disk and GPU. Which arrays of a layer are on the tape together is not known, so that the largest
    of several orders counts. On the CPU reads and copies are one queue.
    """
    if device.backend == "cpu":
        tasks = TaskQueue[int]()
        expected = _walk(cut, 0, device, tasks, partial(tasks.submit, 0, 1, 0))
        return CutLoad(expected, expected)
    limits = gpu_limits(device)
    expected = most = 0
    for order in _orders(cut):
        for start in range(_WIDTH):
            reads = ReadQueue[int](limits)
            expected = max(expected, _walk(order, start, device, reads, reads.read))
            most = max(most, _walk(order, start, device, BatchQueue[int](limits), _at_once))
    return CutLoad(expected, max(expected, most))


def _at_once() -> Iterable[int]:
    return ()


def _orders(cut: Sequence[CutArray]) -> Iterator[Sequence[CutArray]]:
    """Yield the arrays in orders that leave each in its layer."""
    layers = [list(layer) for _, layer in groupby(cut, key=lambda array: array.layer)]
    yield cut
    for sign in (1, -1):
        yield [
            array
            for layer in layers
            for array in sorted(layer, key=lambda array: sign * array.read_bytes)
        ]


def _walk(
    cut: Sequence[CutArray],
    start: int,
    device: Device,
    queue: WorkQueue[int],
    read: Callable[[], Iterable[int]],
) -> int:
    """Return the most in use where the first arrays on the tape are ``start``, later ones more."""
    active = most = 0
    for first in range(start - _WIDTH, len(cut), _WIDTH):
        group = cut[max(0, first) : first + _WIDTH]
        for array in group:
            active += allocated(array.read_bytes, device.backend) - sum(read())
        copied = [array for array in group if array.kept_bytes < array.read_bytes]
        if device.backend == "cpu":
            for _ in copied:
                active -= sum(queue.submit(0, 0, 0))
        most = max(most, active)
        for array in copied:
            active += allocated(array.kept_bytes, device.backend)
            most = max(most, active)
            whole = allocated(array.read_bytes, device.backend)
            active -= sum(queue.submit(whole, 1, 2 * array.kept_elements))
    return most


def first_load(first: FirstArray, loaded_bytes: int) -> int:
    """Return a bound on what is in use while the first array is made, within what others take.

    Others are read meanwhile, and may be stacked already.
    """
    return min(loaded_bytes, first.nbytes + 2 * first.ahead_bytes) + first.on_the_way_bytes


def load_extra(made: Sequence[Conversion], *, backend: Backend) -> int:
    """Return the most bytes in use beyond the weights: a bound by the largest conversions.

    The GPU is taken as faster than the disk, so that reads are what is in flight.
    """
    on_cpu = backend == "cpu"
    # Each array that was read is an allocation of its own.
    made = [
        each._replace(nbytes=each.reads * allocated(ceil_div(each.nbytes, each.reads), backend))
        if each.reads
        else each
        for each in made
    ]
    return _held(made, on_cpu=on_cpu) + _temporaries(made, on_cpu=on_cpu)


def _held(made: Iterable[Conversion], *, on_cpu: bool) -> int:
    """Return the most bytes that arrays are made from and that are still in use."""
    held_by = (each for each in made if each.nbytes)
    largest = sorted(held_by, key=lambda each: each.nbytes, reverse=True)
    # MLX reads what all arrays on the tape are made from, and then makes them one after another.
    most = _on_tape(largest, lambda each: each.nbytes)
    together, nbytes = 0, 0
    while nbytes < most:
        nbytes += largest[together].nbytes
        together += 1
    # Those of the tape before are in use while later ones, with their reads, are in flight.
    later, room = 0, _IN_FLIGHT
    for count, each in enumerate(largest):
        held, left = later, room
        for before in largest[count : count + together]:
            if left <= 0:
                break
            held += before.nbytes
            left -= _made(before, on_cpu=on_cpu)
        most = max(most, held)
        later += each.nbytes
        room -= _made(each, on_cpu=on_cpu) + each.reads * (_READ_AND_VIEW if on_cpu else 1)
        if room <= 0:
            break
    return most


def _made(each: Conversion, *, on_cpu: bool) -> int:
    """Return the dispatches that make an array; a batch of a GPU counts as ten reads."""
    if on_cpu:
        return each.reads + 1
    # Elements of four bytes at most, read and written.
    closes = each.nbytes // 2 > _LIMITS.max_mebi_elements << 20
    return CPU_DISPATCHES_PER_TASK * max(each.reads // _LIMITS.max_ops, closes)


def _temporaries(made: Iterable[Conversion], *, on_cpu: bool) -> int:
    """Return the most bytes of arrays on the way from those of files to those of the model."""
    largest = sorted(made, key=lambda each: each.temporary, reverse=True)
    # Arrays on the tape go step by step together: those of the model, or what one is stacked from.
    together = max(
        _on_tape(largest, lambda each: each.temporary),
        max((min(each.reads, _WIDTH) * each.temporary for each in largest), default=0),
    )
    if on_cpu:
        return together
    # Those before them are made one after another, and are in flight with their reads.
    one = largest[0].temporary if largest else 0
    in_flight, room = together, _IN_FLIGHT
    for each in largest:
        count = min(each.reads, ceil_div(max(0, room), each.loads))
        in_flight += count * each.temporary
        room -= count * each.loads
    total = sum(each.reads * each.temporary for each in largest)
    return min(total, in_flight, max(together, one + _GPU_TEMPORARIES))


class _Layer(NamedTuple):
    arrays: int
    """How many it has."""
    largest: tuple[int, ...]
    """Bytes of its conversions, the most first."""


def _on_tape(made: Iterable[Conversion], nbytes: Callable[[Conversion], int]) -> int:
    """Return the most bytes of conversions into arrays that are on the tape at once.

    The arrays on it follow one another in the model, of which the order within a layer is not
    known, but that it is the same in layers that are alike.
    """
    layers = _layers(made, nbytes)
    most, seen = 0, set[tuple[_Layer, ...]]()
    for first in range(len(layers)):
        following = layers[first : first + _WIDTH]
        if following not in seen:
            seen.add(following)
            most = max(most, _largest_from(following))
    return most


def _largest_from(layers: Sequence[_Layer]) -> int:
    """Return the most bytes on a tape that begins in the first of some layers."""
    first, *others = layers
    most, between, room = sum(first.largest[:_WIDTH]), 0, _WIDTH
    for last in others:
        # Parts of two layers that are alike have other places in them.
        ends = first.largest if last == first else (*first.largest, *last.largest)
        twice = sum(first.largest[: max(0, room - first.arrays)]) if last == first else 0
        most = max(most, between + twice + sum(sorted(ends, reverse=True)[:room]))
        between += sum(last.largest)
        room -= last.arrays
        if room < 2:
            break
    return most


def _layers(made: Iterable[Conversion], nbytes: Callable[[Conversion], int]) -> tuple[_Layer, ...]:
    """Return the layers with conversions in the order of the model."""
    sizes: defaultdict[tuple[str, int, int], list[int]] = defaultdict(list)
    for each in made:
        path, _, number = each.layer.rpartition(".")
        sizes[path, int(number or 0), each.layer_arrays].append(nbytes(each))
    return tuple(_Layer(key[2], tuple(sorted(sizes[key], reverse=True))) for key in sorted(sizes))
