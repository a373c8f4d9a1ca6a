"""``memfit tune experts``: run a mixture of experts with a part of its experts in memory.

    tune_experts(ExpertsRequest(checkpoint=..., path=..., prompts=(...)), start=..., store=...)

Each run is a process of its own. Nothing is loaded before the plan says that it fits.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from memfit.estimators.base.errors import InputError, MachineError, UnsupportedError
from memfit.estimators.base.files import printable, write_atomically
from memfit.estimators.base.progress import NULL_PROGRESS, Progress, reported
from memfit.estimators.base.unfinished import unfinished_folder
from memfit.estimators.base.units import format_bytes, format_limit
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import fingerprint_of
from memfit.estimators.machine.device import free_bytes, wired_limit
from memfit.estimators.plans.experts.recording import Recording, with_recording
from memfit.estimators.plans.experts.routing import (
    ChosenSlots,
    RoutingProfile,
    chosen_slots,
    profile_text,
)
from memfit.estimators.runtimes.measurement import MeasuredExperts, Run
from memfit.estimators.weights.expert_slots import ExpertLayer
from memfit.probes.disk import unwritable
from memfit.probes.experiments.base import Experiment, Start
from memfit.probes.experiments.points import REPEATS
from memfit.probes.experts import prepacked
from memfit.probes.experts.answer import chosen_point, offloading, start_up_warnings
from memfit.probes.experts.planned import Plan, difference_report, plan_of
from memfit.probes.experts.points import (
    Discovered,
    SlotRuns,
    overlap_percent,
    point_of,
    profile_of,
    rows_of,
    token_counts,
)
from memfit.probes.experts.request import PARTS, ExpertsRequest, capacities_of, check_described
from memfit.probes.experts.result import DiscoveryResult, ExpertsPoint, ExpertsTuneResult, WarmStart
from memfit.probes.experts.runner import ExpertRunner, ExpertSetup, LayerRouting
from memfit.probes.experts.slots import NOT_STORED, READING
from memfit.probes.preflight import require_loadable
from memfit.probes.process import ModelProcess
from memfit.probes.store import Store, save

_ENOUGH = {
    True: "the fewest that are fast enough and agree well enough",
    False: "the most that were measured, since no number is fast enough and agrees well enough",
}


def tune_experts(
    request: ExpertsRequest, *, start: Start, store: Store, progress: Progress = NULL_PROGRESS
) -> ExpertsTuneResult:
    """Find and profile the experts, run the model at each capacity, and say whether it pays.

    Raises:
        InputError: for a model without experts, an impossible capacity, an empty prompt, or a
            directory that cannot be written.
        UnsupportedError: when mlx-lm has no class for the model, or an expert cannot be read.
        MachineError: when MLX is missing, or there is too little memory or disk space.
    """
    require_loadable(request.checkpoint)
    check_described(request)
    packed = None
    if request.pack:
        packed = prepacked.existing(request.pack, request.path, fingerprint_of(request.checkpoint))
    if packed and request.capacities:
        capacities = tuple({*request.capacities, packed.capacity})
        request = replace(request, capacities=capacities)
    steps = 2 + (len(request.capacities) or PARTS) + request.tries_wired
    with reported(progress, "measuring", steps), unfinished_folder() as directory:
        experiment = _ExpertExperiment(
            request=request,
            start=start,
            save=store.save,
            progress=progress,
            profile_path=store.profile_path(fingerprint_of(request.checkpoint)),
            reference=directory / "reference.safetensors",
            packed=packed,
        )
        return experiment.result()


class _ExpertExperiment(Experiment[ExpertsRequest], kw_only=True):
    profile_path: Path
    """The file of the store for the profile."""
    reference: Path
    """A file for the full model's logits."""
    packed: prepacked.Manifest | None
    """The manifest of a directory that was prepacked before."""
    tokens: tuple[int, ...] = ()
    """The tokens of each prompt, those of the profile first."""
    plan: Plan | None = None
    has_reference: bool = False
    recording: Recording | None = None

    def result(self) -> ExpertsTuneResult:
        """Measure everything, one process after another."""
        request = self.request
        found = self._discovered()
        if self.packed and request.pack:
            experts = [layer.experts for layer in found.layers]
            prepacked.require_layers(request.pack, self.packed, experts)
        capacities = capacities_of(request, found.layers[0])
        self._make_plan()
        if request.pack and not self.packed:
            prepacked.require_room(request.pack, found.kept_bytes(capacities[-1]))
        full, profile = self._full(found)
        best = profile or found.profile
        self._keep_profile(best, found.layers)
        points = [self._point(capacity, best, found) for capacity in capacities]
        if all(point.status == "skipped" for point in points):
            raise MachineError(f"{points[0].capacity} experts: {points[0].reason}")
        every = [*([full] if full else []), *points]
        working_set = self.device.working_set_bytes
        for text in start_up_warnings(every, working_set, request.units):
            self.warn("start-up", text)
        answer = offloading(
            full,
            points,
            experts=found.layers[0].experts,
            slowdown_percent=request.slowdown_percent,
            agreement_percent=request.agreement_percent,
            units=request.units,
        )
        wired = self._wired(chosen_point(points, answer.capacity), best, found)
        return ExpertsTuneResult(
            **self.header(),
            layers=len(found.layers),
            experts=found.layers[0].experts,
            top_k=found.layers[0].top_k,
            expert_bytes=found.expert_bytes,
            policy=request.policy,
            workload=self._workload(),
            profiled_prompts=len(request.prompts),
            profiled_tokens=sum(self.tokens[: len(request.prompts)]),
            held_out_prompts=len(request.held_out),
            profile_of_full_model=profile is not None,
            universal_experts=sum(best.universal()),
            discovery=DiscoveryResult(
                weights_bytes=found.loaded.weights_bytes,
                peak_bytes=found.loaded.peak_bytes,
                agreement_percent=(
                    overlap_percent(found.profile.counts, profile.counts) if profile else None
                ),
            ),
            full=full,
            points=(*points, *wired),
            answer=answer,
            report=self._report(every),
            warm=self._warm(answer.capacity, points, best, found),
            notes=self.all_notes,
        )

    def _report(self, points: Sequence[ExpertsPoint]) -> tuple[str, ...]:
        if self.plan is None:
            return ()
        return difference_report(self.plan, points, self._workload(), self.versions)

    def _discovered(self) -> Discovered:
        """Run the routers alone; no expert is read."""
        with self.start(experts=ExpertSetup(mode="routers")) as process:
            self.take_machine(process.versions)
            self.tokens = tuple(process.call(ExpertRunner.prompts, self._texts()))
            loaded = process.load()
            layers, _ = process.call(ExpertRunner.layers)
            routing, measured = self._routing(process)
        self.progress.advance()
        rows = rows_of(layers, routing)
        unreadable = next((layer.unreadable for layer in layers if layer.unreadable), None)
        if unreadable and self.request.policy in READING:
            raise UnsupportedError(f"{printable(unreadable)}: {NOT_STORED}")
        return Discovered(
            loaded,
            rows,
            max(layer.largest_nbytes for layer in layers),
            profile_of(routing, rows, len(self.request.prompts)),
            token_counts(measured, rows),
        )

    def _full(self, found: Discovered) -> tuple[ExpertsPoint | None, RoutingProfile | None]:
        """Run the model as mlx-lm does, where it fits; return its point and profile."""
        layers, request = found.layers, self.request
        try:
            self._require_room([layer.experts for layer in layers], found)
            with self.start(experts=ExpertSetup(mode="full")) as process:
                process.call(ExpertRunner.prompts, self._texts())
                loaded = process.load()
                for text in process.call(ExpertRunner.layers)[1]:
                    self.inform("experts", text)
                routing, measured = self._routing(process)
                process.call(ExpertRunner.choose, self._measured_prompts()[0])
                process.call(
                    ExpertRunner.save_reference,
                    self.reference,
                    request.max_tokens,
                    request.prefill_step,
                )
                warm_up, *runs = self._runs(process)
                self.recording = self._recorded(process, layers) if request.record_file else None
        except MachineError as error:
            text = f"the full model is not measured: {error}; nothing is compared with it"
            self.warn("no-full-model", text)
            return None, None
        finally:
            self.progress.advance()
        self.has_reference = True
        every = [ChosenSlots(tuple(range(layer.experts)), (), layer.experts) for layer in layers]
        counts, taken = token_counts(measured, layers), SlotRuns(loaded, warm_up, runs)
        point = point_of(every, counts, self.plan, taken, workload=self._workload())
        return point, profile_of(routing, layers, len(request.prompts))

    def _wired(
        self, point: ExpertsPoint | None, profile: RoutingProfile, found: Discovered
    ) -> tuple[ExpertsPoint, ...]:
        """Measure a point again with the wired limit for its peak; only Metal has one to set."""
        if not self.request.tries_wired or point is None:
            return ()
        taken = (point.prefill_peak.measured_bytes, point.decode_peak.measured_bytes)
        need = max(each or 0 for each in taken) + self.request.margin_bytes
        limit = wired_limit(need, self.device).nbytes
        if self.device.backend == "metal":
            return (self._point(point.capacity, profile, found, limit),)
        self.inform(
            "wired",
            f"{point.capacity} experts: the wired limit would be"
            f" {format_limit(limit, self.request.units)}; the {self.device.backend} backend has"
            " none, nothing was set",
        )
        return ()

    def _point(
        self, capacity: int, profile: RoutingProfile, found: Discovered, wired: int | None = None
    ) -> ExpertsPoint:
        slots, workload = chosen_slots(profile, capacity, found.layers), self._workload()
        described = partial(
            point_of, slots, found.measured, self.plan, workload=workload, wired_limit_bytes=wired
        )
        try:
            self._require_room([capacity] * len(slots), found)
        except MachineError as error:
            return described(status="skipped", reason=str(error))
        try:
            measured = self._measure(self._setup(slots), wired)
        except MachineError as error:
            return described(status="failed", reason=str(error))
        finally:
            self.progress.advance()
        id = self.saved_id(
            workload,
            loaded=measured.loaded,
            runs=tuple(measured.runs),
            warm_up=measured.warm_up,
            wired_limit_bytes=wired,
            experts=MeasuredExperts(
                capacity=capacity, policy=self.request.policy, profile_sha256=profile.sha256
            ),
        )
        return described(measured, measurement_id=id)

    def _measure(self, setup: ExpertSetup, wired: int | None = None) -> SlotRuns:
        request = self.request
        with self.start(experts=setup) as process:
            process.call(ExpertRunner.prompts, self._texts())
            loaded, agreement = process.load(), None
            warm_up, *runs = self._runs(process, wired)
            if self.has_reference:
                process.call(ExpertRunner.choose, self._measured_prompts()[0])
                agreement = process.call(
                    ExpertRunner.agreement,
                    self.reference,
                    request.max_tokens,
                    request.prefill_step,
                )
        return SlotRuns(loaded, warm_up, runs, agreement)

    def _recorded(self, process: ModelProcess, layers: Sequence[ExpertLayer]) -> Recording:
        """Record each measured prompt once, and in which order `_runs` runs them."""
        prompts, runs = self._measured_prompts(), []
        for prompt in prompts:
            process.call(ExpertRunner.choose, prompt)
            runs.append(process.call(ExpertRunner.record, self._workload()))
        order = (repeat % len(prompts) for repeat in (0, *range(REPEATS)))
        return Recording(layers[0].top_k, tuple(runs), tuple(order), warm_up=1)

    def _runs(self, process: ModelProcess, wired: int | None = None) -> Iterator[Run]:
        """Run the first measured prompt as a warm-up, then all one after another."""
        workload, prompts = self._workload(), self._measured_prompts()
        for repeat in (0, *range(REPEATS)):
            process.call(ExpertRunner.choose, prompts[repeat % len(prompts)])
            yield process.run(workload, wired_limit_bytes=wired)

    def _warm(
        self,
        capacity: int | None,
        points: Sequence[ExpertsPoint],
        profile: RoutingProfile,
        found: Discovered,
    ) -> WarmStart | None:
        """Write the chosen experts to the directory, and load them from there."""
        if self.request.pack is None:
            return None
        if self.packed:
            capacity = self.packed.capacity
        if (point := chosen_point(points, capacity)) is None:
            self.warn("not-packed", "no capacity was measured: nothing is prepacked")
            return None
        if self.packed:
            manifest = self.packed
            pairs = zip(manifest.kept, manifest.pinned, strict=True)
            slots = tuple(ChosenSlots(kept, pinned, 0) for kept, pinned in pairs)
        else:
            slots = chosen_slots(profile, point.capacity, found.layers)
            manifest = self._write_pack(self.request.pack, slots, profile)
        warm = self._measure(self._setup(slots, self.request.pack))
        why = "those packed before" if self.packed else _ENOUGH[point.capacity == capacity]
        self.inform("packed", f"{manifest.capacity} experts of each layer are packed: {why}")
        return WarmStart(
            directory=str(self.request.pack),
            capacity=manifest.capacity,
            file_bytes=sum(file.nbytes for file in manifest.files),
            load_ns=warm.loaded.load_ns,
            cold_load_ns=point.load_ns or 0,
            startup_bytes=warm.loaded.peak_bytes,
            agreement=warm.agreement,
        )

    def _write_pack(
        self, directory: Path, slots: Sequence[ChosenSlots], profile: RoutingProfile
    ) -> prepacked.Manifest:
        checkpoint, path = self.request.checkpoint, self.request.path
        manifest = prepacked.Manifest(
            fingerprint=fingerprint_of(checkpoint),
            revision=checkpoint.revision,
            source=prepacked.source_files(path),
            profile_sha256=profile.sha256,
            kept=tuple(each.kept for each in slots),
            pinned=tuple(each.pinned for each in slots),
            files=(),
        )
        with self.start(experts=self._setup(slots)) as process:
            process.load()
            return process.call(ExpertRunner.pack, directory, manifest)

    def _make_plan(self) -> None:
        """Plan the run for this machine; without a plan only weights are known before."""
        plan = plan_of(self.request.checkpoint, self.device, self._workload())
        if isinstance(plan, str):
            self.warn("no-plan", f"there is no plan to compare with: {plan}")
        else:
            self.plan = plan

    def _require_room(self, capacities: Sequence[int], found: Discovered) -> None:
        """Require that a run fits this machine now.

        Raises:
            MachineError: when it does not, and the user does not force it.
        """
        if self.request.force:
            return
        held = sum(n * layer.slot_bytes for n, layer in zip(capacities, found.layers, strict=True))
        need = found.loaded.weights_bytes + held + found.largest_bytes
        if self.plan:
            need = self.plan.at(capacities).need
        need += self.request.margin_bytes
        room = min(free_bytes(self.device), self.device.working_set_bytes)
        if need > room:
            needed = format_bytes(need, self.request.units)
            free = format_limit(room, self.request.units)
            raise MachineError(f"estimated to need {needed}, and {free} are free")

    def _texts(self) -> list[str]:
        return [*self.request.prompts, *self.request.held_out]

    def _measured_prompts(self) -> Sequence[int]:
        """The prompts that are measured, at most as many as runs."""
        profiled = len(self.request.prompts)
        if self.request.held_out:
            return range(profiled, profiled + len(self.request.held_out))[:REPEATS]
        return range(profiled)[:REPEATS]

    def _routing(
        self, process: ModelProcess
    ) -> tuple[tuple[LayerRouting, ...], tuple[LayerRouting, ...]]:
        """The routing of the profile's prompts, and of those that are measured."""
        step, profiled = self.request.prefill_step, len(self.request.prompts)
        first = process.call(ExpertRunner.routing, tuple(range(profiled)), step)
        rest = tuple(range(profiled, len(self.tokens)))
        return first, process.call(ExpertRunner.routing, rest, step) if rest else first

    def _workload(self) -> Workload:
        """Of the longest measured prompt; a shorter one is repeated to its length."""
        return Workload(
            prompt_tokens=max(self.tokens[index] for index in self._measured_prompts()),
            max_tokens=self.request.max_tokens,
            prefill_step=self.request.prefill_step,
        )

    def _setup(self, slots: Iterable[ChosenSlots], pack: Path | None = None) -> ExpertSetup:
        chosen = tuple(slots)
        return ExpertSetup(
            mode="slots",
            kept=tuple(each.kept for each in chosen),
            pinned=tuple(each.pinned for each in chosen),
            policy=self.request.policy,
            pack=str(pack.absolute()) if pack else None,
        )

    def _keep_profile(self, profile: RoutingProfile, layers: Sequence[ExpertLayer]) -> None:
        """Write the profile to the user's file, and to the store."""
        tokens = sum(self.tokens[: len(self.request.prompts)])
        text = profile_text(profile, layers, self.header()["model_type"], tokens)
        if file := self.request.profile_file:
            _write(file, text)
        if file := self.request.record_file:
            if self.recording:
                _write(file, with_recording(text, self.recording))
            else:
                self.warn("not-recorded", "no routing was recorded: that is done with all experts")
        try:
            save(self.profile_path, text)
        except InputError as error:
            self.warn_unsaved("the profile", error)


def _write(file: Path, text: str) -> None:
    try:
        write_atomically(file, text.encode("utf-8"), mode=0o644)
    except OSError as error:
        raise unwritable(file, error) from None
