"""Bytes of what mlx_lm.server has in memory: batches of caches, prompts in prefill, logits."""

from functools import cache, partial

from msgspec.structs import replace

from memfit.estimators.arch.caches import Growth
from memfit.estimators.base import dtypes
from memfit.estimators.base.server_settings import ServerSettings
from memfit.estimators.base.units import ceil_div
from memfit.estimators.base.workload import Workload
from memfit.estimators.mlx.batch_buffer import Buffer
from memfit.estimators.mlx.batch_groups import buffer_bytes, prefilled_alone
from memfit.estimators.mlx.call_plan import CHUNKS
from memfit.estimators.results.server import ServerMoment
from memfit.estimators.runtimes.budget import Need
from memfit.estimators.sizing.sized_model import (
    SizedModel,
    draft_bytes_of,
    error_bytes_of,
    for_phases,
)


def need_of(moment: ServerMoment) -> Need:
    """Return what a moment needs, with its error."""
    return Need(moment.peak_bytes, 0, error_bytes=moment.prefill_error_bytes)


def one_at_a_time(sized: SizedModel, workload: Workload) -> str | None:
    """Return why the server runs one request at a time, None where it batches (server.py)."""
    if workload.kv_bits is not None:
        return "KV bits switch batching off"
    if sized.draft:
        return "a draft model switches batching off"
    # Their classes have no merge() (server.py, ModelProvider._load).
    if any(b.growth in (Growth.CHUNKED, Growth.ROWS) for b in sized.model.kv_buffers()):
        return "a cache in chunks or compressed rows cannot be batched"
    return None


class ServerMemory:
    """Bytes of one model's server; figures of equal buffers and chunks are computed once."""

    def __init__(self, sized: SizedModel, workload: Workload) -> None:
        """Take a model and the format of its caches; lengths and steps come with each question."""
        self.sized, self._workload = sized, workload
        self._chunks = for_phases(sized, CHUNKS)
        counts = sized.model.kv_buffer_counts
        self.windows = frozenset(buffer.limit for buffer in counts if buffer.limit)
        self.has_states = any(sized.model.states())
        self._weights_bytes = sized.resident_bytes
        self.layers = max(1, sum(counts.values()))
        self.cache_bytes = cache(partial(buffer_bytes, sized.model, workload))
        self.prefill = cache(self._prefill)

    def logits_bytes(self, rows: int, *, prefilling: bool) -> int:
        """Return the bytes of the logits and log-probabilities of requests that decode.

        GenerationBatch keeps the log-probabilities of two steps (generate.py, _step); a step
        computes them from logits and their difference.
        """
        model = self.sized.model
        return dtypes.nbytes(rows * model.vocab_size, model.dtype) * (2 if prefilling else 4)

    def chunk(self, prompts: Buffer, step: int, end: int | None = None) -> tuple[int, int]:
        """Return the bytes of a chunk of ``prompts`` with their caches, and the error of that.

        The chunk ends at the last token written, or at another ``end``.
        """
        end = prompts.index if end is None else end
        nbytes, error = self.prefill(prompts.rows, end, step)
        empty = Buffer(prompts.rows, tuple((limit, 0) for limit, _ in prompts.windows))
        # The caches may have more room than those of prompts that begin together.
        counted = self.cache_bytes(empty.grown(end, step))
        return nbytes + max(0, self.cache_bytes(prompts) - counted), error

    def _prefill(self, rows: int, tokens: int, step: int) -> tuple[int, int]:
        """Return the bytes of the chunks of prompts with their caches, and the error of that."""
        found = self._chunk_bytes(rows, tokens, step)
        # A single prompt has the caches of a batch too, which mask padding.
        if rows == 1:
            nbytes, error = self._chunk_bytes(2, tokens, step)
            found = max(found, (ceil_div(nbytes, 2), ceil_div(error, 2)))
        return found

    def _chunk_bytes(self, rows: int, tokens: int, step: int) -> tuple[int, int]:
        workload = replace(prefilled_alone(self._workload, rows, tokens), prefill_step=step)
        moment = self._chunks.figures_for(workload).moment
        most = moment.nbytes if moment.prefill_bytes is None else moment.prefill_bytes
        return most - self.sized.resident_bytes, error_bytes_of(self._chunks, workload)

    def answer(
        self,
        held: int,
        *,
        prefill: tuple[int, int] = (0, 0),
        logits: int = 0,
        prompts: int,
        decoding: int,
        stored: int,
    ) -> ServerMoment:
        """Return a moment: bytes of caches, of a chunk with its error, and of logits."""
        nbytes, error = prefill
        weights, margin = self._weights_bytes, self.sized.margin_bytes
        return ServerMoment(
            peak_bytes=weights + held + logits + nbytes + margin,
            weights_bytes=weights,
            cache_bytes=held,
            logits_bytes=logits,
            prefill_bytes=nbytes,
            prefill_error_bytes=error,
            margin_bytes=margin,
            prefilled_prompts=prompts,
            decoding_requests=decoding,
            stored_caches=stored,
        )

    def alone(
        self, settings: ServerSettings, prompt_tokens: int, max_tokens: int, stored: int
    ) -> ServerMoment:
        """Return the most where one request runs at a time and ``stored`` caches like its are kept.

        Every cache is stored as it is, with that of a draft model (server.py, _serve_single).
        """
        workload = replace(
            self._workload,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            prefill_step=settings.prefill_step,
        )
        sized, figures = self.sized, self.sized.figures_for(workload)
        cached = [figures, *([sized.draft.figures_for(workload)] if sized.draft else [])]
        kept = stored * sum(each.kv.nbytes + each.ssm_bytes for each in cached)
        run = figures.moment.nbytes + draft_bytes_of(sized, workload) - sized.resident_bytes
        error = error_bytes_of(sized, workload)
        return self.answer(kept, prefill=(run, error), prompts=1, decoding=0, stored=stored)
