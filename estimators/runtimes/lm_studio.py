"""LM Studio on MLX: mlx-vlm's classes, with the context and the chunks that its engine fits.

Source: https://github.com/lmstudio-ai/mlx-engine at 08f0c075, model_kit/batched_vision.
"""

from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from memfit.estimators.arch.mixer_kinds import attention_of
from memfit.estimators.arch.model import Model
from memfit.estimators.arch.specs import Growth
from memfit.estimators.base import dtypes
from memfit.estimators.base.units import open_size, round_down, round_up
from memfit.estimators.base.workload import ServerSettings, Workload
from memfit.estimators.mlx.kv_cache import buffer_counts, buffer_token_bytes, state_bytes
from memfit.estimators.results.estimate import Note
from memfit.estimators.runtimes.facets import ContextLimit
from memfit.estimators.runtimes.interface import MemoryFigures, Subject
from memfit.estimators.runtimes.mlx_vlm import MLX_VLM, MlxVlm
from memfit.estimators.workspace.vision import embedded_bytes

LM_STUDIO = replace(
    MLX_VLM,
    name="lm-studio",
    version="08f0c075",
    allocates="as mlx-vlm; in chunks of 2048, 1024 or 512 tokens by what its formula predicts",
    source="https://github.com/lmstudio-ai/mlx-engine, mlx_engine/model_kit/batched_vision",
    faults=("it counts all attention scores of a chunk, also where MLX's kernel makes none",),
)
# context_fit.py: MIN_RUNTIME_RESERVE_BYTES, MIN_FITTED_CONTEXT_TOKENS, PREFILL_STEP_CANDIDATES.
RESERVE_BYTES = 3 << 30
_LEAST_TOKENS = 4096
_STEPS = (2048, 1024, 512)
_VALIDATED = ("gemma4", "qwen3_5", "qwen3_6")
_FUSED_WIDTH = 64  # of GPT-OSS, whose scores it does not count


