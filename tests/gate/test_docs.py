"""docs/gate.md lists every key, format and example of the code, and no other."""

import re
from pathlib import Path
from typing import get_args

import pytest

from memfit.cli.commands.gate import GateFormat
from memfit.estimators.gate import policy_file as keys

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "gate.md").read_text(encoding="utf-8")


def listed(heading: str) -> list[str]:
    """Return the names in the first column of the table under a heading."""
    section = re.split(r"^#+ ", PAGE.split(f" {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)
    cells = re.findall(r"^\| (`.*?`) \|", section[0], re.MULTILINE)
    return re.findall(r"`([^`]+)`", " ".join(cells))


@pytest.mark.parametrize(
    ("heading", "named"),
    [
        ("Top", ("schema", *keys.PolicyKeys.__struct_fields__)),
        ("Target", keys.TargetKeys.__struct_fields__),
        ("Workload", keys.WorkloadKeys.__struct_fields__),
        ("Limits", keys.LimitKeys.__struct_fields__),
        ("Growth", keys.GrowthKeys.__struct_fields__),
        ("Formats", get_args(GateFormat)),
    ],
)
def test_the_page_lists_every_key_the_code_reads(heading: str, named: tuple[str, ...]) -> None:
    assert sorted(listed(heading)) == sorted(named)


def test_the_policy_on_the_page_is_the_one_that_runs() -> None:
    shown = re.search(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert shown
    assert shown[1] == (ROOT / "docs" / "examples" / "memfit.yaml").read_text()
