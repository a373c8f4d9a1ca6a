"""Load and run a model of mlx-lm in this process, with mlx-lm's own loop; read what MLX took.

This is the child's part; memfit.probes.process is the parent's.
"""

import gc
import platform
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

from msgspec import to_builtins

from memfit.estimators.base.errors import InputError, MachineError
from memfit.estimators.base.files import printable
from memfit.estimators.base.units import format_bytes, format_limit
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.config import CONFIG
from memfit.estimators.runtimes.measurement import Loaded, Run
from memfit.estimators.trace.model_builder import class_errors
from memfit.probes.loading import load_model, memory_errors
from memfit.probes.run_monitor import (
    BatchRun,
    HeldMonitor,
    OnPrompt,
    ReportFigures,
    RunMonitor,
    footprint_bytes,
    heartbeat,
    moment_of,
    process_bytes,
    run_of,
    state_bytes,
)
from memfit.probes.tokenize_prompt import prompt_ids


class TokenizedPrompt(NamedTuple):
    """A prompt that the measuring process holds."""

    tokens: int
    notes: tuple[str, ...]
    """What was done differently from the request."""


class ModelRunner:
    """Measures one model; call `prompt` and `load` before `run`."""

    def __init__(self, path: Path, memory_limit_bytes: int | None, report: ReportFigures) -> None:
        self.path, self.report = path, report
        self.model: Any = None
        self.config: dict[str, Any] = {}
        self._limit = memory_limit_bytes
        self._ids: list[int] = []
        self._weights_bytes = 0
        self.shortest_prompt: int | None = None
        """Tokens of the shortest prompt of a batch, None when all have the same length."""
        self.reads_footprint = False

    def versions(self) -> dict[str, str]:
        """Return the versions of the libraries, the backend and the device of this process."""
        import mlx.core as mx

        on_gpu = mx.default_device() == mx.Device(mx.gpu)
        gpu = "metal" if mx.metal.is_available() else "cuda"
        return {
            "mlx": version("mlx"),
            "mlx_lm": version("mlx-lm"),
            "backend": gpu if on_gpu else "cpu",
            "device": str(mx.device_info().get("device_name", platform.machine())),
        }

    def prompt(self, text: str | None, tokens: int | None) -> TokenizedPrompt:
        """Make the prompt; its token ids stay in this process.

        Raises:
            InputError: when the text is empty, or cannot be tokenised.
        """
        self._ids, notes = prompt_ids(self.path, text, tokens)
        return TokenizedPrompt(len(self._ids) if tokens is None else tokens, notes)

    def load(self) -> Loaded:
        """Load the model and evaluate its weights.

        Raises:
            CheckpointError: when the weights do not match the config.
            UnsupportedError: when the library has no class for the model, or it brings its own
                code.
            MachineError: when there is not enough memory.
        """
        import mlx.core as mx
        from mlx.utils import tree_flatten

        if self._limit is not None:
            mx.set_memory_limit(self._limit)
        mx.reset_peak_memory()
        start = perf_counter_ns()
        with heartbeat(self.report, process_bytes):
            self.model, self.config = self.load_model()
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
        figures = {"weights_bytes": loaded.weights_bytes, "active_bytes": loaded.active_bytes}
        self._require_within_limit(peak_bytes, figures, "while loading")
        return loaded

    def run(self, workload: Workload, wired_limit_bytes: int | None) -> Run:
        """Generate once, greedily; the prompt is repeated or cut to the workload's tokens.

        Raises:
            UnsupportedError: when the model's class fails, e.g. on KV bits of a rotating cache.
            MachineError: when there is not enough memory.
        """
        prompt = self.model_input(workload)
        with self.errors(), memory_errors(), _wired(wired_limit_bytes):
            run = self._generate(prompt, workload)
        del prompt
        _settle()
        figures = {**to_builtins(run), **dict(run.more), "peak_bytes": run.peak_bytes}
        self._require_within_limit(run.peak_bytes, figures, "in this workload")
        return run

    def swift_workspace(self, workload: Workload) -> tuple[int, int]:
        """Return the workspace by the rule of mlx-swift-lm's tune, and the caches, in bytes.

        Prefill runs in chunks, and the logits of the last chunk are evaluated. The workspace is
        max(0, max(peak, active at the start) - weights - states).
        """
        import mlx.core as mx
        from mlx_lm.generate import maybe_quantize_kv_cache

        prompt = self.model_input(workload)
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
        return max(0, peak_bytes - self._weights_bytes - states), states

    def load_model(self) -> tuple[Any, dict[str, Any]]:
        return load_model(self.path)

    def model_input(self, workload: Workload) -> Any:
        """Return the prompt that `steps` takes."""
        return _repeated(self._ids, workload.prompt_tokens)

    def caches(self, workload: Workload) -> list[Any]:
        """Return empty caches for the whole model."""
        from mlx_lm.models.cache import make_prompt_cache

        made: list[Any] = make_prompt_cache(self.model, workload.max_kv_size)
        return made

    def steps(
        self, prompt: Any, workload: Workload, caches: list[Any], on_prompt: OnPrompt
    ) -> Iterator[Any]:
        """Return the library's own loop: one item for each token."""
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
            prompt_progress_callback=on_prompt,
        )
        return steps

    def stream(self) -> Any:
        """Return the stream of the library's loop."""
        from mlx_lm.generate import generation_stream

        return generation_stream

    def errors(self) -> AbstractContextManager[None]:
        """Turn an exception of the model's class into an error of one line."""
        return class_errors(printable(self.path / CONFIG), self.config)

    def _generate(self, prompt: Any, workload: Workload) -> Run:
        import mlx.core as mx

        held = HeldMonitor()
        with held.watched():
            if workload.batch > 1:
                run = BatchRun(self.model, workload, self.report)
                caches, monitor = run.caches, run.monitor
                mx.reset_peak_memory()
                run.generate(prompt.tolist(), self.shortest_prompt)
            else:
                caches = self.caches(workload)
                monitor = RunMonitor(caches, self.report)
                mx.reset_peak_memory()
                monitor.start()
                for _ in self.steps(prompt, workload, caches, monitor.on_prompt):
                    monitor.on_token()
            # MLX is asynchronous: the last step was started, but may still run.
            mx.synchronize(self.stream())
        footprint = footprint_bytes() if self.reads_footprint else None
        end = moment_of(caches, workload.total_tokens, held=held.most, footprint=footprint)
        return run_of(monitor.prefill, end, monitor.first_token_ns, monitor.decode_ns)

    def _require_within_limit(self, peak_bytes: int, figures: Mapping[str, Any], when: str) -> None:
        # MLX treats its limit as a guideline: it waits for memory, then allocates more.
        if self._limit is not None and peak_bytes > self._limit:
            self.report({name: each for name, each in figures.items() if isinstance(each, int)})
            peak, limit = format_bytes(peak_bytes), format_limit(self._limit)
            raise MachineError(f"MLX took {peak} {when}, more than the memory limit of {limit}")


def _repeated(ids: list[int], tokens: int) -> Any:
    """Return the ids, repeated and cut to ``tokens``."""
    import mlx.core as mx

    if not ids:
        raise InputError("a run needs a prompt first")
    array = mx.array(ids, mx.int32)
    prompt = mx.contiguous(mx.tile(array, -(-tokens // len(ids)))[:tokens])
    mx.eval(prompt)
    return prompt


def _settle() -> None:
    """Free all memory that is no longer in use."""
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
    if not mx.metal.is_available():
        raise MachineError("a wired limit can be set on Metal only")
    try:
        before = mx.set_wired_limit(limit_bytes)
    except (ValueError, RuntimeError) as error:
        raise MachineError(f"wired limit of {limit_bytes} bytes: {error}") from None
    try:
        yield
    finally:
        mx.synchronize()
        mx.set_wired_limit(before)
