"""A model of mlx-lm loaded and run in this process, by mlx-lm's own loop: what MLX says it took.

The side of the child process; memfit.probes.process is the other.
"""

import gc
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from memfit.estimators.errors import InputError, MachineError
from memfit.estimators.machine.measurement import Loaded, Run
from memfit.estimators.trace.building import class_errors
from memfit.estimators.trace.stepping import leaves, length_of
from memfit.estimators.workload import Workload
from memfit.probes.loading import load_model, memory_errors

# How a caller is told of figures on the way: a name and bytes, tokens or nanoseconds each.
Report = Callable[[dict[str, int]], None]
_REPORT_EVERY_NS = 1_000_000_000


class Bench:
    """One model and what is measured on it; `load` comes first."""

    def __init__(self, path: Path, memory_limit_bytes: int | None, report: Report) -> None:
        self._path, self._limit, self._report = path, memory_limit_bytes, report
        self._model: Any = None
        self._config: dict[str, Any] = {}
        self._weights_bytes = 0

    def load(self) -> Loaded:
        """Load the model, evaluated.

        Raises:
            CheckpointError: when the weights are not those that the config describes.
            UnsupportedError: when mlx-lm has no class for the model, or it brings its own code.
            MachineError: when there is not memory enough.
        """
        import mlx.core as mx
        from mlx.utils import tree_flatten

        if self._limit is not None:
            mx.set_memory_limit(self._limit)
        mx.reset_peak_memory()
        start = perf_counter_ns()
        self._model, self._config = load_model(self._path)
        load_ns = perf_counter_ns() - start
        peak_bytes = mx.get_peak_memory()
        _settle()
        flat: Any = tree_flatten(self._model.parameters())
        self._weights_bytes = sum(array.nbytes for _, array in flat)
        self._hold_to_limit(peak_bytes, "while loading")
        return Loaded(
            weights_bytes=self._weights_bytes,
            active_bytes=mx.get_active_memory(),
            peak_bytes=peak_bytes,
            process_bytes=process_bytes(),
            load_ns=load_ns,
        )

    def run(self, ids: list[int], workload: Workload, wired_limit_bytes: int | None) -> Run:
        """Generate once, greedily, from as many of the ids as the workload has, over and over.

        Raises:
            UnsupportedError: when the model's class fails, e.g. on KV bits of a rotating cache.
            MachineError: when there is not memory enough.
        """
        prompt = _prompt(ids, workload.prompt_tokens)
        with self._errors(), _wired(wired_limit_bytes):
            run = self._generate(prompt, workload)
        del prompt
        _settle()
        self._hold_to_limit(run.peak_bytes, "in this workload")
        return run

    def swift_workspace(self, ids: list[int], workload: Workload) -> int:
        """Return the workspace by the rule of mlx-swift-lm's tune, in bytes.

        Prefill by chunks, the last one's logits evaluated; max(0, max(peak, active at the start)
        - weights - states).
        """
        import mlx.core as mx
        from mlx_lm.generate import maybe_quantize_kv_cache
        from mlx_lm.models.cache import make_prompt_cache

        prompt = _prompt(ids, workload.prompt_tokens)
        active = mx.get_active_memory()
        mx.reset_peak_memory()
        with self._errors():
            caches = make_prompt_cache(self._model, workload.max_kv_size)
            for start in range(0, workload.prompt_tokens, workload.prefill_step):
                end = start + workload.prefill_step
                logits = self._model(prompt[None, start:end], cache=caches)
                maybe_quantize_kv_cache(
                    caches, workload.quantized_kv_start, workload.kv_group_size, workload.kv_bits
                )
                mx.eval(
                    logits if end >= workload.prompt_tokens else [],
                    [cache.state for cache in caches],
                )
                del logits
        states = sum(_nbytes(cache.state) for cache in caches)
        peak_bytes = max(mx.get_peak_memory(), active)
        del caches, prompt
        _settle()
        return max(0, peak_bytes - self._weights_bytes - states)

    def _generate(self, prompt: Any, workload: Workload) -> Run:
        import mlx.core as mx
        from mlx_lm.generate import generate_step, generation_stream
        from mlx_lm.models.cache import make_prompt_cache

        caches = make_prompt_cache(self._model, workload.max_kv_size)
        watch = _Watch(caches, self._report)
        mx.reset_peak_memory()
        watch.start()
        for _ in generate_step(
            prompt,
            self._model,
            max_tokens=workload.max_tokens,
            prompt_cache=caches,
            prefill_step_size=workload.prefill_step,
            kv_bits=workload.kv_bits,
            kv_group_size=workload.kv_group_size,
            quantized_kv_start=workload.quantized_kv_start,
            prompt_progress_callback=watch.prompt,
        ):
            watch.token()
        # The last step was only begun.
        mx.synchronize(generation_stream)
        decode_peak_bytes = max(mx.get_peak_memory(), mx.get_active_memory())
        kv, held, ssm = _cache_bytes(caches, workload.total_tokens)
        return Run(
            **watch.prefill,
            kv_bytes=kv,
            kv_held_bytes=held,
            ssm_bytes=ssm,
            decode_peak_bytes=decode_peak_bytes,
            first_token_ns=watch.first_token_ns,
            decode_ns=watch.decode_ns,
            process_bytes=process_bytes(),
        )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        with class_errors(str(self._path / "config.json"), self._config), memory_errors():
            yield

    def _hold_to_limit(self, peak_bytes: int, when: str) -> None:
        """MLX takes its limit as a guideline: it waits for memory, then goes on without."""
        if self._limit is not None and peak_bytes > self._limit:
            raise MachineError(
                f"MLX took {peak_bytes} bytes {when}, more than the memory limit of {self._limit}"
            )


