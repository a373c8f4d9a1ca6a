"""What a version changes, as a document."""

from collections.abc import Iterator

from memfit.cli.render.document import Document, Table, report
from memfit.cli.render.view import view
from memfit.cli.render.views.text import tokens
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.results.library_diff import CallShape, LibraryDiff, ModelChange, PeakChange

_HEADINGS = ("Model", "Prompt", "Old", "New", "Change", "")


@view(LibraryDiff)
def to_document(result: LibraryDiff, units: Units) -> Document:
    """Return a row for each model and prompt, then the loops and models that have no figure."""
    rows = [row for model in result.models for row in _rows(model, units)]
    loops = (
        f"{loop.prompt_tokens} tokens: {_calls(loop.old_calls)}; now {_calls(loop.new_calls)}"
        for loop in result.loops
    )
    return report(
        title=f"{result.package} {result.old_version} and {result.new_version}",
        facts=(
            f"peaks of the classes as traced for {result.device} with MLX {result.mlx_version}"
            + (f", each prompt with an image of {result.image}" if result.image else ""),
        ),
        tables=(Table(_HEADINGS, rows, align="lrrrrr"),),
        verdict=_verdict(result),
        colour="red" if result.grows() else "yellow" if result.undecided() else "green",
        sections=(
            (
                "Calls of generate_step that differ, in tokens (:1 makes one row of logits)",
                tuple(loops),
            ),
            ("Without a figure", tuple(_messages(result))),
        ),
    )


def _verdict(result: LibraryDiff) -> str:
    if result.grows():
        return "the new version takes more memory"
    if names := result.undecided():
        return f"not decided for {', '.join(names)}"
    return "no prompt takes more memory" if result.changes() else "nothing changes"


def _rows(model: ModelChange, units: Units) -> Iterator[tuple[str, ...]]:
    for peak in model.peaks:
        sizes = (
            "-" if nbytes is None else format_bytes(nbytes, units)
            for nbytes in (peak.old_bytes, peak.new_bytes)
        )
        yield model.model, tokens(peak.prompt_tokens), *sizes, *_change(peak, units)


def _change(peak: PeakChange, units: Units) -> tuple[str, str]:
    if peak.old_bytes is None or peak.new_bytes is None:
        return "", ""
    more = peak.new_bytes - peak.old_bytes
    if not more:
        return "0", ""
    sign = "+" if more > 0 else "-"
    return f"{sign}{format_bytes(abs(more), units)}", f"{100 * more / peak.old_bytes:+.2f} %"


def _calls(calls: tuple[CallShape, ...]) -> str:
    return " ".join(str(count) if rows == count else f"{count}:{rows}" for count, rows in calls)


def _messages(result: LibraryDiff) -> Iterator[str]:
    for model in result.models:
        for version, message in (
            (result.old_version, model.old_message),
            (result.new_version, model.new_message),
        ):
            if message is not None:
                yield f"{version}: {message}"
