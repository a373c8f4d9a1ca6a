"""The most memory of the trainer's calls, by following them through MLX's allocator."""

from typing import NamedTuple

from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.allocator import allocated
from memfit.estimators.mlx.versions import Version
from memfit.estimators.trace.peak import Highest, Replay
from memfit.estimators.trace.training_loop import LoopGrowth
from memfit.estimators.trace.training_recorder import GRADIENTS, LOGITS, Training


class TrainingMoment(NamedTuple):
    """The largest moment of a call, and what is in use then, weights included."""

    nbytes: int
    gradient_bytes: int
    logits_bytes: int
    activation_bytes: int
    """What is neither of these, nor a parameter or a state of the optimizer."""
    largest_buffer_bytes: int
    operation: str


class TrainingPeak(NamedTuple):
    """The bytes of one recipe on one device."""

    frozen_bytes: int
    trained_bytes: int
    optimizer_bytes: int
    validation: TrainingMoment | None
    first: TrainingMoment | None
    later: TrainingMoment
    largest_parameter_bytes: int
    is_continued: bool
    """Whether a loop over tokens was traced for a few of them only: `LoopGrowth`."""

    @property
    def moments(self) -> tuple[TrainingMoment, ...]:
        """What was recorded of the validation, the first step and the later ones."""
        found = self.later, self.first, self.validation
        return tuple(moment for moment in found if moment)


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
    moments: dict[str, TrainingMoment] = {}
    replay = Replay(device, mlx_version)
    for index, (phase, call, labels) in enumerate(training.calls):
        highest = (
            growth.follow(index, call, labels, replay)
            if growth
            else replay.follow(call, labels=labels)
        )
        # The trainer waits for each step, and gives the freed buffers back.
        replay.wait()
        # A validation holds all parameters as weights; later ones run next to the optimizer.
        around = sum(sizes) if phase == "validation" else frozen
        moment = _moment(highest, around, trained + optimizer if around == frozen else 0)
        if phase not in moments or moment.nbytes > moments[phase].nbytes:
            moments[phase] = moment
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
    )


def _moment(highest: Highest, around: int, state: int) -> TrainingMoment:
    alive: dict[str, int] = dict(highest.alive)
    gradients, logits = alive.get(GRADIENTS, 0), alive.get(LOGITS, 0)
    return TrainingMoment(
        nbytes=around + highest.nbytes,
        gradient_bytes=gradients,
        logits_bytes=logits,
        activation_bytes=max(0, highest.nbytes - state - gradients - logits),
        largest_buffer_bytes=highest.largest,
        operation=highest.operation,
    )