class _Watch:
    """What mlx-lm's loop tells on the way; reads the figures between prefill and decode."""

    def __init__(self, caches: list[Any], report: Report) -> None:
        self._caches, self._report = caches, report
        self._start = self._reported = 0
        self._tokens: list[int] = []  # when the first came, and the last
        self.first_token_ns = 0
        self.prefill: dict[str, int] = {}

    @property
    def decode_ns(self) -> int:
        """From the first token to the last: one token fewer than were generated."""
        return self._tokens[-1] - self._tokens[0] if self._tokens else 0

    def start(self) -> None:
        """Begin to count the time."""
        self._start = perf_counter_ns()

    def prompt(self, processed: int, total: int) -> None:
        """So many tokens of the prompt are done."""
        import mlx.core as mx

        if processed == total - 1:
            kv, held, ssm = _cache_bytes(self._caches, processed)
            self.prefill = {
                "prefill_kv_bytes": kv,
                "prefill_kv_held_bytes": held,
                "prefill_ssm_bytes": ssm,
                "prefill_peak_bytes": max(mx.get_peak_memory(), mx.get_active_memory()),
            }
            mx.reset_peak_memory()
            self._report(self.prefill)
        elif processed == total:
            self.first_token_ns = perf_counter_ns() - self._start
            self._report({"first_token_ns": self.first_token_ns})
        else:
            self._report({"prompt_tokens_done": processed})

    def token(self) -> None:
        """Another token was generated."""
        now = perf_counter_ns()
        self._tokens[1:] = [now]
        if now - self._reported > _REPORT_EVERY_NS:
            self._reported = now
            self._report({})  # a sign of life


def process_bytes() -> int | None:
    """Return the resident size of this process as the system counts it, None if it does not say."""
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


def _cache_bytes(caches: list[Any], tokens: int) -> tuple[int, int, int]:
    """Return bytes of keys and values allocated and held, and of states, by the trace's rule."""
    kv = held = ssm = 0
    for cache in leaves(caches):
        if type(cache).__name__ == "ArraysCache":
            ssm += cache.nbytes
        elif not cache.empty():
            limit = getattr(cache, "max_size", getattr(cache, "chunk_size", tokens))
            kv += cache.nbytes
            held += cache.nbytes // length_of(cache) * min(tokens, limit)
    return kv, held, ssm


def _prompt(ids: list[int], tokens: int) -> Any:
    """Return the ids over and over, cut to so many."""
    import mlx.core as mx

    if not ids:
        raise InputError("the prompt has no tokens")
    array = mx.array(ids, mx.int32)
    prompt = mx.contiguous(mx.tile(array, -(-tokens // len(ids)))[:tokens])
    mx.eval(prompt)
    return prompt


def _nbytes(state: Any) -> int:
    if isinstance(state, (list, tuple)):
        return sum(map(_nbytes, state))
    return int(getattr(state, "nbytes", 0))


def _settle() -> None:
    """Let go of all that nobody uses any more."""
    import mlx.core as mx

    gc.collect()
    mx.clear_cache()


@contextmanager
def _wired(limit_bytes: int | None) -> Iterator[None]:
    """Set the wired limit inside the block."""
    import mlx.core as mx

    if limit_bytes is None:
        yield
        return
    try:
        before = mx.set_wired_limit(limit_bytes)
    except ValueError as error:
        raise MachineError(f"wired limit of {limit_bytes} bytes: {error}") from None
    try:
        yield
    finally:
        mx.synchronize()
        mx.set_wired_limit(before)
