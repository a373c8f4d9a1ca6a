"""Follow a run in the measuring process: report its progress, and read what its caches hold."""

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from msgspec import convert

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.runtimes.measurement import Run
from memfit.estimators.trace.cache_stepper import leaves, length_of
from memfit.estimators.trace.libraries import changed
from memfit.probes.figures import FIGURES, Figure, RunMoment

# Called with figures during a call, by name: bytes, tokens or nanoseconds. An empty mapping only
# shows that the process is alive.
ReportFigures = Callable[[dict[str, int]], None]
# Called with the tokens of a prompt that are done, and all of them.
OnPrompt = Callable[[int, int], None]
_REPORT_EVERY_NS = 1_000_000_000


class RunMonitor:
    """Follows one run of mlx-lm's loop; reads the figures between prefill and decode."""

    def __init__(self, caches: list[Any], report: ReportFigures) -> None:
        self._caches, self._report = caches, report
        self._start = self._reported = 0
        self._token_times: list[int] = []  # of the first token and the last
        self.first_token_ns = 0
        self.prefill: dict[str, int | None] = {}

    @property
    def decode_ns(self) -> int:
        """Time from the first token to the last: one token fewer than were generated."""
        return self._token_times[-1] - self._token_times[0] if self._token_times else 0

    def start(self) -> None:
        self._start = perf_counter_ns()

    def on_prompt(self, processed: int, total: int) -> None:
        """Take note that ``processed`` of ``total`` prompt tokens are done.

        mlx-lm processes the last prompt token in the first decode step, so prefill ends one token
        before the total (mlx_lm/generate.py, generate_step).
        """
        import mlx.core as mx

        if processed == total - 1 or (processed == total and not self.prefill):
            moment = moment_of(self._caches, processed)
            self.prefill = read_figures(moment, lambda figure: figure.after_prefill)
            mx.reset_peak_memory()
            self._report({name: value for name, value in self.prefill.items() if value is not None})
        if processed == total:
            self.first_token_ns = perf_counter_ns() - self._start
            self._report({"first_token_ns": self.first_token_ns})
        elif processed < total - 1:
            self._report({"prompt_tokens_done": processed})

    def on_token(self) -> None:
        """Take note that another token was generated."""
        now = perf_counter_ns()
        self._token_times[1:] = [now]
        if now - self._reported > _REPORT_EVERY_NS:
            self._reported = now
            self._report({})


