"""A kit of checks, and several side by side, as documents."""

from collections.abc import Iterator

from memfit.cli.render.document import Document, Table, report
from memfit.cli.render.view import view
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.machine.device import name_as_sold
from memfit.probes.kit.comparison import compare_kits
from memfit.probes.kit.result import Kit, KitCheck, KitSummary

NOTHING = "-"


@view(Kit)
def to_document(result: Kit, units: Units) -> Document:
    """Return the document of one kit, with every check."""
    rows = tuple(
        (
            *each.key,
            value(each, each.estimated, units),
            value(each, each.measured, units) if each.status == "measured" else each.status,
            difference(each, units),
        )
        for each in result.checks
    )
    [summary] = compare_kits([result]).kits
    headings = ("Model", "Setting", "Figure", "Estimated", "Measured", "Difference")
    return report(
        title="Kit of this machine",
        facts=tuple(facts(summary)),
        tables=(Table(headings, rows, align="lllr", wrapped=(1, 2), keys=3),),
        verdict=counted(summary),
        colour="yellow" if summary.failed else "default",
        sections=(("Not run or failed", reasons(result.checks)),),
    )


def facts(kit: KitSummary) -> Iterator[str]:
    """Yield what a kit was measured on."""
    device = kit.device
    yield f"{name_as_sold(device.name)}, {device.backend}, {kit.system}"
    vision = f", mlx-vlm {kit.mlx_vlm_version}" if kit.mlx_vlm_version else ""
    yield f"mlx {kit.mlx_version}, mlx-lm {kit.mlx_lm_version}{vision}, memfit {kit.memfit_version}"


def counted(kit: KitSummary) -> str:
    """The checks of a kit in one sentence."""
    failed = f", {kit.failed} failed" if kit.failed else ""
    return (
        f"{kit.measured} checks measured in {kit.seconds} s, {kit.different} off by more than"
        f" 0.5 %; {kit.not_run} not run here{failed}."
    )


def value(check: KitCheck, amount: int | None, units: Units) -> str:
    """An amount in its unit."""
    if amount is None:
        return NOTHING
    if check.unit == "nanoseconds":
        return f"{amount / 1e6:.1f} ms"
    if check.unit == "yes":
        return "yes" if amount else "no"
    return format_bytes(amount, units)


def difference(check: KitCheck, units: Units) -> str:
    """How far a measurement is from its estimate."""
    found = check.difference
    if found is None:
        return NOTHING
    if check.unit == "yes":
        return "as expected" if not found else "not as expected"
    if not found:
        return "0"
    share = f" ({found / check.estimated:+.2%})" if check.estimated else ""
    return f"{'+' if found > 0 else '-'}{format_bytes(abs(found), units)}{share}"


def reasons(checks: tuple[KitCheck, ...]) -> tuple[str, ...]:
    """Each reason why checks were not run or failed, once."""
    found = (f"{each.subject}: {each.reason}" for each in checks if each.reason)
    return tuple(dict.fromkeys(found))
