"""A process that stores and restores the cache of a prompt: the parent's part."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, convert, to_builtins

from memfit.estimators.base.quantities import Bytes, Count, Positive
from memfit.estimators.base.reading.request_trace import TraceRequest
from memfit.estimators.plans.offload.cache_tiers import Found, Tiers
from memfit.estimators.results.offload import Simulation
from memfit.estimators.runtimes.measurement import Run, Way
from memfit.probes.agreement import Agreement
from memfit.probes.process import ModelProcess
from memfit.probes.prompt_caches.conversations import StoredForm


class CacheFile(Struct, frozen=True, kw_only=True):
    """A file to write, or one that is there already."""

    path: str
    bits: Positive
    write: bool


class WrittenCache(Struct, frozen=True, kw_only=True):
    bits: Positive
    held_bytes: Bytes
    """In memory, before the file is written."""
    nbytes: Bytes | None
    """Of the file; None: no layer can be quantised, so that nothing was written."""
    write_ns: Positive | None
    group_size: Positive | None
    """Of all quantised layers; None: there is none, or they differ."""
    layers: Count
    exact: tuple[str | None, ...]
    """Why a layer is stored exactly, None for a quantised one; empty with all bits."""


class Filled(Struct, frozen=True, kw_only=True):
    """A prompt's run, and the files with its cache."""

    prefill_ns: Positive
    prefill_peak_bytes: Bytes
    """Without the weights."""
    cache_bytes: Bytes
    files: tuple[WrittenCache, ...]
    run: Run


class Restored(Struct, frozen=True, kw_only=True):
    """A restore, and the generation after it."""

    peak_bytes: Bytes
    cache_bytes: Bytes
    read_bytes: Bytes | None
    restore_ns: Count
    first_token_ns: Count
    agreement: Agreement
    from_disk: bool
    """Whether the system forgot the file before."""


class Served(Struct, frozen=True, kw_only=True):
    """The requests of several conversations, served under a budget."""

    simulation: Simulation
    """As that of a plan, with what was counted and measured."""
    peak_bytes: Bytes
    """Without the weights."""
    first_token_ns: dict[Found, Count]
    """Of all requests together, by where their conversation was."""


class CacheProcess(ModelProcess):
    """A context manager around one process."""

    def store(
        self,
        tokens: int,
        *,
        step: int,
        generated: int,
        files: Sequence[CacheFile],
        reference: Path,
        fingerprint: str,
    ) -> Filled:
        """Run a prompt of ``tokens``, write its cache, and save the logits that follow.

        Raises:
            InputError: when a file cannot be written.
            MachineError: when there is too little memory or disk space.
        """
        answer = self._call(
            "store",
            tokens=tokens,
            step=step,
            generated=generated,
            files=to_builtins(files),
            reference=str(reference),
            fingerprint=fingerprint,
        )
        return convert(answer, Filled)

    def restore(
        self, file: Path, way: Way, tokens: int, *, reference: Path, fingerprint: str
    ) -> Restored:
        """Restore a cache, and generate from it.

        Raises:
            CheckpointError: when the file is damaged, or of another model or prompt.
            UnsupportedError: when the model's class cannot use the cache.
        """
        answer = self._call(
            "restore",
            path=str(file),
            way=way,
            tokens=tokens,
            reference=str(reference),
            fingerprint=fingerprint,
        )
        return convert(answer, Restored)

    def replay(
        self, requests: Sequence[TraceRequest], room: Tiers, form: StoredForm, directory: Path
    ) -> Served:
        """Serve requests, with their conversations kept in memory and in a directory.

        Raises:
            InputError: when a file cannot be written.
            MachineError: when there is too little memory or disk space.
        """
        answer = self._call(
            "replay",
            requests=to_builtins(requests),
            hot_bytes=room.hot_bytes,
            disk_bytes=room.disk_bytes,
            form=tuple(form),
            directory=str(directory),
        )
        return convert(answer, Served)

    def _setup(self) -> dict[str, Any]:
        return {**super()._setup(), "stores_caches": True}
