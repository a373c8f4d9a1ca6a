"""Measured stores and restores of a cache as a document."""

from collections.abc import Iterator

from memfit.cli.render.document import Document, Table, report
from memfit.cli.render.view import view
from memfit.cli.render.views.plan_offload import simulation_rows
from memfit.cli.render.views.tune_text import NOTHING, rate, seconds, size
from memfit.estimators.base.units import Units, format_bytes
from memfit.probes.prompt_caches.result import (
    CacheRestore,
    CacheTrials,
    CacheTuneResult,
    Conversation,
    Replay,
    StoredCache,
)

_STORED = (
    *("Tokens", "Bits", "Cache", "Stored", "Planned", "File", "Written in", "quantising"),
    "Prefill",
    *("Quantised", "Exact"),
)
_RESTORED = (
    *("Tokens", "Bits", "Way", "Peak", "Planned", "Held", "Read", "Restored in", "First token"),
    *("Cold", "Equal", "Divergence", "Perplexity"),
)

_MANY = 1000
"""No server has more conversations; short ones on a large machine count to millions."""


@view(CacheTuneResult)
def to_document(result: CacheTuneResult, units: Units) -> Document:
    """Return the tables of stores and restores, and the answer."""
    files = [(each, file) for each in result.conversations for file in each.stored]
    stored = tuple(_stored(each, file, units) for each, file in files)
    restored = tuple(
        _restored(each, file, restore, units) for each, file in files for restore in file.restores
    )
    return report(
        title=result.model,
        facts=tuple(_facts(result, units)),
        tables=(
            Table(_STORED, stored, "Stored", keys=2, droppable=(4, 2)),
            Table(
                *(_RESTORED, restored, "Restored; peaks are without weights"),
                # Where there is less room, what the others say too goes first.
                droppable=(6, 5, 8, 11),
                keys=3,
            ),
            *_served(result.replay, units),
        ),
        verdict=_verdict(result),
        colour="green" if result.answer.shortest_tokens else "yellow",
        sections=(
            ("Why", (*result.answer.reasons, *_tiers(result, units))),
            ("Served", tuple(_replay_lines(result.replay, units))),
            ("Next to other work", tuple(_trial_lines(result.trials, units))),
            ("Not measured", tuple(_unmeasured(result))),
            ("Not as planned; report these lines", result.report),
            ("Notes", tuple(note.message for note in result.notes)),
        ),
    )


def _facts(result: CacheTuneResult, units: Units) -> Iterator[str]:
    yield f"{result.model_type}, weights {format_bytes(result.weights_bytes, units)}"
    yield (
        f"{result.max_tokens} tokens generated after each restore, prefill step"
        f" {result.prefill_step}; mlx {result.mlx_version}, mlx-lm {result.mlx_lm_version}"
    )
    if result.directory:
        yield f"files stay in {result.directory}"


def _stored(each: Conversation, file: StoredCache, units: Units) -> tuple[str, ...]:
    return (
        str(each.tokens),
        str(file.bits),
        size(each.cache_bytes, units),
        size(file.held_bytes, units),
        size(file.planned_held_bytes, units),
        size(file.file_bytes, units),
        seconds(file.write_ns),
        seconds(file.quantise_ns) if file.quantise_ns else NOTHING,
        seconds(each.prefill_ns),
        str(file.quantised_layers),
        str(file.exact_layers),
    )


def _restored(
    each: Conversation, file: StoredCache, restore: CacheRestore, units: Units
) -> tuple[str, ...]:
    agreement = restore.agreement
    return (
        str(each.tokens),
        str(file.bits),
        restore.way,
        size(restore.peak_bytes, units) if restore.status == "measured" else restore.status,
        size(restore.planned_peak_bytes, units),
        size(restore.cache_bytes, units),
        size(restore.read_bytes, units),
        seconds(restore.restore_ns),
        seconds(restore.first_token_ns),
        seconds(each.first_token_ns),
        f"{agreement.same_tokens} of {agreement.tokens}" if agreement else NOTHING,
        f"{agreement.mean_divergence:.2g}" if agreement else NOTHING,
        f"{agreement.perplexity:.4g}" if agreement else NOTHING,
    )


def _verdict(result: CacheTuneResult) -> str:
    answer = result.answer
    if answer.bits is None:
        return "Nothing to store: no restored cache agrees well enough."
    how = (
        f"Store {answer.bits} bits and restore {answer.way}"
        f" (at least {answer.agreement_percent:g} % equal tokens)"
    )
    if answer.shortest_tokens is None:
        return f"Storing does not pay at these lengths. {how} if you store longer ones."
    return f"{how}; it pays from {answer.shortest_tokens} tokens."


