"""Sizes of tickets: ``8.3GB``, ``measured:ID`` or ``estimate(context=32k)``."""

import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import short
from memfit.estimators.base.reading.section import Section, as_size
from memfit.estimators.base.units import parse_count
from memfit.estimators.base.workload import Workload
from memfit.estimators.runtimes.interface import Figure
from memfit.estimators.runtimes.measurement import Measurement
from memfit.estimators.sizing.measurement_lookup import workload_words
from memfit.estimators.sizing.sized_model import SizedModel

Part = Literal["weights", "kv", "prefill"]
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

    def __init__(self, model: Callable[[], SizedModel], saved: Saved) -> None:
        """Take what sizes the model of estimates, and what returns a measurement."""
        self._model, self._saved = model, saved

    def of(self, section: Section, part: Part) -> TicketSize | None:
        """Return the size under the key of a part, None without one.

        Raises:
            InputError: for another value, an unknown measurement, or an estimate without a model.
        """
        return section.take(part, lambda value: self._parsed(part, value))

    def _parsed(self, part: Part, value: Any) -> TicketSize:
        text = value.strip() if isinstance(value, str) else ""
        if text.startswith(_MEASURED):
            return _measured(part, self._saved(text.removeprefix(_MEASURED).strip()))
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
        nbytes = caches if part == "kv" else figures.moment.workspace_bytes
        figure: Figure = "cache" if part == "kv" else "workspace"
        basis, _ = sized.runtime_model.basis(figure, workload)
        words = workload_words(workload)
        return TicketSize(nbytes, f"{_NAMES[part]} of {words} by estimate, {basis}")


_NAMES = {"weights": "weights", "kv": "caches", "prefill": "workspace"}


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


def _measured(part: Part, taken: Measurement) -> TicketSize:
    kept = taken.loaded.active_bytes
    caches = [run.kv_bytes + run.ssm_bytes for run in taken.all_runs]
    peaks = zip(taken.all_runs, caches, strict=True)
    nbytes = {
        "weights": kept,
        "kv": max(caches),
        "prefill": max(max(0, run.peak_bytes - kept - cache) for run, cache in peaks),
    }[part]
    where = f"on {taken.device}, {taken.measured_at[:10]} ({taken.id})"
    source = f"{_NAMES[part]} of {workload_words(taken.workload)}, measured {where}"
    return TicketSize(nbytes, source)
