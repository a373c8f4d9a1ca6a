"""The most memory of the trainer's calls, by following them through MLX's allocator.

Loops over tokens are followed in two recordings that are shorter than the loops. Each iteration
adds the same operations on arrays of the same sizes. So what a loop keeps at one point of its way
through a step grows by the same bytes with each iteration, but for what is under way there: MLX's
order of the operations shifts with their number.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from memfit.estimators.base.units import ceil_div
from memfit.estimators.base.workload import CallPhase
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.kernels import allocated
from memfit.estimators.mlx.versions import Version
from memfit.estimators.trace.graph_format import Call, Node
from memfit.estimators.trace.replay import CallPeak, CallReplay
from memfit.estimators.trace.training_recorder import GRADIENTS, LOGITS, Training

_LOOP = "loop over tokens"
_POINTS = 24
_Kind = tuple[str, tuple[int, ...], str]


class _Point(NamedTuple):
    """The most in use on a part of the way of a call, and the most of the loop's there."""

    nbytes: int
    loop_bytes: int
    alive: Mapping[str, int]


class LoopGrowth:
    """What each point of the calls of a run grows by until its loops are whole."""

    def __init__(
        self, shorter: Training, device: Device, mlx: Version, *, added: int, lacking: int
    ) -> None:
        """Take a run with ``added`` iterations less than the one that lacks ``lacking``."""
        self._shorter, self._replay = shorter, CallReplay(device, mlx)
        self._added, self._lacking = added, lacking

    def follow(
        self, index: int, call: Call, labels: Mapping[int, str], replay: CallReplay
    ) -> CallPeak[CallPhase]:
        """Return the highest moment of a call of the longer run with its loops continued."""
        _, less, _ = self._shorter.calls[index]
        grown = Counter(_kinds(call)) - Counter(_kinds(less))
        _, before = _followed(less, {}, grown, self._replay)
        self._replay.wait()
        highest, after = _followed(call, labels, grown, replay)

        def whole(position: int) -> int:
            rise = max(0, after[position].loop_bytes - before[position].loop_bytes)
            return after[position].nbytes + ceil_div(rise * self._lacking, self._added)

        top = max(range(len(after)), key=whole)
        return replace(highest, nbytes=whole(top), alive=tuple(after[top].alive.items()))


def _kinds(call: Call) -> Iterator[_Kind]:
    return (_kind(node, call) for node in call.nodes)


def _kind(node: Node, call: Call) -> _Kind:
    array = call.arrays[node.outputs[0]]
    return node.name, array.shape, array.dtype


def _followed(
    call: Call, labels: Mapping[int, str], grown: Mapping[_Kind, int], replay: CallReplay
) -> tuple[CallPeak[CallPhase], list[_Point]]:
    """Return the highest moment of a call, and its points by how much of the loops is done."""
    of_loop = [_kind(node, call) in grown for node in call.nodes]
    looped = (
        node.outputs for node, is_looped in zip(call.nodes, of_loop, strict=True) if is_looped
    )
    placed = replay.place(call)
    begun = replay.clock
    named = {out: _LOOP for outputs in looped for out in outputs} | dict(labels)
    highest = replay.run(placed, labels=named)
    changes: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for buffer in replay.buffers:
        name = buffer.operation if buffer.operation in (_LOOP, GRADIENTS, LOGITS) else ""
        changes[max(begun, buffer.born)][name] += buffer.nbytes
        if buffer.died is not None:
            changes[buffer.died + 1][name] -= buffer.nbytes
    points = [_Point(0, 0, {})] * (_POINTS + 1)
    alive, done, total = changes[begun], 0, max(1, sum(of_loop))
    for clock, position in enumerate(placed.order, begun + 1):
        alive.update(changes[clock])
        part = done * _POINTS // total
        now, known = alive.total(), points[part]
        if now > known.nbytes:
            known = _Point(now, known.loop_bytes, dict(alive))
        points[part] = known._replace(loop_bytes=max(known.loop_bytes, alive[_LOOP]))
        done += of_loop[position]
    return highest, points


class TrainingPeak(NamedTuple):
    """The bytes of one recipe on one device; the moments have the weights in them."""

    frozen_bytes: int
    trained_bytes: int
    optimizer_bytes: int
    validation: CallPeak[CallPhase] | None
    first: CallPeak[CallPhase] | None
    later: CallPeak[CallPhase]
    largest_parameter_bytes: int
    is_continued: bool
    """Whether a loop over tokens was traced for a few of them only: `LoopGrowth`."""
    constants: int = 0
    """Buffers that the compiled steps keep for each length of batches."""
    parameters: int = 0
    """Arrays of the model and of the optimizer."""

    @property
    def moments(self) -> tuple[CallPeak[CallPhase], ...]:
        """What was recorded of the validation, the first step and the later ones."""
        result = self.later, self.first, self.validation
        return tuple(moment for moment in result if moment)


def training_peak(
    training: Training, device: Device, mlx_version: Version, growth: LoopGrowth | None = None
) -> TrainingPeak:
    """Return the largest moments of a recorded run on a device.

    ``growth`` is what its calls lack where their loops over tokens were shortened.
    """
    sizes = [
        sum(allocated(nbytes, device.backend) for nbytes in each.values())
        for each in (training.frozen, training.trained, training.optimizer)
    ]
    frozen, trained, optimizer = sizes
    moments: dict[str, CallPeak[CallPhase]] = {}
    replay = CallReplay(device, mlx_version)
    for index, (phase, call, labels) in enumerate(training.calls):
        if growth:
            top = growth.follow(index, call, labels, replay)
        else:
            top = replay.follow(call, labels=labels)
        # The trainer waits for each step, and gives the freed buffers back.
        replay.wait()
        # A validation holds all parameters as weights; later ones run next to the optimizer.
        around = sum(sizes) if phase == "validation" else frozen
        top = replace(top, nbytes=around + top.nbytes, curve=())
        if phase not in moments or top.nbytes > moments[phase].nbytes:
            moments[phase] = top
    return TrainingPeak(
        frozen_bytes=frozen,
        trained_bytes=trained,
        optimizer_bytes=optimizer,
        validation=moments.get("validation"),
        # One more or less of its operations is within the error of a loop that is continued.
        first=moments["later"] if growth else moments.get("first"),
        later=moments["later"],
        largest_parameter_bytes=max((*training.frozen.values(), *training.trained.values())),
        is_continued=growth is not None,
        constants=training.constants,
        parameters=sum(map(len, (training.frozen, training.trained, training.optimizer))),
    )
