"""The figures of a batch that mlx-lm prefills in groups (mlx/call_plan.py)."""

from functools import partial
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.arch.specs import STEP
from memfit.estimators.base.units import round_up
from memfit.estimators.base.workload import ALL_PHASES, CallPhase, Workload
from memfit.estimators.mlx.batch_schedule import ScheduleMoment
from memfit.estimators.mlx.call_plan import (
    CHUNKS,
    GroupedBatch,
    buffer_bytes,
    decoded_alone,
    grouped_batch,
    prefilled_alone,
)
from memfit.estimators.results.terms import PeakMoment, Phase
from memfit.estimators.runtimes.interface import MemoryFigures

if TYPE_CHECKING:
    from memfit.estimators.mlx.kv_cache import KVCache
    from memfit.estimators.runtimes.interface import Subject

_AFTER: frozenset[CallPhase] = ALL_PHASES - CHUNKS
"""The calls after a prompt; the first of them copies the caches of all its sequences."""


class BatchedModel(Protocol):
    """What the figures of a batch in groups are made of."""

    @property
    def subject(self) -> "Subject":
        """What runs."""

    def resident_bytes(self) -> int:
        """Return the bytes of the weights."""

    def load_bytes(self) -> int:
        """Return the peak of the load in bytes."""

    def caches(self, workload: Workload) -> "tuple[KVCache, int]":
        """Return the caches, and the bytes of the states."""

    def together(self, workload: Workload) -> MemoryFigures:
        """Return what a batch takes that is not divided."""

    def for_phases(self, phases: frozenset[CallPhase]) -> "BatchedModel":
        """Return what may leave out the calls of other phases."""


def grouped_figures(runtime_model: BatchedModel, workload: Workload) -> MemoryFigures:
    """Return what a batch takes; its caches are of the sequences that decode together.

    A call takes what it takes of a batch of its own; in addition there are the buffers of the other
    groups, and those that responses still refer to.

    Raises:
        UnsupportedError: when mlx-lm cannot run the workload, or too many decode together.
    """
    batch = grouped_batch(runtime_model.subject.model, workload)
    kv, states = runtime_model.caches(replace(workload, batch=batch.rows))
    run = _GroupedRun(runtime_model, workload, batch)
    decode = run.highest("decode")
    # A prompt of which no more than its last token is prefilled has no chunk.
    prefill = run.highest("prefill") if run.has_chunks else None
    both = (prefill, decode) if prefill else (decode,)
    best = max(both, key=lambda found: found.nbytes)
    held = runtime_model.resident_bytes() + kv.nbytes + states
    largest = max(both, key=lambda found: found.alone.largest_buffer_bytes).alone
    moment = replace(
        best.alone,
        phase=best.phase,
        nbytes=best.nbytes,
        workspace_bytes=max(0, best.nbytes - held),
        largest_buffer_bytes=largest.largest_buffer_bytes,
        largest_buffer=largest.largest_buffer,
        explanation=(best.line, *best.alone.explanation),
        prefill_bytes=prefill.nbytes if prefill else runtime_model.resident_bytes(),
        decode_bytes=decode.nbytes,
        call_bytes={},
    )
    return MemoryFigures(kv, states, moment.with_load(runtime_model.load_bytes()))


class _Highest(Struct, frozen=True):
    phase: Phase
    nbytes: int
    line: str
    alone: PeakMoment
    """Of the rows that the call computes, as a batch of its own."""


class _GroupedRun:
    """The moments of one batch with what a call takes in each; equal calls are computed once."""

    def __init__(
        self, runtime_model: BatchedModel, workload: Workload, batch: GroupedBatch
    ) -> None:
        self._model, self._workload, self._batch = runtime_model, workload, batch
        self._of_calls: dict[Workload, tuple[int, PeakMoment]] = {}
        of_buffer = partial(buffer_bytes, runtime_model.subject.model, workload)
        sizes = {buffer: 0 for moment in batch.moments for buffer in moment.buffers}
        self._sizes = {buffer: of_buffer(buffer) for buffer in sizes}

    @property
    def has_chunks(self) -> bool:
        """Whether anything is prefilled before the last token of a prompt."""
        return any(self._computed(moment, "prefill")[0] for moment in self._batch.moments)

    def highest(self, phase: Phase) -> _Highest:
        """Return the highest moment of a phase."""
        moments = [m for m in self._batch.moments if self._computed(m, phase)[0]]
        # No call takes more than one of the most rows after the most tokens: of most moments that
        # shows that they are lower than one with larger buffers.
        rows, tokens = map(max, zip(*(self._computed(m, phase) for m in moments), strict=True))
        most, alone = self._call(rows, tokens, phase)
        if phase == "prefill":
            most = max(most, alone.prefill_bytes or 0)
        best: tuple[int, ScheduleMoment] | None = None
        for moment in sorted(moments, key=self._held, reverse=True):
            if best and self._held(moment) + most <= best[0]:
                break
            nbytes = self._held(moment) + self._call(*self._computed(moment, phase), phase)[0]
            if best is None or nbytes > best[0]:
                best = nbytes, moment
        assert best
        nbytes, moment = best
        rows, tokens = self._computed(moment, phase)
        line = (
            f"{phase} of {rows} sequences up to {tokens} tokens = caches of others and of responses"
            f" {self._held(moment):,} + the call {nbytes - self._held(moment):,} = {nbytes:,}"
        )
        return _Highest(phase, nbytes, line, self._call(rows, tokens, phase)[1])

    @staticmethod
    def _computed(moment: ScheduleMoment, phase: Phase) -> tuple[int, int]:
        """The rows of a moment's call, 0 if it has none of this phase, and its tokens."""
        computed = moment.prefilled if phase == "prefill" else moment.stepped
        return (computed.rows, computed.index) if computed else (0, 0)

    def _held(self, moment: ScheduleMoment) -> int:
        return sum(self._sizes[buffer] for buffer in moment.buffers)

    def _call(self, rows: int, tokens: int, phase: Phase) -> tuple[int, PeakMoment]:
        """The bytes of a call, with the weights, and the run that it is of.

        Caches of a chunk are among them; those of a decode step are in the moment's buffers.
        """
        if phase == "prefill":
            alone = prefilled_alone(self._workload, rows, tokens)
        else:
            # Few steps differ in more than the tokens of a buffer that grows by as many.
            alone = decoded_alone(self._workload, rows, round_up(tokens, STEP))
        if alone not in self._of_calls:
            self._of_calls[alone] = self._computed_alone(alone, phase)
        return self._of_calls[alone]

    def _computed_alone(self, alone: Workload, phase: Phase) -> tuple[int, PeakMoment]:
        phases = CHUNKS if phase == "prefill" else _AFTER
        found = self._model.for_phases(phases).together(alone)
        moment = found.moment
        if phase == "prefill":
            nbytes = moment.nbytes if moment.prefill_bytes is None else moment.prefill_bytes
            # The chunks before it found other buffers, which are moments of their own.
            return moment.call_bytes.get("last_chunk", nbytes), moment
        # Without figures by phase all calls are counted, which are of single tokens.
        nbytes = moment.nbytes if moment.decode_bytes is None else moment.decode_bytes
        return nbytes - found.kv.nbytes - found.ssm_bytes, moment
