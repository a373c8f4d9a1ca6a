"""Fill a cache with a prompt, store it, and restore it in several ways: the child's part."""

from itertools import islice
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.reading.request_trace import TraceRequest
from memfit.estimators.base.units import Bytes, Count, Positive, ceil_div
from memfit.estimators.base.workload import Workload
from memfit.estimators.plans.offload.cache_tiers import Found, Tiers, replay
from memfit.estimators.results.offload import Simulation
from memfit.estimators.runtimes.measurement import Run, Way
from memfit.probes.agreement import Agreement, compared, greedy, prefill
from memfit.probes.loading import memory_errors
from memfit.probes.model_runner import ModelRunner
from memfit.probes.prompt_caches import stored
from memfit.probes.prompt_caches.conversations import (
    ConversationFiles,
    LiveConversations,
    StoredForm,
)
from memfit.probes.prompt_caches.result import CacheTrials
from memfit.probes.prompt_caches.trials import StoredFile, tried
from memfit.probes.run_monitor import moment_of, read_figures, run_of

# Tokens of a run before each measurement, so that no kernel is compiled during it.
_WARM_UP_TOKENS = 8


class CacheFile(Struct, frozen=True, kw_only=True):
    """A file to write, or one that is there already."""

    path: Path
    bits: Positive
    write: bool


class WrittenCache(Struct, frozen=True, kw_only=True):
    bits: Positive
    held_bytes: Bytes
    """In memory, before the file is written."""
    nbytes: Bytes | None
    """Of the file; None: no layer can be quantised, so that nothing was written."""
    write_ns: Positive | None
    """With the time of quantising."""
    quantise_ns: Count
    """Of that; 0 with all bits."""
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


class ServedRequests(Struct, frozen=True, kw_only=True):
    """The requests of several conversations, served under a budget."""

    simulation: Simulation
    """As that of a plan, with what was counted and measured."""
    peak_bytes: Bytes
    """Without the weights."""
    first_token_ns: dict[Found, Count]
    """Of all requests together, by where their conversation was."""


class _Following(NamedTuple):
    """A generation after a prompt."""

    first_ns: int
    decode_ns: int
    """Of the tokens after the first."""
    logits: Any
    chosen: list[int]