def _tiers(result: CacheTuneResult, units: Units) -> Iterator[str]:
    answer, tokens = result.answer, result.conversations[-1].tokens
    if answer.hot_conversations is None or answer.hot_threshold_tokens is None:
        return
    hot, warm = (
        str(count) if count < _MANY else f"more than {_MANY}"
        for count in (answer.hot_conversations, answer.warm_conversations or 0)
    )
    yield (
        f"conversations of {tokens} tokens: {hot} hot in"
        f" {format_bytes(answer.hot_bytes, units)} of memory, {warm} warm on the disk, the others"
        " cold"
    )
    many, shortest = answer.conversations, result.conversations[0].tokens
    if answer.hot_threshold_tokens:
        yield (
            f"hot threshold: {answer.hot_threshold_tokens} tokens, up to which all {many}"
            " conversations stay in memory"
        )
    else:
        yield f"hot threshold: below {shortest} tokens for {many} conversations"


def _served(replay: Replay | None, units: Units) -> Iterator[Table]:
    if replay is None:
        return
    measured = simulation_rows(replay.measured, units)
    planned = simulation_rows(replay.planned, units) if replay.planned else None
    rows = [
        (name, planned[index][1] if planned else NOTHING, value)
        for index, (name, value) in enumerate(measured)
    ]
    rows.append(("Peak", size(replay.planned_peak_bytes, units), size(replay.peak_bytes, units)))
    yield Table(("Requests", "Planned", "Measured"), tuple(rows), "Served under a budget")


_PLACES = {"hot": "in memory", "warm": "on disk", "cold": "evicted before", "new": "new"}


def _replay_lines(replay: Replay | None, units: Units) -> Iterator[str]:
    if replay is None:
        return
    memory, disk = (format_bytes(each, units) for each in (replay.hot_bytes, replay.disk_bytes))
    yield f"stored in {replay.bits} bits, restored {replay.way}; {memory} of memory, {disk} of disk"
    if replay.policy != "reactive":
        above = f" above {replay.threshold_tokens} tokens" if replay.threshold_tokens else ""
        yield f"{replay.policy}: a conversation{above} is written as soon as its request ends"
    for each in replay.served:
        yield (
            f"first token, {_PLACES[each.found]}: {seconds(each.first_token_ns)} in the mean of"
            f" {each.requests}"
        )
    if replay.planned and not replay.differences:
        yield "hits, evictions, tokens and bytes of the caches are as planned; files have headers"
    yield from replay.differences


def _trial_lines(trials: CacheTrials | None, units: Units) -> Iterator[str]:
    """What one load at a time, saves in the background, a prefetch and zstd do."""
    if trials is None:
        return
    for name, pair in (("one at a time", trials.one_at_a_time), ("at once", trials.at_once)):
        yield (
            f"two requests, restored {trials.way} {name}: {format_bytes(pair.peak_bytes, units)} at"
            f" the peak, the first goes on after {seconds(pair.first_ns)}, both after"
            f" {seconds(pair.both_ns)}"
        )
    alone, saving = (
        rate(trials.decoded_tokens * 1e9 / each)
        for each in (trials.decode_ns, trials.decode_ns_while_saving)
    )
    yield (
        f"saved in the background in {seconds(trials.save_ns)}; meanwhile {saving} tokens/s, alone"
        f" {alone}"
    )
    if trials.prefetched_ns is not None:
        saved = trials.restore_ns - trials.prefetched_ns
        pays = f"saves {seconds(saved)}" if 10 * saved > trials.restore_ns else "does not pay"
        yield (
            f"a prefetch {pays}: restored in {seconds(trials.prefetched_ns)} after it, in"
            f" {seconds(trials.restore_ns)} from the disk"
        )
    if trials.zstd_bytes is None or trials.zstd_decompress_ns is None:
        yield "zstd was not tried: it needs Python 3.14, or the package zstandard"
        return
    # At most the whole restore is reading: what fewer bytes save is a bound.
    less = max(0, trials.file_bytes - trials.zstd_bytes)
    most = trials.restore_ns * less // trials.file_bytes
    pays = "may pay" if most > trials.zstd_decompress_ns else "does not pay"
    yield (
        f"zstd {pays}: {100 * less / trials.file_bytes:.0f} % fewer bytes save at most"
        f" {seconds(most)} of reading, and are decompressed in"
        f" {seconds(trials.zstd_decompress_ns)}"
    )


def _unmeasured(result: CacheTuneResult) -> Iterator[str]:
    for each in result.conversations:
        for file in each.stored:
            for restore in file.restores:
                if restore.reason:
                    yield f"{each.tokens} tokens, {file.bits} bits, {restore.way}: {restore.reason}"
