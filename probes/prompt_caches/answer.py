"""How many bits to store, how to restore them, and which conversations are worth it."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from memfit.estimators.base.units import Units, format_bytes, round_down
from memfit.estimators.plans.offload.session_cache import BLOCK_TOKENS
from memfit.estimators.runtimes.measurement import Way
from memfit.probes.prompt_caches.result import CacheAnswer, CacheRestore, Conversation, StoredCache


class Room(NamedTuple):
    """What there is for conversations."""

    memory: int
    """Next to the weights, for the active conversation and all others."""
    left: int
    """What the active one of the requests leaves, where some are served; else as ``memory``."""
    budget: int | None
    """For all others, where it is given."""
    disk: int
    conversations: int
    most_tokens: int | None
    """The model's own limit, None without one."""

    def hot_bytes(self, longest: Conversation, restore: CacheRestore | None) -> int:
        """Return the memory that the active conversation leaves at its peak."""
        if self.budget is not None:
            return self.budget
        restored = (restore.peak_bytes if restore else None) or 0
        active = max(longest.prefill_peak_bytes, restored)
        return max(0, min(self.left, self.memory - active))


def cache_answer(
    conversations: Sequence[Conversation], room: Room, *, agreement_percent: int, units: Units
) -> CacheAnswer:
    """Return the answer; ``conversations`` go from the shortest to the longest."""
    longest = conversations[-1]
    best = _smallest_peak(longest, conversations, agreement_percent)
    if best is None:
        reason = "no stored cache was restored with the agreement asked for"
        return CacheAnswer(
            bits=None,
            way=None,
            shortest_tokens=None,
            agreement_percent=agreement_percent,
            conversations=room.conversations,
            hot_bytes=room.hot_bytes(longest, None),
            hot_threshold_tokens=None,
            hot_conversations=None,
            warm_conversations=None,
            reasons=(reason,),
        )
    stored, restore = best
    hot_bytes = room.hot_bytes(longest, restore)
    pairs = list(_times(conversations, stored.bits, restore.way))
    shortest = _shortest(pairs)
    return CacheAnswer(
        bits=stored.bits,
        way=restore.way,
        shortest_tokens=shortest,
        agreement_percent=agreement_percent,
        conversations=room.conversations,
        hot_bytes=hot_bytes,
        hot_threshold_tokens=_hot_threshold(conversations, stored.bits, hot_bytes, room),
        hot_conversations=hot_bytes // max(1, stored.held_bytes),
        warm_conversations=room.disk // max(1, stored.file_bytes),
        reasons=tuple(_reasons(longest, stored, restore, pairs, shortest, units)),
    )


def _smallest_peak(
    longest: Conversation, conversations: Sequence[Conversation], percent: int
) -> tuple[StoredCache, CacheRestore] | None:
    """The fewest bits, and among their ways the one that takes the least memory."""
    for stored in sorted(longest.stored, key=lambda each: each.bits):
        good = [
            restore
            for restore in stored.restores
            if all(_agrees(each, stored.bits, restore.way, percent) for each in conversations)
        ]
        if good:
            return stored, min(good, key=lambda each: each.peak_bytes or 0)
    return None


def _agrees(conversation: Conversation, bits: int, way: Way, percent: int) -> bool:
    found = _restore(conversation, bits, way)
    agreement = found.agreement if found else None
    return agreement is not None and agreement.is_enough(percent)


def _restore(conversation: Conversation, bits: int, way: Way) -> CacheRestore | None:
    return next(
        (
            restore
            for stored in conversation.stored
            if stored.bits == bits
            for restore in stored.restores
            if restore.way == way
        ),
        None,
    )


def _times(
    conversations: Sequence[Conversation], bits: int, way: Way
) -> Iterator[tuple[int, int, int]]:
    """Tokens, and the time to the first token with a restore and with a prefill."""
    for conversation in conversations:
        found = _restore(conversation, bits, way)
        if found and found.first_token_ns is not None:
            yield conversation.tokens, found.first_token_ns, conversation.first_token_ns


def _shortest(pairs: Sequence[tuple[int, int, int]]) -> int | None:
    """The length from which on a restore is faster, on a line between two measured lengths."""
    if not pairs or pairs[-1][1] >= pairs[-1][2]:
        return None
    losses = [(tokens, warm - cold) for tokens, warm, cold in pairs]
    for (short, loss), (long, later) in reversed(list(pairwise(losses))):
        if loss >= 0:
            return short - (-(long - short) * loss // (loss - later))
    return losses[0][0]


def _hot_threshold(
    conversations: Sequence[Conversation], bits: int, hot_bytes: int, room: Room
) -> int:
    """Return a length at which all conversations stay in memory.

    Bytes for each token shrink with the length, or stay as they are: those of the longest are a
    bound for longer ones, and the longer one of two measured lengths for those between them.
    """
    each, found = hot_bytes // room.conversations, 0
    for tokens, held in _held(conversations, bits):
        if held <= each:
            found = tokens
            if tokens == conversations[-1].tokens:
                found = max(found, round_down(tokens * each // max(1, held), BLOCK_TOKENS))
    return min(found, room.most_tokens or found)


def _held(conversations: Sequence[Conversation], bits: int) -> Iterator[tuple[int, int]]:
    for conversation in conversations:
        for stored in conversation.stored:
            if stored.bits == bits:
                yield conversation.tokens, stored.held_bytes


def _reasons(
    longest: Conversation,
    stored: StoredCache,
    restore: CacheRestore,
    pairs: Sequence[tuple[int, int, int]],
    shortest: int | None,
    units: Units,
) -> Iterator[str]:
    peak, held = (
        format_bytes(size or 0, units) for size in (restore.peak_bytes, restore.cache_bytes)
    )
    yield (
        f"{longest.tokens} tokens in {stored.bits} bits are"
        f" {format_bytes(stored.file_bytes, units)} on the disk; restored {restore.way} they take"
        f" {peak} at the peak and {held} afterwards"
    )
    bulk = _restore(longest, stored.bits, "bulk")
    lazy = _restore(longest, stored.bits, "lazy")
    if bulk and lazy and bulk.peak_bytes and lazy.peak_bytes:
        yield (
            f"dequantised in bulk the peak is {format_bytes(bulk.peak_bytes, units)}, layer by"
            f" layer {format_bytes(lazy.peak_bytes, units)}"
        )
    if shortest is None:
        yield "no measured conversation is restored faster than its prompt is read again"
    elif shortest == pairs[0][0]:
        yield f"all measured lengths are restored faster: {shortest} tokens are an upper bound"
    else:
        yield f"{shortest} tokens are on a line between the measured lengths"
