"""``memfit plan convert``: the memory and the files of one conversion by mlx_lm.convert."""

from msgspec import UNSET

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.setting_names import setting
from memfit.estimators.mlx.versions import format_version
from memfit.estimators.results.convert import ConvertPlan
from memfit.estimators.results.estimate import Note
from memfit.estimators.sizing.advise import converting
from memfit.estimators.sizing.conversion import ERROR_PERCENT, conversion_memory
from memfit.estimators.sizing.estimate import device_summary
from memfit.estimators.sizing.sized_model import SizedModel

_ON_A_MAC = (
    f"the upper end of the memory is within {ERROR_PERCENT} % of the three peaks that are published"
    " from a Mac (mlx-lm issue 1121)"
)


def plan_convert(sized: SizedModel) -> ConvertPlan:
    """Return what converting a model takes, as it was sized with its new format.

    Raises:
        UnsupportedError: when the model is not converted, or not by mlx_lm.convert.
    """
    conversion, plan = conversion_memory(sized), sized.footprint.plan
    if conversion is None or plan is None:
        why = "the weights are quantised already; name the unquantised model"
        if not sized.footprint.of_original:
            why = f"give {setting('quantize')}: the bits or the mode to convert to"
        raise UnsupportedError(f"{sized.checkpoint.id}: {why}")
    device, notes = sized.device, list(sized.footprint.notes)
    if device is None or device.backend == "metal":
        notes.append(Note("info", "conversion-error", _ON_A_MAC))
    runs = conversion.verdict != "exceeds"
    bits, mode = plan.default.bits, plan.default.mode
    return ConvertPlan(
        model=sized.checkpoint.id,
        format=f"{bits} bits" if mode == "affine" else mode,
        mlx_lm_version=format_version(sized.runtime_model.runtime.versions.mlx_lm),
        device=device_summary(device) if device else UNSET,
        conversion=conversion,
        commands=tuple(converting(sized, lambda _: ())) if runs else (),
        notes=tuple(notes),
    )
