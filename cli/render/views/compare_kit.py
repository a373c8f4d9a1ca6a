"""Kits of several machines side by side as a document."""

from memfit.cli.render.document import Document, Table, report
from memfit.cli.render.view import view
from memfit.cli.render.views.kit import counted, difference, facts, value
from memfit.estimators.base.units import Units
from memfit.probes.kit.result import ComparedCheck, KitCheck, KitComparison


@view(KitComparison)
def to_document(result: KitComparison, units: Units, show_all: bool = False) -> Document:
    """Return the document: a row for each check, a column for each kit."""
    shown = [each for each in result.checks if show_all or _is_worth_a_row(each)]
    labels = [f"Kit {number}" for number in range(1, len(result.kits) + 1)]
    table = Table(
        ("Model", "Setting", "Figure", *labels),
        tuple(
            (each.subject, each.setting, each.figure, *(_cell(kit, units) for kit in each.kits))
            for each in shown
        ),
        align="lllr",
        wrapped=(1, 2),
        keys=3,
    )
    different = sum(each.is_different for each in result.checks)
    counts = f"{different} of {len(result.checks)} checks"
    return report(
        title="Kits side by side",
        facts=tuple(
            f"{label}: {'; '.join(facts(kit))}"
            for label, kit in zip(labels, result.kits, strict=True)
        ),
        tables=(table,) if shown else (),
        verdict=f"{counts} are off by more than 0.5 % on a machine.",
        colour="default",
        sections=(
            (
                "Checks",
                tuple(
                    f"{label}: {counted(kit)}"
                    for label, kit in zip(labels, result.kits, strict=True)
                ),
            ),
        ),
    )


def _is_worth_a_row(check: ComparedCheck) -> bool:
    """Whether a kit differs from its estimate, failed, or has a time, which has no estimate."""
    return check.is_different or any(
        each and (each.status == "failed" or each.unit == "nanoseconds") for each in check.kits
    )


def _cell(check: KitCheck | None, units: Units) -> str:
    if check is None:
        return "-"
    if check.status != "measured":
        return check.status
    if check.difference is None:
        return value(check, check.measured, units)
    return difference(check, units)