class CacheRunner(ModelRunner):
    """Stores and restores the cache of one prompt; the token after the prompt is the next one."""

    def store(
        self,
        tokens: int,
        step: int,
        generated: int,
        files: tuple[CacheFile, ...],
        reference: Path,
        fingerprint: str,
    ) -> Filled:
        """Run a prompt of ``tokens``, write its cache, and save the logits that follow.

        Raises:
            InputError: when a file cannot be written.
            MachineError: when there is too little memory or disk space.
        """
        import mlx.core as mx

        ids = self._ids_for(tokens)
        with self.errors(), memory_errors():
            self._warm_up(ids)
            caches = self._own()
            before = _reset_peak()
            start = perf_counter_ns()
            # As mlx-lm's own loop: the last token alone, which cuts a rotating cache to its window.
            for part in (ids[: tokens - 1], ids[tokens - 1 : tokens]):
                prefill(self.model, caches, part, step, self.report)
            prefill_ns = perf_counter_ns() - start
            filled = moment_of(caches, tokens)
            after_prefill = read_figures(filled, lambda figure: figure.after_prefill)
            nbytes = sum(cache.nbytes for cache in caches)
        metadata = stored.metadata_of(fingerprint, ids.tolist())
        written = tuple(self._write(caches, file, metadata) for file in files)
        with self.errors(), memory_errors():
            _reset_peak()
            text = self._following(caches, ids[tokens:], generated, None)
            end = moment_of(caches, tokens + generated)
            chosen = mx.array(text.chosen)
            mx.save_safetensors(str(reference), {"logits": text.logits, "tokens": chosen})
        return Filled(
            prefill_ns=prefill_ns,
            prefill_peak_bytes=filled.peak - before,
            cache_bytes=nbytes,
            files=written,
            run=run_of(after_prefill, end, prefill_ns + text.first_ns, text.decode_ns),
        )

    def restore(
        self, file: Path, way: Way, tokens: int, reference: Path, fingerprint: str
    ) -> Restored:
        """Restore a cache, and generate from it along the tokens of the reference.

        Raises:
            CheckpointError: when the file is damaged, or of another model or prompt.
            UnsupportedError: when the model's class cannot use the cache.
        """
        import mlx.core as mx

        ids = self._ids_for(tokens)
        saved: Any = mx.load(str(reference))
        mx.eval(list(saved.values()))
        with self.errors(), memory_errors():
            self._warm_up(ids)
            own = self._own()
            is_cold = stored.drop_from_page_cache(file)
            before, read_before = _reset_peak(), _read_bytes()
            start = perf_counter_ns()
            caches = stored.read(file, own, stored.metadata_of(fingerprint, ids.tolist()))
            caches = stored.restored(caches, way, self.report)
            restore_ns = perf_counter_ns() - start
            peak, read_after = mx.get_peak_memory() - before, _read_bytes()
            nbytes = sum(cache.nbytes for cache in caches)
            given = saved["tokens"].tolist()
            text = self._following(caches, ids[tokens:], len(given), given)
            agreement = compared(text.logits, saved["logits"])
        return Restored(
            peak_bytes=peak,
            cache_bytes=nbytes,
            read_bytes=None
            if read_before is None or read_after is None
            else read_after - read_before,
            restore_ns=restore_ns,
            first_token_ns=restore_ns + text.first_ns,
            agreement=agreement,
            from_disk=is_cold,
        )

    def tried(
        self, file: Path, way: Way, tokens: int, generated: int, fingerprint: str
    ) -> CacheTrials:
        """Try a stored cache next to other work, with two times ``generated`` tokens.

        Raises:
            InputError: when a file cannot be written.
            MachineError: when there is too little memory or disk space.
        """
        import mlx.core as mx

        ids = self._ids_for(tokens)
        following = ids[tokens:]

        def decode(caches: list[Any]) -> int:
            nonlocal following
            text = self._following(caches, following, generated + 1, None)
            following = mx.array(text.chosen[-1:], ids.dtype)
            return text.decode_ns

        with self.errors(), memory_errors():
            self._warm_up(ids)
            metadata = stored.metadata_of(fingerprint, ids.tolist())
            found = StoredFile(file, way, self._own, metadata, self.report)
            return tried(found, decode, generated)

    def replay(
        self,
        requests: tuple[TraceRequest, ...],
        room: Tiers,
        form: StoredForm,
        directory: Path,
        most_kept: int | None,
    ) -> ServedRequests:
        """Serve the requests of conversations that are kept within a budget, in a directory.

        One of more than ``most_kept`` tokens is written as soon as its request ends.

        Raises:
            InputError: when a file cannot be written.
            MachineError: when there is too little memory or disk space.
        """
        import mlx.core as mx

        longest = max(each.prompt_tokens for each in requests)
        with self.errors(), memory_errors():
            text = self.model_input(Workload(prompt_tokens=longest)).tolist()
            self._warm_up(mx.array(text[: _WARM_UP_TOKENS + 1]))
            live = LiveConversations(self, ConversationFiles(directory), form, text)
            before = _reset_peak()
            run = replay(requests, live, room, most_kept=most_kept)
            peak = mx.get_peak_memory() - before
        times = {
            "read_ms": ceil_div(live.reload_ns, 10**6),
            "write_ms": ceil_div(live.write_ns, 10**6),
            "prefill_ms": ceil_div(live.prefill_ns, 10**6),
        }
        return ServedRequests(
            simulation=replace(run, **times), peak_bytes=peak, first_token_ns=live.first_token_ns
        )

    def _write(self, caches: list[Any], file: CacheFile, metadata: dict[str, str]) -> WrittenCache:
        """Write one file, unless it is there or no layer can be quantised."""
        import mlx.core as mx

        bits, exact, start = file.bits, list[str | None](), perf_counter_ns()
        if bits != stored.FULL_BITS:
            pairs = [stored.quantised(cache, bits) for cache in caches]
            caches, exact = [cache for cache, _ in pairs], [reason for _, reason in pairs]
            mx.eval([cache.state for cache in caches])
        quantise_ns = perf_counter_ns() - start if exact else 0
        groups = {getattr(cache, "group_size", None) for cache in caches} - {None}
        written = WrittenCache(
            bits=bits,
            held_bytes=sum(cache.nbytes for cache in caches),
            nbytes=None,
            write_ns=None,
            quantise_ns=quantise_ns,
            group_size=groups.pop() if len(groups) == 1 else None,
            layers=len(caches),
            exact=tuple(exact),
        )
        if exact and all(exact):
            return written
        if file.write:
            mx.eval([cache.state for cache in caches])
            start = perf_counter_ns()
            stored.save(file.path, caches, metadata)
            written = replace(written, write_ns=quantise_ns + perf_counter_ns() - start)
        self.report({})
        return replace(written, nbytes=file.path.stat().st_size)

    def _following(
        self, caches: list[Any], following: Any, tokens: int, given: list[int] | None
    ) -> _Following:
        """Return the times, logits and tokens of a generation."""
        import mlx.core as mx

        rows, chosen, first_ns = [], [], 0
        start = perf_counter_ns()
        for row, token in islice(greedy(self.model, caches, following, given), tokens):
            first_ns = first_ns or perf_counter_ns() - start
            rows.append(row)
            chosen.append(token)
            self.report({})
        decode_ns = perf_counter_ns() - start - first_ns
        return _Following(first_ns, decode_ns, mx.stack(rows), chosen)

    def _warm_up(self, ids: Any) -> None:
        caches = self._own()
        prefill(self.model, caches, ids[:_WARM_UP_TOKENS], _WARM_UP_TOKENS, self.report)
        self._following(caches, ids[-1:], 1, None)

    def _ids_for(self, tokens: int) -> Any:
        return self.model_input(Workload(prompt_tokens=tokens + 1))

    def _own(self) -> list[Any]:
        if self.model is None:
            raise InputError("a run needs a loaded model first")
        return self.caches(Workload(prompt_tokens=1))


def _reset_peak() -> int:
    """Forget the peak; return what is in use now."""
    import mlx.core as mx

    mx.clear_cache()
    mx.reset_peak_memory()
    return mx.get_active_memory()


def _read_bytes() -> int | None:
    """Return the bytes that this process has read so far, None where the system does not say."""
    try:
        counters = Path("/proc/self/io").read_bytes().splitlines()
        return int(counters[0].removeprefix(b"rchar: "))
    except (OSError, ValueError, IndexError):
        return None
