"""Which calls of the model a workload makes, and what its buffers hold around each."""

from memfit.estimators.arch.caches import STEP, Growth, KVBuffer
from memfit.estimators.base.records import record
from memfit.estimators.base.workload import Workload
from memfit.estimators.workspace.call import KVFormat, Occupancy


@record(frozen=True, slots=True)
class Span:
    """A call of the model on ``tokens`` tokens with ``position`` tokens before them."""

    position: int
    tokens: int


def prefill_spans(workload: Workload) -> tuple[Span, ...]:
    """Return the chunks that can hold the peak: the first, the last full one and the rest.

    A chunk's memory grows with its tokens and with those before it, so no other can be larger,
    save the last before the cache is quantised, which is returned too.
    """
    step, tokens = workload.prefill_step, workload.prompt_tokens - 1
    full, rest = divmod(tokens, step)
    starts = {0, full - 1} if full else set()
    if workload.kv_bits is not None and full:
        starts.add(min(full - 1, -(-workload.quantized_kv_start // step)))
    spans = [Span(start * step, step) for start in sorted(starts)]
    if rest:
        spans.append(Span(full * step, rest))
    return tuple(spans)


def capacity_at(buffer: KVBuffer, workload: Workload, position: int) -> int:
    """Return the tokens a buffer has room for once ``position`` prompt tokens are cached."""
    step = workload.prefill_step
    if buffer.growth is Growth.STEPS and step % STEP == 0:
        full = position // step * step
        return buffer.grown(full, full, position - full) if position > full else full
    capacity = done = 0
    while done < position:
        chunk = min(step, position - done)
        grown = buffer.grown(capacity, done, chunk)
        done += chunk
        if grown == capacity and buffer.growth is Growth.ROTATING and position - done >= step:
            # Full: the whole chunks that follow change nothing.
            done += (position - done) // step * step
        capacity = grown
    return capacity


def prefill_occupancy(buffer: KVBuffer, workload: Workload, span: Span, kv: KVFormat) -> Occupancy:
    """Return a buffer's capacity around a chunk."""
    before = capacity_at(buffer, workload, span.position)
    after = buffer.grown(before, span.position, span.tokens)
    visible = span.position + span.tokens
    if buffer.growth is Growth.ROTATING:
        visible = after
    elif buffer.limit is not None:
        visible = min(span.position, buffer.limit) + span.tokens
    return Occupancy(before, after, visible, kv)


def decode_occupancy(buffer: KVBuffer, workload: Workload, kv: KVFormat) -> Occupancy:
    """Return a buffer's capacity around the largest decode step: the last one that grows it."""
    prefilled = capacity_at(buffer, workload, workload.prompt_tokens - 1)
    after = buffer.allocated_tokens(workload)
    before = after
    if after != prefilled:
        before = max(after - STEP, prefilled) if after > prefilled else prefilled
    return Occupancy(before, after, min(after, buffer.held_tokens(workload.total_tokens)), kv)
