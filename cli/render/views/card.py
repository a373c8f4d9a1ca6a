"""A memory card as a document."""

from memfit.cli.render.document import Document, Table, report
from memfit.cli.render.view import view
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.results.card import MemoryCard


@view(MemoryCard)
def to_document(result: MemoryCard, units: Units) -> Document:
    """Return what the card is of, and how far it is above memfit's own figures."""
    check = result.check
    rows = [
        (name, format_bytes(nbytes, units), f"{percent:.2f} %")
        for name, nbytes, percent in zip(
            ("median", "95 %", "most"), check.excess_bytes, check.excess_percent, strict=True
        )
    ]
    knots = sum(len(row.first) + len(row.later) for row in result.rows)
    return report(
        title=f"{result.model}: memory card",
        facts=(
            f"{result.weight_bits} bits per weight, {result.runtime} {result.runtime_version}, MLX"
            f" {result.mlx_version}, {result.gpu.backend}"
            + (" with matrix units" if result.gpu.has_matrix_units else ""),
            f"weights {format_bytes(result.weights_bytes, units)}; up to {result.max_tokens}"
            f" tokens; {len(result.rows)} rows with {knots} knots",
        ),
        tables=(Table(("Above memfit", "bytes", "of the peak"), tuple(rows), align="lrr"),),
        verdict=(
            f"below memfit's own figure in {check.below} of {check.questions} random questions,"
            f" with a pad of {format_bytes(check.pad_bytes, units)}"
        ),
        colour="green" if not check.below else "yellow",
        sections=(
            (
                "Notes",
                (
                    f"memfit's own workspace may be off by {check.error_percent} %",
                    "one sequence with a 16-bit cache; limits of a machine are not in the card",
                ),
            ),
        ),
    )
