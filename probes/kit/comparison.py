"""Read kits, whose files are from other people, and put them side by side."""

from collections.abc import Sequence
from pathlib import Path

from memfit.estimators.base.files import read_whole
from memfit.estimators.base.reading.section import json_section, to_record
from memfit.probes.kit.result import KIT, ComparedCheck, Kit, KitComparison, KitSummary

_MOST_BYTES = 2_000_000
_MOST_VALUES = 50_000


def read_kit(path: Path) -> Kit:
    """Return the kit of a file.

    Raises:
        InputError: naming the file and the key, when it is none or damaged.
    """
    content = read_whole(path, limit=_MOST_BYTES)
    top = json_section(content, path, what="the kit", max_values=_MOST_VALUES)
    if top.values.get("schema") != KIT:
        raise top.fail("schema", f"expected {KIT}, which memfit tune --kit -o FILE.json writes")
    return to_record(Kit, top.values, top.reading)


def compare_kits(kits: Sequence[Kit]) -> KitComparison:
    """Return every check of the kits beside the same check of the others."""
    by_key = [{check.key: check for check in kit.checks} for kit in kits]
    keys = dict.fromkeys(key for checks in by_key for key in checks)
    return KitComparison(
        kits=tuple(map(_summary, kits)),
        checks=tuple(
            ComparedCheck(
                subject=key[0],
                setting=key[1],
                figure=key[2],
                kits=tuple(checks.get(key) for checks in by_key),
            )
            for key in keys
        ),
    )


def _summary(kit: Kit) -> KitSummary:
    statuses = [check.status for check in kit.checks]
    return KitSummary(
        memfit_version=kit.memfit_version,
        mlx_version=kit.mlx_version,
        mlx_lm_version=kit.mlx_lm_version,
        mlx_vlm_version=kit.mlx_vlm_version,
        system=kit.system,
        device=kit.device,
        seconds=kit.seconds,
        measured=statuses.count("measured"),
        different=sum(check.is_different for check in kit.checks),
        not_run=statuses.count("not run"),
        failed=statuses.count("failed"),
    )
