"""`memfit schema` prints the schemas that the package ships."""

from pathlib import Path

import pytest

from tests.cli.running import SCHEMAS, Memfit

FILES = sorted(SCHEMAS.glob("*.json"))


def test_the_list_has_every_schema_and_is_as_wide_as_the_screen(
    memfit: Memfit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    ran = memfit("schema")
    names = [line.partition(":")[0] for line in ran.out.splitlines() if ": " in line]
    assert names == [path.name.removesuffix(".schema.json") for path in FILES]
    assert max(map(len, ran.out.splitlines())) <= 60


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_schema_is_printed_as_it_is_in_the_docs(memfit: Memfit, path: Path) -> None:
    ran = memfit("schema", path.name.removesuffix(".schema.json"))
    assert (ran.code, ran.out) == (0, path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["estimates", "../schema/estimate", "estimate.schema.json", ""])
def test_an_unknown_name_is_one_line(memfit: Memfit, name: str) -> None:
    ran = memfit("schema", name)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == f"memfit: no schema {name!r}; memfit schema lists all\n"
