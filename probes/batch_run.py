"""One run of mlx-lm's batch generator: several sequences that start together."""

from typing import Any

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.probes.run_monitor import ReportFigures, RunMonitor


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
