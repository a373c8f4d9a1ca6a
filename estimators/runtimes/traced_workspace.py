"""The workspace at any prompt, from traces of a few: for a class that no formula describes.

A workspace is the largest of the moments of a run, and each of them grows in proportion to the
tokens before it and to the sequences, but for steps of caches and of MLX's scheduler. So it is near
the line between two prompts, and the one between two batches.
"""

from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.arch.model import Model
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.quantization import Quantization
from memfit.estimators.base.ranks import Rank
from memfit.estimators.base.units import ceil_div, round_down, round_up
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.versions import MlxVersions
from memfit.estimators.results.terms import Phase
from memfit.estimators.workspace.peak import PeakMoment

_STEP = 256
# Of a line, because too low is worse: it makes the first candidate of a search fit mostly.
_RAISED = 32
# A class that loops over tokens is traced with shorter chunks, but not with shorter ones than this.
_SHORTEST_STEP = 16
_SHORTER = 4
# How many times as long the prompt at the end of a line is as that at its start.
_GROWTH = 4
# The batch generator has other caches than one sequence, so that a line starts at two.
_FEW, _BATCH = 2, 8
# The longest prompt that is traced where a config names no limit.
_UNBOUNDED = 2**20


_Target = tuple[Device | None, MlxVersions]


class ModelTrace(Protocol):
    """A runtime's class of a model, built once and run lazily for any workload."""

    @property
    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint of the model."""

    @property
    def quantize(self) -> Quantization | None:
        """Return the format that it is converted to."""

    @property
    def rank(self) -> Rank | None:
        """Return the rank that has this part of the class, None: it is the whole."""

    def moment(
        self, workload: Workload, device: Device | None, versions: MlxVersions
    ) -> PeakMoment | None:
        """Return the largest moment of a workload, None where it cannot be recorded."""

    def failure(self, workload: Workload, device: Device | None, versions: MlxVersions) -> str:
        """Return why a workload has no moment, nothing where it has one."""

    def weights(self, device: Device | None) -> Mapping[str, int]:
        """Return the bytes of each parameter by path."""

    def unread_format(self, device: Device | None) -> str | None:
        """Return the declared quantisation method where the weights are not sized in it."""

    def converted(self, quantize: Quantization) -> "ModelTrace":
        """Return the trace of the class with its weights converted."""

    def description(self, device: Device | None) -> Model:
        """Return what formulas and plans need of the model, from the class itself."""


class _Traced(NamedTuple):
    workspace_bytes: int
    largest_buffer_bytes: int
    largest_buffer: str
    phase: Phase


_NOTHING = _Traced(0, 0, "", "prefill")


class TracedWorkspace(Struct, frozen=True, eq=False):
    """The workspace of a class between traced prompts."""

    trace: ModelTrace
    max_context: int | None
    """The longest context of the model, in tokens."""

    def converted(self, quantize: Quantization) -> "TracedWorkspace":
        """Return the workspace of the class with its weights converted."""
        return replace(self, trace=self.trace.converted(quantize))

    def peak(
        self, workload: Workload, device: Device | None, versions: MlxVersions, kept_bytes: int
    ) -> PeakMoment:
        """Return the peak of a workload that keeps ``kept_bytes`` of weights, caches and states.

        Raises:
            UnsupportedError: when mlx-lm cannot run the workload, or its graphs are too large.
        """
        found = self._at_batch(workload, (device, versions))
        return PeakMoment(
            phase=found.phase,
            nbytes=kept_bytes + found.workspace_bytes,
            workspace_bytes=found.workspace_bytes,
            largest_buffer_bytes=found.largest_buffer_bytes,
            largest_buffer=found.largest_buffer,
            explanation=(
                f"peak = kept {kept_bytes:,} + workspace between traced prompts"
                f" {found.workspace_bytes:,} = {kept_bytes + found.workspace_bytes:,}",
            ),
        )

    def _at_batch(self, workload: Workload, target: _Target) -> _Traced:
        batch = workload.batch
        if batch <= _FEW:
            return self._at_prompt(workload, target)
        many = self._at_prompt(replace(workload, batch=_BATCH), target)
        # Beyond, every array grows with the batch at most, and MLX runs no further ahead.
        low, start = _NOTHING, 0
        if batch <= _BATCH:
            low, start = self._at_prompt(replace(workload, batch=_FEW), target), _FEW
        return _between(low, many, batch, (start, _BATCH))

    def _at_prompt(self, workload: Workload, target: _Target) -> _Traced:
        tokens = workload.prompt_tokens
        corners = self._corners(workload)
        after = bisect_left(corners, tokens)
        high = self._run(replace(workload, prompt_tokens=corners[after]), target)
        # The shortest one is taken for all below it.
        if after == 0 or tokens == corners[after]:
            return high
        low = self._run(replace(workload, prompt_tokens=corners[after - 1]), target)
        line = _between(low, high, tokens, (corners[after - 1], corners[after]))
        raised = line.workspace_bytes + ceil_div(line.workspace_bytes, _RAISED)
        return line._replace(workspace_bytes=raised)

    def _corners(self, workload: Workload) -> list[int]:
        """Return the prompts to trace, in ascending order; the last is not below the workload's."""
        # A chunk of its own length, a whole one, and one after others.
        step, images = workload.prefill_step, workload.image_tokens
        lengths = {images + length for length in (_STEP, step)}
        if workload.kv_bits is not None:
            # The last before the caches are quantised: a class may not run over them then.
            start = workload.quantized_kv_start
            ends = start - 1 - workload.max_tokens, start + _STEP
            lengths |= {length for length in ends if length > images}
        limit = round_down(self.max_context or _UNBOUNDED, _STEP)
        # A prompt beyond the limit of the model is traced itself.
        longest = max(limit, round_up(workload.prompt_tokens, _STEP))
        # The more a layer takes, the fewer run at once: a line is good for a few times its start.
        tokens = 2 * step
        while images + tokens < longest:
            lengths.add(images + tokens)
            tokens *= _GROWTH
        return sorted({min(length, longest) for length in (*lengths, longest)})

    def _run(self, workload: Workload, target: _Target) -> _Traced:
        moment = self.trace.moment(workload, *target)
        if moment is None:
            step = workload.prefill_step // _SHORTER
            if step < _SHORTEST_STEP:
                raise UnsupportedError(self.trace.failure(workload, *target))
            # No array of a chunk grows faster than its tokens, with as many before its end.
            shorter = self._run(replace(workload, prefill_step=step), target)
            return _between(_NOTHING, shorter, _SHORTER, (0, 1))
        return _Traced(
            moment.workspace_bytes, moment.largest_buffer_bytes, moment.largest_buffer, moment.phase
        )


def _between(low: _Traced, high: _Traced, position: int, ends: tuple[int, int]) -> _Traced:
    """Return the line through two traces at a position, rounded up."""
    start, end = ends

    def line(first: int, last: int) -> int:
        return first + ceil_div((last - first) * (position - start), end - start)

    workspace = line(low.workspace_bytes, high.workspace_bytes)
    largest = line(low.largest_buffer_bytes, high.largest_buffer_bytes)
    return high._replace(workspace_bytes=workspace, largest_buffer_bytes=largest)