class Profile(NamedTuple):
    """What mlx-engine's formula counts (CacheFitProfile), in bytes."""

    cached: int
    """Of a token in the caches that grow."""
    embedded: int
    """Of the inputs of a token of the prompt."""
    scores: int
    """Of attention, for a token of a chunk and one of the context."""
    rotating: int
    """Of a token in all rotating caches."""
    fixed: int
    """Of states, and of rotating caches without the chunk."""

    def room(self, step: int, bytes_left: int) -> int:
        """Return what is left for tokens."""
        return max(0, bytes_left - self.fixed - self.rotating * step)

    def token(self, step: int) -> int:
        """Return what a token of the context counts for in chunks of ``step`` tokens."""
        return self.cached + self.embedded + self.scores * step

    def fitted(self, step: int, bytes_left: int, allocation: int) -> int:
        """Return the longest context in chunks of ``step`` tokens (_context_fit_for_step).

        ``bytes_left``: the working set without reserve and weights. It rounds up to a multiple of
        ``allocation``.

        >>> Profile(20480, 5632, 32, 204800, 204800 * 1023).fitted(2048, 10158148166, 256)
        104192
        """
        return round_up(self.room(step, bytes_left) // self.token(step), allocation)

    def chunked(self, step: int, prompt: int, bytes_left: int, allocation: int) -> int:
        """Return the tokens that it computes in such chunks (_request_cache_limit_for_step)."""
        left = max(0, self.room(step, bytes_left) - self.embedded * prompt)
        return round_down(left // (self.cached + self.scores * step), allocation)


def profile_of(model: Model) -> Profile | None:
    """Return what its probe finds, None for caches that it does not know."""
    attention = next(filter(None, map(attention_of, model.mixers())), None)
    cached = rotating = windows = 0
    for buffer, layers in buffer_counts(model, None).items():
        nbytes = layers * buffer_token_bytes(model, buffer, Workload(prompt_tokens=1), 1)
        if buffer.growth is Growth.CHUNKED:
            return None
        if buffer.limit is None:
            cached += nbytes
        else:
            rotating, windows = rotating + nbytes, windows + nbytes * (buffer.limit - 1)
    if attention is None or not cached:
        return None
    is_fused = model.model_type == "gpt_oss" and attention.key_dim == _FUSED_WIDTH
    return Profile(
        cached,
        embedded_bytes(model, Workload(prompt_tokens=1)),
        0 if is_fused else dtypes.nbytes(attention.heads, model.dtype),
        rotating,
        windows + state_bytes(model, 1),
    )


class LmStudio(MlxVlm, ContextLimit, frozen=True):
    """mlx-engine's batched kit, by formula."""

    defaults = LM_STUDIO

    @classmethod
    def needs_trace(cls, subject: Subject) -> bool:
        return False

    def _steps(self, most: int) -> tuple[int, ...]:
        return (most, *(step for step in _STEPS if step < most))

    @property
    def _bytes_left(self) -> int:
        """What its formula has for caches and scores; below zero where the weights fill it."""
        device = self.subject.device
        assert device
        return device.working_set_bytes - RESERVE_BYTES - self.resident_bytes()

    def context_limit(self) -> int | None:
        """Return the longest context in its smallest chunks; None where it leaves it unchanged."""
        model = self.subject.model
        profile = profile_of(model)
        if self.subject.device is None or profile is None or model.max_context is None:
            return None
        tokens = profile.fitted(_STEPS[-1], self._bytes_left, self.runtime.kv_step)
        known = model.model_type.startswith(_VALIDATED) or not profile.scores
        if not known and min(tokens, model.max_context) <= _LEAST_TOKENS:
            return None
        return min(max(tokens, _LEAST_TOKENS), model.max_context)

    def segments(self, workload: Workload) -> Iterator[tuple[int, int]]:
        """Yield the end of each part of a prompt and its chunks (make_request_prefill_plan)."""
        profile, prompt, start = profile_of(self.subject.model), workload.prompt_tokens, 0
        *steps, least = self._steps(workload.prefill_step)
        if profile and self.context_limit() is not None:
            for step in steps:
                kv_step = self.runtime.kv_step
                end = min(prompt, profile.chunked(step, prompt, self._bytes_left, kv_step))
                if end > start:
                    yield end, step
                    start = end
        elif steps:
            least = steps[0]
        if start < prompt:
            yield prompt, least

    def figures(self, workload: Workload) -> MemoryFigures:
        """Return the largest part of a prompt; what is long enough is in smaller chunks."""
        if workload.images or workload.batch > 1:
            return super().figures(workload)
        *parts, (_, last) = self.segments(workload)
        figures = super().figures(replace(workload, prefill_step=last))
        for end, step in parts:
            part = replace(workload.prompt_only(end), prefill_step=step)
            later = replace(workload, prompt_tokens=workload.prompt_tokens - end)
            moment = super().figures(part).moment.raised(embedded_bytes(self.subject.model, later))
            if moment.nbytes > figures.moment.nbytes:
                figures = replace(figures, moment=moment)
        return figures

    def commands(
        self, workload: Workload, model: str, server: ServerSettings | None
    ) -> tuple[str, ...]:
        """Return nothing: `lms load` does not take the settings of a workload."""
        return ()

    def _notes(self, workload: Workload, figures: MemoryFigures) -> Iterator[Note]:
        """Yield the context that it fits, and what it predicts where that is less."""
        yield from super()._notes(workload, figures)
        limit, profile = self.context_limit(), profile_of(self.subject.model)
        if limit is None or profile is None:
            if self.subject.device:
                text = "LM Studio's context fit leaves this model's context unchanged"
                yield Note("info", "context-fit", text)
            return
        text = f"LM Studio fits the context to {limit} tokens"
        if workload.total_tokens <= limit:
            yield Note("info", "context-fit", text)
            return
        step = _STEPS[-1]
        fixed = self.resident_bytes() + profile.fixed + profile.rotating * step
        predicted = fixed + profile.token(step) * workload.total_tokens
        yield Note(
            "warning",
            "context-fit",
            f"{text}: of {workload.total_tokens} it predicts {open_size(predicted)}, with"
            f" {open_size(RESERVE_BYTES)} kept free of the working set",
        )
