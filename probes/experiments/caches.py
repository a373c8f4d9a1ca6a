"""``memfit tune cache``: store the cache of real prompts, and restore it in several ways.

    tune_cache(CacheRequest(checkpoint=..., path=..., prompt_tokens=(2048,)), start=...)

Each prompt, and each restore, is run by a process of its own.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import field
from msgspec.structs import asdict, replace

from memfit.estimators.base.errors import InputError, MachineError, UnsupportedError
from memfit.estimators.base.files import is_there
from memfit.estimators.base.progress import NULL_PROGRESS, Progress, reported
from memfit.estimators.base.unfinished import remove_unfinished, unfinished_folder
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import fingerprint_of
from memfit.estimators.machine.device import Device
from memfit.estimators.plans.offload.cache_tiers import Tiers
from memfit.estimators.plans.offload.plan import FIXED_THRESHOLD, usable_disk
from memfit.estimators.plans.offload.session_cache import DEQUANTISED_FIRST
from memfit.estimators.runtimes.measurement import Loaded, MeasuredCache, MeasuredRestore, Way
from memfit.estimators.runtimes.runtime import Need, comfortable_bytes
from memfit.probes.disk import create_directory, require_free, usable_bytes
from memfit.probes.experiments.base import Experiment, Start, sized_here
from memfit.probes.preflight import (
    RefusedError,
    memory_obstacle,
    require_loadable,
    require_room,
    require_within_limit,
)
from memfit.probes.process import ModelProcess
from memfit.probes.prompt_caches import stored
from memfit.probes.prompt_caches.answer import Room, cache_answer
from memfit.probes.prompt_caches.conversations import StoredForm
from memfit.probes.prompt_caches.planned import CachePlan
from memfit.probes.prompt_caches.request import CONVERSATIONS, CacheRequest, check_possible
from memfit.probes.prompt_caches.result import (
    CacheAnswer,
    CacheRestore,
    CacheTrials,
    CacheTuneResult,
    Conversation,
    Replay,
    StoredCache,
)
from memfit.probes.prompt_caches.runner import CacheFile, CacheRunner, Restored, WrittenCache
from memfit.probes.prompt_caches.served import of_first, serve, speeds_of
from memfit.probes.store import Store

_WAYS: tuple[Way, ...] = ("as-stored", "bulk", "freeing", "lazy")


def tune_cache(
    request: CacheRequest,
    *,
    start: Start,
    store: Store,
    progress: Progress = NULL_PROGRESS,
) -> CacheTuneResult:
    """Store the caches of prompts, restore them, and say what is worth storing.

    The measurements are saved in ``store``.

    Raises:
        InputError: for impossible lengths or bits, a directory that cannot be written, or a file
            in it that is damaged or of another model.
        UnsupportedError: when mlx-lm has no class for the model.
        MachineError: when MLX is missing, or there is too little memory or disk space.
    """
    require_loadable(request.checkpoint)
    check_possible(request)
    if request.conversations and request.requests:
        request = replace(request, requests=of_first(request.requests, request.conversations))
    with _directory(request) as directory, unfinished_folder() as own:
        experiment = _CacheExperiment(
            request=request,
            start=start,
            save=store.save,
            progress=progress,
            directory=directory,
            own=own,
            fingerprint=fingerprint_of(request.checkpoint),
        )
        return experiment.result()


class _CacheExperiment(Experiment[CacheRequest], kw_only=True):
    directory: Path
    """The directory of the stored files."""
    own: Path
    """A directory for the logits that are compared."""
    fingerprint: str
    loaded: Loaded | None = None
    plan: CachePlan | None = None
    checksums: dict[Path, str] = field(default_factory=dict)
    """The checksums of the files that were there before."""

    def result(self) -> CacheTuneResult:
        """Store and restore the cache of each prompt, the shortest first."""
        lengths, conversations = sorted(set(self.request.prompt_tokens)), list[Conversation]()
        self._check_stored()
        with reported(self.progress, "measuring", len(lengths)):
            for tokens in lengths:
                conversations.append(self._conversation(tokens))
                self.progress.advance()
        return self._result(tuple(conversations))

    def _check_stored(self) -> None:
        """Require that the files that are there already are as they were stored."""
        for tokens in set(self.request.prompt_tokens):
            for bits in self.request.stored_bits:
                path = self._file(tokens, bits)
                if is_there(path):
                    self.checksums[path] = stored.checked_sha256(path)

    def _conversation(self, tokens: int) -> Conversation:
        """Run one prompt, store its cache, and restore it in each way."""
        request, reference = self.request, self.own / f"{tokens}.safetensors"
        files = self._files(tokens)
        with self._writing() as process:
            if self.machine is None:
                self._require_room(process.versions)
            for text in process.prompt(None, tokens + 1).notes:
                self.inform("prompt", text)
            self.loaded = process.load()
            filled = process.call(
                CacheRunner.store,
                tokens,
                step=request.prefill_step,
                generated=request.max_tokens,
                files=files,
                reference=reference,
                fingerprint=self.fingerprint,
            )
        for each in filled.files:
            self._say_exact(each)
        model = self.plan.sized.model if self.plan else None
        if model and not model.kv_quantizable and min(request.stored_bits) < stored.FULL_BITS:
            self.inform("dequantised-first", DEQUANTISED_FIRST)
        rows = tuple(
            self._stored(tokens, each, each.nbytes, reference)
            for each in filled.files
            if each.nbytes is not None
        )
        return Conversation(
            tokens=tokens,
            cache_bytes=filled.cache_bytes,
            prefill_peak_bytes=filled.prefill_peak_bytes,
            prefill_ns=filled.prefill_ns,
            first_token_ns=filled.run.first_token_ns,
            stored=rows,
            measurement_id=self.saved_id(
                self._workload(tokens),
                loaded=self.loaded,
                runs=(filled.run,),
                caches=tuple(map(_measured, rows)),
            )
            if rows
            else None,
        )

    @contextmanager
    def _writing(self) -> Iterator[ModelProcess]:
        """Start a process; when it is ended while it writes, nothing half-written stays."""
        process = self.start(task="store caches")
        try:
            with process:
                yield process
        finally:
            if process.pid is not None:
                remove_unfinished(self.directory)

    def _result(self, conversations: tuple[Conversation, ...]) -> CacheTuneResult:
        """Return everything that was measured, with the answer."""
        request = self.request
        assert self.loaded is not None  # there is at least one prompt
        room = self._room(self.device, self.loaded)
        answer = cache_answer(
            conversations, room, agreement_percent=request.agreement_percent, units=request.units
        )
        return CacheTuneResult(
            **self.header(),
            weights_bytes=self.loaded.weights_bytes,
            max_tokens=request.max_tokens,
            prefill_step=request.prefill_step,
            directory=str(request.directory) if request.directory else None,
            conversations=conversations,
            answer=answer,
            replay=self._replayed(conversations[-1], answer, room),
            trials=self._tried(conversations[-1], answer, room),
            report=self.plan.differences(conversations, self.versions) if self.plan else (),
            notes=self.all_notes,
        )

    def _room(self, device: Device, loaded: Loaded) -> Room:
        """Return what is left for conversations, as ``memfit plan offload`` counts it."""
        request, whole = self.request, comfortable_bytes(device.working_set_bytes)
        used, disk = loaded.active_bytes, request.disk_bytes
        if self.plan and request.requests:
            used = max(used, self._serving(self.plan).peak_bytes)
        return Room(
            memory=whole - loaded.active_bytes,
            left=whole - used,
            budget=request.hot_bytes,
            disk=usable_bytes(self.directory) if disk is None else usable_disk(disk),
            conversations=request.conversations
            or len({each.agent for each in request.requests})
            or CONVERSATIONS,
            most_tokens=self.plan.sized.model.max_context if self.plan else None,
        )

    def _serving(self, plan: CachePlan) -> Need:
        return plan.serving(self.request.requests, self.request.stored_bits)

    def _replayed(self, longest: Conversation, answer: CacheAnswer, room: Room) -> Replay | None:
        """Serve the requests as the answer says; without one, with the most bits."""
        request = self.request
        if not request.requests:
            return None
        bits, way = answer.bits or max(request.stored_bits), answer.way or "as-stored"
        return serve(
            request.requests,
            StoredForm(self.fingerprint, bits, way, request.prefill_step),
            Tiers(answer.hot_bytes, room.disk),
            self.plan,
            start=self.start,
            directory=self.directory,
            speeds=speeds_of(longest, answer),
            eviction=(request.eviction, _most_kept(request, answer)),
        )

    def _tried(self, longest: Conversation, answer: CacheAnswer, room: Room) -> CacheTrials | None:
        """Try the file of the answer next to other work, where two of them fit."""
        if answer.bits is None or answer.way is None:
            return None
        peaks = (
            each.peak_bytes or 0
            for file in longest.stored
            if file.bits == answer.bits
            for each in file.restores
            if each.way == answer.way
        )
        if 2 * max(peaks) > room.memory and not self.request.force:
            self.inform("not-tried", "two requests at once were not tried: two caches do not fit")
            return None
        path = self._file(longest.tokens, answer.bits)
        try:
            with self.start(task="store caches") as process:
                process.prompt(None, longest.tokens + 1)
                process.load()
                return process.call(
                    CacheRunner.tried,
                    path,
                    answer.way,
                    longest.tokens,
                    self.request.max_tokens,
                    self.fingerprint,
                )
        except (InputError, MachineError) as error:  # what was measured before stays
            self.warn("not-tried", f"two requests at once were not tried: {error}")
            return None

    def _stored(
        self, tokens: int, written: WrittenCache, nbytes: int, reference: Path
    ) -> StoredCache:
        path, quantised = self._file(tokens, written.bits), written.exact.count(None)
        digest = self.checksums.get(path) or stored.checked_sha256(path)
        ways = _WAYS[:1] if written.bits == stored.FULL_BITS else _WAYS
        return StoredCache(
            bits=written.bits,
            held_bytes=written.held_bytes,
            planned_held_bytes=self.plan.held_bytes(tokens, written.bits) if self.plan else None,
            file_bytes=nbytes,
            sha256=digest,
            write_ns=written.write_ns,
            quantise_ns=written.quantise_ns,
            group_size=written.group_size,
            exact_layers=written.layers - quantised,
            quantised_layers=quantised,
            restores=tuple(
                self._restored(tokens, written.bits, path, way, reference) for way in ways
            ),
        )

    def _restored(
        self, tokens: int, bits: int, path: Path, way: Way, reference: Path
    ) -> CacheRestore:
        planned = self.plan.peak_bytes(tokens, bits, way) if self.plan else None
        try:
            with self.start(task="store caches") as process:
                process.prompt(None, tokens + 1)
                process.load()
                found = process.call(
                    CacheRunner.restore, path, way, tokens, reference, self.fingerprint
                )
        except (MachineError, UnsupportedError) as error:
            unknown: dict[str, Any] = dict.fromkeys(Restored.__struct_fields__)
            return CacheRestore(
                way=way,
                status="failed",
                reason=str(error),
                planned_peak_bytes=planned,
                **unknown | {"from_disk": False},
            )
        if not found.from_disk:
            text = "the system cannot forget a file: it may have been read from memory"
            self.inform("from-memory", text)
        return CacheRestore(
            way=way, status="measured", reason=None, planned_peak_bytes=planned, **asdict(found)
        )

    def _workload(self, tokens: int) -> Workload:
        request = self.request
        return Workload(
            prompt_tokens=tokens + 1,
            max_tokens=request.max_tokens,
            prefill_step=request.prefill_step,
        )

    def _require_room(self, versions: Mapping[str, str]) -> None:
        """Require that the whole request fits this machine now, unless the user forces it."""
        self.take_machine(versions)
        request, device = self.request, self.device
        workload = self._workload(max(request.prompt_tokens))
        try:
            sized = sized_here(
                request.checkpoint, device, workload, margin_bytes=request.margin_bytes
            )
            plan = self.plan = CachePlan(sized, device, request.prefill_step)
            require_within_limit(sized, workload, force=request.force)
            if not request.force:
                require_room(sized, workload, request.units)
                self._require_room_for_requests(plan)
        except UnsupportedError as error:
            self.warn("no-plan", f"nothing was estimated before: {error}")
        else:
            require_free(self.directory, self._bytes_to_write(plan))

    def _bytes_to_write(self, plan: CachePlan) -> int:
        return sum(
            plan.held_bytes(tokens, file.bits) or 0
            for tokens in set(self.request.prompt_tokens)
            for file in self._files(tokens)
            if file.write
        )

    def _require_room_for_requests(self, plan: CachePlan) -> None:
        request = self.request
        if not request.requests:
            return
        require_within_limit(plan.sized, plan.largest(request.requests), force=request.force)
        need = self._serving(plan)
        most = plan.kept_bytes(request.requests, request.stored_bits)
        need = replace(need, peak_bytes=need.peak_bytes + min(request.hot_bytes or 0, most))
        if found := memory_obstacle(need, plan.device, request.units):
            raise RefusedError(f"{request.checkpoint.id}: to serve the requests is {found}")
        if request.disk_bytes is not None:
            require_free(self.directory, min(usable_disk(request.disk_bytes), most))

    def _files(self, tokens: int) -> tuple[CacheFile, ...]:
        paths = {bits: self._file(tokens, bits) for bits in self.request.stored_bits}
        return tuple(
            CacheFile(path=path, bits=bits, write=path not in self.checksums)
            for bits, path in paths.items()
        )

    def _file(self, tokens: int, bits: int) -> Path:
        return self.directory / stored.file_name(self.fingerprint, tokens, bits)

    def _say_exact(self, written: WrittenCache) -> None:
        reasons = [reason for reason in written.exact if reason]
        for reason in dict.fromkeys(reasons):
            share = f"{reasons.count(reason)} of {len(written.exact)} layers"
            text = f"{share} are not quantised, and stored exactly: {reason}"
            self.inform("stored-exactly", text)


def _most_kept(request: CacheRequest, answer: CacheAnswer) -> int | None:
    """Return the tokens above which a conversation leaves memory at once, None for no limit."""
    threshold = answer.hot_threshold_tokens or FIXED_THRESHOLD
    return {"reactive": None, "proactive": 0, "hybrid": threshold}[request.eviction]


def _measured(file: StoredCache) -> MeasuredCache:
    return MeasuredCache(
        bits=file.bits,
        group_size=file.group_size,
        file_bytes=file.file_bytes,
        write_ns=file.write_ns,
        restores=tuple(
            MeasuredRestore(
                way=each.way,
                peak_bytes=each.peak_bytes,
                restore_ns=each.restore_ns,
                from_disk=each.from_disk,
            )
            for each in file.restores
            if each.peak_bytes is not None and each.restore_ns is not None
        ),
    )


@contextmanager
def _directory(request: CacheRequest) -> Iterator[Path]:
    """A directory that can be written: the user's, created if needed, or one that is removed."""
    if request.directory is None:
        with unfinished_folder() as directory:
            yield directory
    else:
        create_directory(request.directory)
        require_free(request.directory, 0)
        remove_unfinished(request.directory)
        yield request.directory.absolute()
