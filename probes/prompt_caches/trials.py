"""What a stored cache does next to other work: two requests at once, saves in the background."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from threading import Event, Thread
from time import perf_counter_ns
from typing import Any, NamedTuple

from memfit.estimators.base.unfinished import unfinished_folder
from memfit.estimators.runtimes.measurement import Way
from memfit.probes.disk import require_free
from memfit.probes.prompt_caches import stored
from memfit.probes.prompt_caches.result import CacheTrials, LoadedPair


class StoredFile(NamedTuple):
    """A stored cache, and what reads it."""

    path: Path
    way: Way
    own: Callable[[], list[Any]]
    """Makes empty caches of the model."""
    metadata: dict[str, str]
    report: Callable[[Any], None]

    def loaded(self, paths: Sequence[Path]) -> list[Any]:
        """Return the caches of copies of the file, restored together."""
        read = [each for path in paths for each in stored.read(path, self.own(), self.metadata)]
        return stored.restored(read, self.way, self.report)


def tried(file: StoredFile, decode: Callable[[list[Any]], int], tokens: int) -> CacheTrials:
    """Try a stored cache; ``decode`` generates ``tokens`` with caches, and returns nanoseconds.

    Raises:
        InputError: when a file cannot be written.
        MachineError: when the disk is too full.
    """
    nbytes = file.path.stat().st_size
    # A copy for the second request, and one that is written while the model decodes.
    require_free(file.path.parent, 2 * nbytes)
    with unfinished_folder(file.path.parent) as folder:
        other = folder / file.path.name
        shutil.copyfile(file.path, other)
        cold, prefetched = _prefetched(file)
        one_at_a_time = _pair(file, [[file.path], [other]])
        at_once = _pair(file, [[file.path, other]])
        caches = file.loaded([file.path])
        alone_ns = decode(caches)
        with _saving(file, other) as saves:
            saving_ns = decode(caches)
        compressed, decompress_ns = _zstd(file.path) or (None, None)
    return CacheTrials(
        way=file.way,
        file_bytes=nbytes,
        one_at_a_time=one_at_a_time,
        at_once=at_once,
        restore_ns=cold,
        prefetched_ns=prefetched,
        decoded_tokens=tokens,
        decode_ns=alone_ns,
        decode_ns_while_saving=saving_ns,
        saves=len(saves),
        save_ns=sum(saves) // len(saves),
        zstd_bytes=compressed,
        zstd_decompress_ns=decompress_ns,
    )


def _pair(file: StoredFile, groups: Sequence[Sequence[Path]]) -> LoadedPair:
    """Restore the caches of two requests; those of a group together."""
    import mlx.core as mx

    for path in (path for group in groups for path in group):
        stored.drop_from_page_cache(path)
    mx.clear_cache()
    mx.reset_peak_memory()
    before, start, held, times = mx.get_active_memory(), perf_counter_ns(), [], []
    for group in groups:
        held += file.loaded(group)
        times.append(perf_counter_ns() - start)
    return LoadedPair(mx.get_peak_memory() - before, times[0], times[-1])


def _prefetched(file: StoredFile) -> tuple[int, int | None]:
    """Time a restore from the disk, and one of a file that was read just before."""
    is_cold = stored.drop_from_page_cache(file.path)
    times = []
    for _ in range(2):
        start = perf_counter_ns()
        file.loaded([file.path])
        times.append(perf_counter_ns() - start)
    return times[0], times[1] if is_cold else None


@contextmanager
def _saving(file: StoredFile, path: Path) -> Iterator[list[int]]:
    """Save a cache again and again in another thread; yields the time of each save."""
    import mlx.core as mx

    caches = stored.read(path, file.own(), file.metadata)
    mx.eval([cache.state for cache in caches])  # the thread computes nothing
    ended, times, errors = Event(), list[int](), list[Exception]()

    def save() -> None:
        try:
            while not times or not ended.is_set():
                start = perf_counter_ns()
                stored.save(path, caches, file.metadata)
                times.append(perf_counter_ns() - start)
        except Exception as error:  # noqa: BLE001 - raised below, in the thread that decodes
            errors.append(error)

    thread = Thread(target=save, daemon=True)
    thread.start()
    try:
        yield times
    finally:
        ended.set()
        thread.join()
    if errors:
        raise errors[0]


def _zstd(path: Path) -> tuple[int, int] | None:
    """Return the bytes of a file in zstd, and the time to decompress it; None without zstd."""
    for name in ("compression.zstd", "zstandard"):  # from Python 3.14 on, and before
        with suppress(ImportError):
            zstd = import_module(name)
            packed = zstd.compress(path.read_bytes())
            start = perf_counter_ns()
            zstd.decompress(packed)
            return len(packed), perf_counter_ns() - start
    return None
