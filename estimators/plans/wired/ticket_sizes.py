"""Sizes of tickets: ``8.3GB``, ``measured:ID`` or ``estimate(context=32k)``."""

import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import short
from memfit.estimators.base.reading.section import Section, as_size
from memfit.estimators.base.units import parse_count
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.chips import chip_named
from memfit.estimators.machine.device import Device
from memfit.estimators.runtimes.interface import Figure
from memfit.estimators.runtimes.measurement import Measurement
from memfit.estimators.sizing.measurement_lookup import workload_words
from memfit.estimators.sizing.sized_model import SizedModel

Part = Literal["weights", "kv", "prefill", "base"]
# How an estimate names the fields of its workload.
_FIELDS = {
    "context": "prompt_tokens",
    "max_tokens": "max_tokens",
    "batch": "batch",
    "prefill_step": "prefill_step",
    "kv_bits": "kv_bits",
}
_ESTIMATE = re.compile(r"estimate(?:\((.*)\))?")
_MEASURED = "measured:"
# Given an id; raises InputError when there is none.
Saved = Callable[[str], Measurement]


class TicketSize(NamedTuple):
    """Bytes, and where they come from; None: they were given."""

    nbytes: int
    source: str | None


class TicketSizes:
    """Reads the sizes of a scenario."""

    def __init__(
        self, model: Callable[[], SizedModel], saved: Saved, device: Device | None
    ) -> None:
        """Take what sizes the model of estimates, what returns a measurement, and the machine."""
        self._model, self._saved, self._device = model, saved, device
        self.notes: dict[str, str] = {}
        """Warnings about measurements, by their ids."""

    def of(self, section: Section, part: Part) -> TicketSize | None:
        """Return the size under the key of a part, None without one.

        Raises:
            InputError: for another value, an unknown measurement, or an estimate without a model.
        """
        return section.take(part, lambda value: self._parsed(part, value))

    def _parsed(self, part: Part, value: Any) -> TicketSize:
        text = value.strip() if isinstance(value, str) else ""
        if text.startswith(_MEASURED):
            taken = self._saved(text.removeprefix(_MEASURED).strip())
            if self._device and (warning := _of_other_class(taken, self._device)):
                self.notes[taken.id] = warning
            return _measured(part, taken)
        if match := _ESTIMATE.fullmatch(text):
            return self._estimated(part, _workload(match[1] or ""))
        try:
            return TicketSize(as_size(value), None)
        except InputError:
            raise InputError(
                f"expected a size such as 8.3GB, measured:ID, or estimate(context=32k), got"
                f" {short(value)}"
            ) from None

    def _estimated(self, part: Part, workload: Workload | None) -> TicketSize:
        sized = self._model()
        if part == "weights":
            source = f"weights of {sized.checkpoint.id} by estimate, {sized.footprint.basis}"
            return TicketSize(sized.resident_bytes, source)
        if workload is None:
            raise InputError(f"{part} depends on the prompt: give estimate(context=32k)")
        figures = sized.figures_for(workload)
        caches = figures.kv.nbytes + figures.ssm_bytes
        workspace = figures.moment.workspace_bytes
        nbytes = {"kv": caches, "base": sized.resident_bytes + workspace}.get(part, workspace)
        figure: Figure = "cache" if part == "kv" else "workspace"
        basis, _ = sized.runtime_model.basis(figure, workload)
        words = workload_words(workload)
        return TicketSize(nbytes, f"{_NAMES[part]} of {words} by estimate, {basis}")


_NAMES = {
    "weights": "weights",
    "kv": "caches",
    "prefill": "workspace",
    "base": "weights and workspace",
}


def _workload(text: str) -> Workload | None:
    """Return the workload of an estimate's settings, None without any."""
    found: dict[str, Any] = {}
    for setting in filter(None, (each.strip() for each in text.split(","))):
        name, _, count = setting.partition("=")
        if name.strip() not in _FIELDS or not count:
            raise InputError(f"{short(setting)}: expected {', '.join(_FIELDS)}, each with a number")
        found[_FIELDS[name.strip()]] = parse_count(count.strip())
    if found and "prompt_tokens" not in found:
        raise InputError("an estimate of a workload needs its context, such as context=32k")
    return Workload(**{"max_tokens": 0, **found}) if found else None


def _of_other_class(taken: Measurement, device: Device) -> str | None:
    """Return a warning where MLX's rules may differ between the two machines.

    They depend on the backend, the class of the GPU and its generation.
    """
    chip = chip_named(taken.device.partition(",")[0])
    measured = (taken.backend, chip.gpu_class, chip.generation) if chip else (taken.backend,)
    if measured == device.gpu[: len(measured)] and (chip or taken.backend != "metal"):
        return None
    return (
        f"{taken.id} was measured on {taken.device}, of another class than {device.name}, where"
        " the workspace may differ"
    )


def _measured(part: Part, taken: Measurement) -> TicketSize:
    kept = taken.loaded.active_bytes
    caches = [run.kv_bytes + run.ssm_bytes for run in taken.all_runs]
    peaks = zip(taken.all_runs, caches, strict=True)
    workspace = max(max(0, run.peak_bytes - kept - cache) for run, cache in peaks)
    nbytes = {
        "weights": kept,
        "kv": max(caches),
        "prefill": workspace,
        "base": kept + workspace,
    }[part]
    where = f"on {taken.device}, {taken.measured_at[:10]} ({taken.id})"
    source = f"{_NAMES[part]} of {workload_words(taken.workload)}, measured {where}"
    return TicketSize(nbytes, source)
