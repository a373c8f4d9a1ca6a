"""What ``import memfit`` gives for models: ask once, or open a model and ask many times.

``memfit estimate`` asks here too, so both give the same answer.
"""

import os
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from memfit.estimators.base.progress import NULL_PROGRESS, Progress
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.opening import open_sample
from memfit.estimators.machine.device import Device
from memfit.estimators.questions.question import WorkloadQuestion
from memfit.estimators.questions.target import ModelQuestion, RuntimeQuestion
from memfit.estimators.results.estimate import Estimate
from memfit.estimators.sizing.catalog import Catalog
from memfit.settings import (
    EstimateSettings,
    MachineSettings,
    OpenSettings,
    WorkloadSettings,
    with_keywords,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from memfit.estimators.questions.target import Ranks
    from memfit.estimators.sizing.explore import Explored
    from memfit.estimators.sizing.resolved import ResolvedTarget, TargetQuestion
    from memfit.estimators.sizing.sized_model import SizedModel
    from memfit.settings import Place


SAMPLE = "qwen3-4b-4bit"
"""The sample that is estimated where no model is named."""

_SEARCHED = (
    *("recommendation", "recommended", "actions", "best_action", "grid", "partial_experts"),
    *("first_tokens", "schedule", "images", "alternatives"),
)
"""Fields of an estimate that other settings and prompts are searched for."""
_KEPT = 256


class OpenModel:
    """A model that was opened: it is read once, for any number of questions.

    `on` chooses the machine, `at` answers for a workload.
    """

    # No Struct: `help` resolves the types of its fields, and those are imported for an answer only.
    __slots__ = ("_answers", "_catalog", "_may_use_measurements", "_place", "_question")

    def __init__(
        self,
        catalog: Catalog,
        question: "TargetQuestion",
        may_use_measurements: bool,
        place: "Place | None" = None,
    ) -> None:
        self._catalog = catalog
        self._question = question
        self._may_use_measurements = may_use_measurements
        self._place = place
        self._answers: dict[int, tuple[ResolvedTarget, Estimate]] = {}

    def __repr__(self) -> str:
        machine = self._place and self._place[0]
        return f"memfit.open({self._question.reference!r})" + (
            f".on({machine.name!r})" if machine else ""
        )

    def on(
        self, device: str | Device | None = None, **settings: "Unpack[MachineSettings]"
    ) -> "OpenModel":
        """Return the same model on another machine; nothing is read again.

        ``settings`` are those of `memfit.settings.MachineSettings`.

        Raises:
            InputError: when the machine is unknown, or more than one is named.
        """
        from memfit.settings import place

        chosen = place(device, settings)
        return OpenModel(self._catalog, self._question, self._may_use_measurements, chosen)

    def at(
        self,
        context: str | int | Workload | None = None,
        *,
        plot: bool = False,
        explain: bool = False,
        **settings: "Unpack[WorkloadSettings]",
    ) -> Estimate:
        """Return the estimate for a prompt of ``context`` tokens, or for a whole workload.

        ``plot`` adds memory against context, ``explain`` every formula with its numbers;
        ``settings`` are those of `memfit.settings.WorkloadSettings`. Grid and actions are computed
        when they are read; msgspec's own functions need `complete` before.

        Raises:
            InputError: when a value cannot be read or is out of range.
            UnsupportedError: when the runtime cannot run the workload.
        """
        from memfit.settings import place, workload

        question = workload(context, settings)
        device, ranks = self._place or place(None, {})
        if plot or explain or ranks:
            return self.answer(question, device, ranks, plot=plot, explain=explain)
        target = self._resolved(question, device, None, measures=self._may_use_measurements)
        if id(target) not in self._answers:
            from memfit.estimators.sizing.estimate import estimate as answer

            bare = answer(target.sized, target.workload, advises=False)
            whole = partial(self.answer, question, device)
            if len(self._answers) == _KEPT:
                self._answers.clear()
            # The target is kept too, since its place in memory is the key.
            self._answers[id(target)] = target, bare.without(_SEARCHED, whole)
        return self._answers[id(target)][1]

    def peak(
        self, context: str | int | Workload | None = None, **settings: "Unpack[WorkloadSettings]"
    ) -> int:
        """Return the peak of a run in bytes, without the verdict and advice of `at`.

        A new length takes milliseconds, the same workload again microseconds. It is always
        computed; `at` takes a measurement of this machine where there is one of the workload.

        Raises:
            InputError: when a value cannot be read or is out of range.
            UnsupportedError: when the runtime cannot run the workload, or does not load the model.
        """
        from memfit.estimators.sizing.sized_model import peak_of, require_loaded
        from memfit.settings import place, workload

        device, ranks = self._place or place(None, {})
        question = workload(context, settings)
        target = self._resolved(question, device, ranks, measures=False)
        return peak_of(require_loaded(target.sized), target.workload)

    def answer(
        self,
        question: WorkloadQuestion,
        device: Device | None,
        ranks: "Ranks | None" = None,
        *,
        plot: bool = False,
        explain: bool = False,
    ) -> Estimate:
        """Return the estimate for a workload on a device, or over ``ranks``.

        Raises:
            UnsupportedError: when the runtime cannot run the workload, or not over the ranks.
        """
        from memfit.estimators.sizing.estimate import estimate as answer
        from memfit.estimators.sizing.estimate import with_plots

        target = self._resolved(question, device, ranks, measures=self._may_use_measurements)
        sized, run = target.sized, target.workload
        result = target.ranks.added(answer(sized, run))
        if device is not None and result.verdict == "exceeds":
            from memfit.estimators.sizing.alternatives import alternatives, is_hopeless

            if is_hopeless(result) and not run.images:
                result = replace(
                    result, alternatives=alternatives(result.model.id, device, question)
                )
        if plot and not result.refusal:
            result = with_plots(result, sized)
        if explain:
            from memfit.estimators.sizing.explain import explain as explained

            result = replace(result, explanation=explained(sized, run))
        return result

    def explored(self, question: WorkloadQuestion, device: Device | None) -> "Explored":
        """Return what settings around a workload need."""
        from memfit.estimators.sizing.explore import explore

        target = self._resolved(question, device, None, measures=False)
        return explore(target.sized, target.workload)

    def resolved(
        self, question: WorkloadQuestion, device: str | Device | None = None
    ) -> "ResolvedTarget":
        """Return the model sized for a workload on a machine: the one of `on`, or ``device``."""
        from memfit.settings import place

        chosen = place(device, {}) if device is not None or not self._place else self._place
        return self._resolved(question, *chosen, measures=False)

    def _resolved(
        self,
        question: WorkloadQuestion,
        device: Device | None,
        ranks: "Ranks | None",
        *,
        measures: bool,
    ) -> "ResolvedTarget":
        target = replace(self._question, workload=question, device=device, ranks=ranks)
        is_here = device is not None and device.source == "detected"
        takes = measures and is_here and ranks is None
        return self._catalog.resolve(target, _measured if takes else None)


def estimate(
    model: str | os.PathLike[str],
    *,
    device: str | Device | None = None,
    context: str | int | Workload | None = None,
    progress: Progress = NULL_PROGRESS,
    **settings: "Unpack[EstimateSettings]",
) -> Estimate:
    """Return the memory that a model needs, and whether it fits.

    ``settings`` are the options of ``memfit estimate``: `memfit.settings.EstimateSettings`.

    Raises:
        InputError: when a setting is wrong, or a file of the model.
        UnsupportedError: when the model or its combination with a setting is not described.
        UnreachableError: when the Hub cannot be reached, or refuses.
        MachineError: when this machine cannot do what ``method`` needs.
    """
    from memfit.settings import parts, place, workload

    of_open, of_machine, of_workload = parts(settings)
    question, (machine, ranks) = workload(context, of_workload), place(device, of_machine)
    return open(model, progress=progress, **of_open).answer(question, machine, ranks)


def open(
    model: str | os.PathLike[str],
    *,
    progress: Progress = NULL_PROGRESS,
    **settings: "Unpack[OpenSettings]",
) -> OpenModel:
    """Return a model that is read once, for many questions.

    ``settings`` are those of `memfit.settings.OpenSettings`.

    Raises:
        InputError: when a setting is wrong, or a file of the model.
        UnsupportedError: when the model or its combination with a setting is not described.
        UnreachableError: when the Hub cannot be reached, or refuses.
    """
    from memfit.settings import model_and_runtime

    return open_model(*model_and_runtime(model, settings), progress=progress)


def open_model(
    model: ModelQuestion, runtime: RuntimeQuestion, *, progress: Progress = NULL_PROGRESS
) -> OpenModel:
    """Return the model of a question, opened for a runtime; without a name it is a sample.

    Raises:
        MemfitError: as `open`.
    """
    # All settings are checked before anything is fetched. Without one about the runtime its rules
    # are not: they are imported while the Hub answers.
    rules = runtime.chosen() if runtime.is_stated else None
    quantize, draft = model.quantization(), model.drafting()
    catalog = Catalog(progress=progress, versioned=runtime.versioned)
    reference = _opened(catalog, model)
    if rules is None or runtime.runtime is None:
        rules = runtime.with_settings(catalog.native_runtime(reference))
    from memfit.estimators.sizing.resolved import TargetQuestion

    question = TargetQuestion(
        reference=reference,
        runtime=rules,
        keeps_runtime=runtime.runtime is not None,
        quantize=quantize,
        adapter=model.adapter,
        margin_bytes=runtime.margin,
        as_type=model.as_type,
        draft=draft,
        method=runtime.method,
    )
    is_as_published = (quantize, model.adapter, model.as_type) == (None, None, None)
    measures = runtime.method == "auto" and is_as_published and not runtime.names_versions
    return OpenModel(catalog, question, measures)


def _opened(catalog: Catalog, model: ModelQuestion) -> str:
    """Open the checkpoints; return the reference to the model."""
    reference = model.model
    if reference is None:
        reference = catalog.add(open_sample(SAMPLE))
    catalog.checkpoint(reference)
    if model.mmproj is not None:
        from memfit.estimators.checkpoint.gguf.files import with_projector

        reference = catalog.add(with_projector(catalog.checkpoint(reference), model.mmproj))
    if model.draft is not None:
        catalog.checkpoint(model.draft)
    return reference


def _measured(sized: "SizedModel", workload: Workload) -> "SizedModel":
    """Return the model with a measurement of this machine, where there is one."""
    host = sized.device
    if host is None:
        return sized
    from memfit.probes.measurement_lookup import with_measurement
    from memfit.probes.store import user_store

    return with_measurement(sized, workload, host, user_store())


for _function, _kind in (
    (OpenModel.on, MachineSettings),
    (OpenModel.at, WorkloadSettings),
    (OpenModel.peak, WorkloadSettings),
    (estimate, EstimateSettings),
    (open, OpenSettings),
):
    with_keywords(_function, _kind)
