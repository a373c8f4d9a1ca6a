"""What `memfit tune train` measured of a recipe on this machine, for its plan."""

from msgspec.structs import replace

from memfit.estimators.checkpoint.fingerprint import fingerprint_of
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import Device
from memfit.estimators.results.train import MeasuredPhases, TrainPlan
from memfit.estimators.runtimes.measurement import MeasuredTraining
from memfit.estimators.sizing.measurement_lookup import is_of
from memfit.probes.measurement_lookup import installed_versions
from memfit.probes.store import Store


def saved_phases(
    plan: TrainPlan, checkpoint: Checkpoint, device: Device | None, store: Store
) -> MeasuredPhases | None:
    """Return the newest valid measurement of a plan's recipe, None without one."""
    if device is None or plan.weight_bits or not checkpoint.header_sha256:
        return None
    found = None
    for each in store.of(fingerprint_of(checkpoint)).measurements:
        training = each.training
        if training and is_of(each, device, installed_versions()) and _is_same(training, plan):
            found = MeasuredPhases(
                measurement_id=each.id,
                validation_bytes=training.validation_bytes,
                first_step_bytes=training.first_step_bytes,
                later_steps_bytes=training.later_steps_bytes,
            )
    return found


def _is_same(training: MeasuredTraining, plan: TrainPlan) -> bool:
    recipe = training.recipe
    if recipe.num_layers < 1:
        recipe = replace(recipe, num_layers=plan.layers)
    # The loss takes as much memory with a mask.
    asked = replace(plan.recipe, max_seq_length=plan.sequence_tokens, mask_prompt=False)
    return replace(recipe, mask_prompt=False) == asked