class HeldMonitor:
    """Follows what MLX holds: in use, and freed and kept for the next use.

    That falls only where MLX gives kept buffers back: it is read before each clearing.
    """

    def __init__(self) -> None:
        self.most = 0

    def note(self) -> None:
        """Take note of what is held now."""
        import mlx.core as mx

        self.most = max(self.most, mx.get_active_memory() + mx.get_cache_memory())

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Take note before each clearing inside the block."""
        import mlx.core as mx

        clear = mx.clear_cache

        def noted() -> None:
            self.note()
            clear()

        with changed(mx, {"clear_cache": noted}):
            yield
        self.note()


class BatchRun:
    """Generates with a batch; ``caches`` are those of its sequences at each moment."""

    def __init__(self, model: Any, workload: Workload, report: ReportFigures) -> None:
        """Take the workload of each sequence.

        Raises:
            UnsupportedError: for KV bits, which mlx-lm's batch generator does not have.
        """
        from mlx_lm.generate import BatchGenerator

        if workload.kv_bits is not None:
            raise UnsupportedError(
                f"batch {workload.batch} with {workload.kv_bits}-bit KV: mlx-lm's batch generator"
                " does not quantise caches; leave out one of them"
            )
        self._workload = workload
        self._generator = BatchGenerator(
            model,
            completion_batch_size=workload.batch,
            prefill_batch_size=workload.batch,
            prefill_step_size=workload.prefill_step,
            max_kv_size=workload.max_kv_size,
        )
        self.caches: list[Any] = []
        self.monitor = RunMonitor(self.caches, report)

    def generate(self, prompt: list[int], shortest: int | None) -> None:
        """Run the prompts; with ``shortest`` their lengths are spread evenly."""
        work, generator = self._workload, self._generator
        lengths = prompt_lengths(work.prompt_tokens, work.batch, shortest)
        # A sequence that ends frees its cache: none may end before the figures are read, and a
        # shorter prompt's generates while the longest prompt has chunks left.
        most = work.max_tokens + 2 + len([*work.prefill_chunks()])
        generator.insert([prompt[:length] for length in lengths], max_tokens=[most] * work.batch)
        self.monitor.start()
        done = dict.fromkeys(range(work.batch), 0)
        while min(done.values()) < max(1, work.max_tokens):
            # The generator copies caches and drops the old ones: none may be held here.
            self.caches.clear()
            prompts, generated = generator.next()
            self._see_caches()
            self._follow([each.progress for each in prompts], work.prompt_tokens)
            for each in generated:
                done[each.uid] += 1
            if done[0]:  # the longest prompt's first token
                if not self.monitor.first_token_ns:
                    self.monitor.on_prompt(work.prompt_tokens, work.prompt_tokens)
                self.monitor.on_token()
        generator.close()

    def _follow(self, progress: list[tuple[int, int]], longest: int) -> None:
        """Tell the monitor how far the longest prompt is."""
        for processed, total in progress:
            if total == longest and processed < total:
                self.monitor.on_prompt(processed, total)
                return

    def _see_caches(self) -> None:
        # mlx-lm 0.32: the generator moves caches from one batch to the other.
        generator: Any = self._generator
        batches = (generator._prompt_batch, generator._generation_batch)
        self.caches[:] = [cache for batch in batches for cache in batch.prompt_cache]


def prompt_lengths(longest: int, batch: int, shortest: int | None) -> list[int]:
    """Return the lengths of the prompts of a batch, the longest first.

    >>> prompt_lengths(100, 4, 40)
    [100, 80, 60, 40]
    """
    less = 0 if shortest is None else longest - shortest
    return [longest - less * index // max(1, batch - 1) for index in range(batch)]


def moment_of(
    caches: list[Any], tokens: int, *, held: int | None = None, footprint: int | None = None
) -> RunMoment:
    """Return what a run holds now, with ``tokens`` in its caches."""
    import mlx.core as mx

    peak = max(mx.get_peak_memory(), mx.get_active_memory())
    return RunMoment(caches, peak, *cache_bytes(caches, tokens), process_bytes, held, footprint)


def read_figures(
    moment: RunMoment, reader: Callable[[Figure], Callable[[RunMoment], int | None] | None]
) -> dict[str, int | None]:
    """Return the figures that are read at a moment, as a measurement names them."""
    readers = ((figure.name, reader(figure)) for figure in FIGURES.values())
    return {f"{name}_bytes": read(moment) for name, read in readers if read}


def run_of(
    prefill: dict[str, int | None], end: RunMoment, first_token_ns: int, decode_ns: int
) -> Run:
    """Return a run of the figures read after its prefill, and at its end."""
    figures = {**prefill, **read_figures(end, lambda figure: figure.at_end)}
    known = {name: figures.pop(name) for name in Run.__struct_fields__ if name in figures}
    return convert(
        {
            **known,
            "first_token_ns": first_token_ns,
            "decode_ns": decode_ns,
            "more": [pair for pair in figures.items() if pair[1] is not None],
        },
        Run,
    )


def cache_bytes(caches: list[Any], tokens: int) -> tuple[int, int, int]:
    """Return the bytes of keys and values allocated and held, and of states, as a trace counts."""
    kv = held = ssm = 0
    for cache in leaves(caches):
        if type(cache).__name__ == "ArraysCache":
            ssm += cache.nbytes
        elif not cache.empty():
            limit = getattr(cache, "max_size", getattr(cache, "chunk_size", tokens))
            kv += cache.nbytes
            held += cache.nbytes // length_of(cache) * min(tokens, limit)
    return kv, held, ssm


def state_bytes(caches: list[Any]) -> int:
    """Return the bytes that caches hold for the tokens seen, without unused room."""
    total = 0
    for cache in leaves(caches):
        if type(cache).__name__ == "ArraysCache":
            total += cache.nbytes
        elif not cache.empty():
            length = length_of(cache)
            total += cache.nbytes // length * min(cache.offset, length)
    return total


@contextmanager
def heartbeat(report: ReportFigures, counter: Callable[[], int | None]) -> Iterator[None]:
    """Report inside the block, once in each second in which ``counter`` has changed.

    For one long call that reports nothing itself, such as reading weights.
    """
    before = counter()

    def report_change() -> None:
        nonlocal before
        now = counter()
        if now != before:
            report({})
        before = now

    with repeated(report_change, _REPORT_EVERY_NS / 1e9):
        yield


@contextmanager
def repeated(call: Callable[[], None], every_seconds: float) -> Iterator[None]:
    """Call it in a thread, again and again, until the block ends."""
    finished = threading.Event()

    def repeat() -> None:
        while not finished.wait(every_seconds):
            call()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


# sys/resource.h of macOS, struct rusage_info_v4: a UUID, then numbers of 8 bytes, the 29th of which
# is ri_lifetime_max_phys_footprint.
_RUSAGE_INFO_V4, _FOOTPRINT_AT, _RUSAGE_BYTES = 4, 16 + 28 * 8, 512


def footprint_bytes() -> int | None:
    """Return the most that macOS has charged this process for, None on other systems."""
    if sys.platform != "darwin":
        return None
    buffer = ctypes.create_string_buffer(_RUSAGE_BYTES)
    try:
        system = ctypes.CDLL("/usr/lib/libSystem.B.dylib")
        failed = system.proc_pid_rusage(os.getpid(), _RUSAGE_INFO_V4, buffer)
    except (OSError, AttributeError):
        return None
    return None if failed else int.from_bytes(buffer.raw[_FOOTPRINT_AT:][:8], "little")


def process_bytes() -> int | None:
    """Return the resident size of this process from the system, None when it is not known."""
    try:
        resident = Path("/proc/self/statm").read_bytes().split()[1]
        return int(resident) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        pass
    command = ("ps", "-o", "rss=", "-p", str(os.getpid()))
    try:
        kibibytes = subprocess.run(command, capture_output=True, timeout=5, check=False).stdout
        return int(kibibytes) * 1024
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
