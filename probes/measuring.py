"""A model of mlx-lm loaded and run in this process, by mlx-lm's own loop: what MLX says it took.

The side of the child process; memfit.probes.process is the other.
"""

import gc
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from memfit.estimators.base.errors import InputError, MachineError
from memfit.estimators.base.files import printable
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.config import CONFIG
from memfit.estimators.runtimes.measurement import Loaded, Run
from memfit.estimators.trace.model_builder import class_errors
from memfit.probes.loading import load_model, memory_errors
from memfit.probes.run_monitor import Report, Watch, cache_bytes, signs_of_life, state_bytes
from memfit.probes.tokenize_prompt import prompt_ids


class Bench:
    """One model and what is measured on it: `prompt` and `load` come first."""

    def __init__(self, path: Path, memory_limit_bytes: int | None, report: Report) -> None:
        self.path, self.report = path, report
        self.model: Any = None
        self.config: dict[str, Any] = {}
        self._limit = memory_limit_bytes
        self._ids: list[int] = []
        self._weights_bytes = 0

    def versions(self) -> dict[str, str]:
        """Return the versions of what runs the model besides MLX and mlx-lm."""
        return {}

    def prompt(self, text: str | None, tokens: int | None) -> tuple[int, tuple[str, ...]]:
        """Make the prompt; return how many tokens it has, and what was done otherwise than asked.

        Raises:
            InputError: when the text is empty, or cannot be tokenised.
        """
        self._ids, notes = prompt_ids(self.path, text, tokens)
        return (len(self._ids) if tokens is None else tokens), notes

    def load(self) -> Loaded:
        """Load the model, evaluated.

        Raises:
            CheckpointError: when the weights are not those that the config describes.
            UnsupportedError: when the library has no class for the model, or it brings its own
                code.
            MachineError: when there is not memory enough.
        """
        import mlx.core as mx
        from mlx.utils import tree_flatten

        if self._limit is not None:
            mx.set_memory_limit(self._limit)
        mx.reset_peak_memory()
        start = perf_counter_ns()
        with signs_of_life(self.report, process_bytes):
            self.model, self.config = self.loaded()
        load_ns = perf_counter_ns() - start
        peak_bytes = mx.get_peak_memory()
        _settle()
        flat: Any = tree_flatten(self.model.parameters())
        self._weights_bytes = sum(array.nbytes for _, array in flat)
        loaded = Loaded(
            weights_bytes=self._weights_bytes,
            active_bytes=mx.get_active_memory(),
            peak_bytes=peak_bytes,
            process_bytes=process_bytes(),
            load_ns=load_ns,
        )
        there = {"weights_bytes": loaded.weights_bytes, "active_bytes": loaded.active_bytes}
        self._hold_to_limit(peak_bytes, there, "while loading")
        return loaded

    def run(self, workload: Workload, wired_limit_bytes: int | None) -> Run:
        """Generate once, greedily; a prompt is repeated or cut to the tokens of the workload.

        Raises:
            UnsupportedError: when the model's class fails, e.g. on KV bits of a rotating cache.
            MachineError: when there is not memory enough.
        """
        prompt = self.given(workload)
        with self.errors(), memory_errors(), _wired(wired_limit_bytes):
            run = self._generate(prompt, workload)
        del prompt
        _settle()
        figures = {**asdict(run), "peak_bytes": run.peak_bytes}
        self._hold_to_limit(run.peak_bytes, figures, "in this workload")
        return run

    def swift_workspace(self, workload: Workload) -> int:
        """Return the workspace by the rule of mlx-swift-lm's tune, in bytes.

        Prefill by chunks, the last one's logits evaluated; max(0, max(peak, active at the start)
        - weights - states).
        """
        import mlx.core as mx
        from mlx_lm.generate import maybe_quantize_kv_cache

        prompt = self.given(workload)
        active = mx.get_active_memory()
        mx.reset_peak_memory()
        with self.errors(), memory_errors():
            caches = self.caches(workload)
            for start in range(0, workload.prompt_tokens, workload.prefill_step):
                end = start + workload.prefill_step
                logits = self.model(prompt[None, start:end], cache=caches)
                maybe_quantize_kv_cache(
                    caches, workload.quantized_kv_start, workload.kv_group_size, workload.kv_bits
                )
                is_last = end >= workload.prompt_tokens
                mx.eval(logits if is_last else [], [cache.state for cache in caches])
                del logits
        states = state_bytes(caches)
        peak_bytes = max(mx.get_peak_memory(), active)
        del caches, prompt
        _settle()
        return max(0, peak_bytes - self._weights_bytes - states)

    def loaded(self) -> tuple[Any, dict[str, Any]]:
        """Return the model and its config."""
        return load_model(self.path)

    def given(self, workload: Workload) -> Any:
        """Return what `steps` is given as the prompt."""
        return _repeated(self._ids, workload.prompt_tokens)

    def caches(self, workload: Workload) -> list[Any]:
        """Return empty caches for the whole model."""
        from mlx_lm.models.cache import make_prompt_cache

        made: list[Any] = make_prompt_cache(self.model, workload.max_kv_size)
        return made

    def steps(
        self, prompt: Any, workload: Workload, caches: list[Any], watch: Watch
    ) -> Iterator[Any]:
        """Return the library's own loop: one item a token, and the watch told of the prompt."""
        from mlx_lm.generate import generate_step

        steps: Iterator[Any] = generate_step(
            prompt,
            self.model,
            max_tokens=workload.max_tokens,
            prompt_cache=caches,
            prefill_step_size=workload.prefill_step,
            kv_bits=workload.kv_bits,
            kv_group_size=workload.kv_group_size,
            quantized_kv_start=workload.quantized_kv_start,
            prompt_progress_callback=watch.prompt,
        )
        return steps

    def stream(self) -> Any:
        """Return the stream of the library's loop."""
        from mlx_lm.generate import generation_stream

        return generation_stream

    def errors(self) -> AbstractContextManager[None]:
        """Turn what a model's class raises into one line."""
        return class_errors(printable(self.path / CONFIG), self.config)

    def _generate(self, prompt: Any, workload: Workload) -> Run:
        import mlx.core as mx

        caches = self.caches(workload)
        watch = Watch(caches, self.report)
        mx.reset_peak_memory()
        watch.start()
        for _ in self.steps(prompt, workload, caches, watch):
            watch.token()
        # The last step was only begun.
        mx.synchronize(self.stream())
        decode_peak_bytes = max(mx.get_peak_memory(), mx.get_active_memory())
        kv, held, ssm = cache_bytes(caches, workload.total_tokens)
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

    def _hold_to_limit(self, peak_bytes: int, figures: Mapping[str, int | None], when: str) -> None:
        """MLX takes its limit as a guideline: it waits for memory, then goes on without."""
        if self._limit is not None and peak_bytes > self._limit:
            self.report({name: value for name, value in figures.items() if value is not None})
            peak, limit = (format_bytes(size, Units.GB) for size in (peak_bytes, self._limit))
            raise MachineError(f"MLX took {peak} {when}, more than the memory limit of {limit}")


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


def _repeated(ids: list[int], tokens: int) -> Any:
    """Return the ids over and over, cut to so many."""
    import mlx.core as mx

    if not ids:
        raise InputError("a prompt comes before a run")
    array = mx.array(ids, mx.int32)
    prompt = mx.contiguous(mx.tile(array, -(-tokens // len(ids)))[:tokens])
    mx.eval(prompt)
    return prompt


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
    except (ValueError, RuntimeError) as error:
        raise MachineError(f"wired limit of {limit_bytes} bytes: {error}") from None
    try:
        yield
    finally:
        mx.synchronize()
        mx.set_wired_limit(before)
