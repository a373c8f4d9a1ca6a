"""Measured ranks as a document: a column for each, with the estimate below the measurement."""

from collections.abc import Iterator

from memfit.cli.render.document import Document, Heading, Table, Text, Verdict
from memfit.cli.render.view import view
from memfit.estimators.base.units import Units, format_bytes
from memfit.probes.experiments.ranks import MeasuredRank, RankTune

_NONE = "-"


@view(RankTune)
def to_document(result: RankTune, units: Units) -> Document:
    plan, work = result.plan, result.workload
    split = f", split {','.join(map(str, plan.split))}" if plan.split else ""
    facts = (
        f"{len(result.ranks)} ranks, {plan.parallel}{split}",
        f"{work.prompt_tokens} tokens + {work.max_tokens} generated, prefill step"
        f" {work.prefill_step}",
    )
    headings = ("", *(f"rank {rank.rank}" for rank in result.ranks))
    rows = [
        (name, *cells)
        for each in zip(*(list(_figures(rank, units)) for rank in result.ranks), strict=True)
        for name, cells in [(each[0][0], [cell for _, cell in each])]
    ]
    peak = format_bytes(result.peak_bytes, units)
    return (
        Heading(result.model.id),
        Text(facts, style="dim", mark="-"),
        Table(headings, rows),
        Verdict(f"The largest peak of a rank is {peak}."),
    )


def _figures(rank: MeasuredRank, units: Units) -> Iterator[tuple[str, str]]:
    estimated, loaded, run = rank.estimated, rank.loaded, rank.run
    for name, measured, expected in (
        ("weights", loaded.weights_bytes, estimated.weights_bytes),
        ("keys and values", run.kv_bytes, estimated.kv_bytes),
        ("states", run.ssm_bytes, estimated.state_bytes),
        ("load peak", loaded.peak_bytes, estimated.load_bytes),
        ("prefill peak", run.prefill_peak_bytes, estimated.prefill_bytes),
        ("decode peak", run.decode_peak_bytes, estimated.decode_bytes),
    ):
        yield name, format_bytes(measured, units)
        yield "  estimated", _NONE if expected is None else _against(expected, measured, units)
    speed = rank.decode_tokens_per_second
    yield "decode, tokens/s", f"{speed:.1f}" if speed else _NONE


def _against(expected: int, measured: int, units: Units) -> str:
    if expected == measured:
        return "equal"
    share = 100 * (expected - measured) / measured if measured else 0.0
    return f"{format_bytes(expected, units)}, {share:+.1f} %"
