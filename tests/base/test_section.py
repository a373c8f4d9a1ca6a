"""The section reader: the first error is raised, or all of them are collected."""

from pathlib import Path

import pytest

from memfit.estimators.base.errors import InputError, PolicyError
from memfit.estimators.base.reading.section import Section, as_size, one_of, read_yaml

TEXT = """\
kind: maybe
size: 12
stray: 1
nested: [1]
items:
  - {size: 1GB}
  - {size: 2}
kind: yes
"""
KEYS = ("kind", "size", "nested", "items")


def read(folder: Path, text: str = TEXT, *, collect: bool = False) -> Section:
    path = folder / "file.yaml"
    path.write_text(text)
    return read_yaml(path, KEYS, limit=1000, collect=collect)


def take_all(top: Section) -> list[int | None]:
    top.take("kind", one_of(("a", "b")))
    top.take("size", as_size)
    top.mapping("nested", ())
    return [item.take("size", as_size) for item in top.mappings("items", ("size",))]


def test_all_errors_are_collected_in_the_order_of_the_file(tmp_path: Path) -> None:
    top = read(tmp_path, collect=True)
    assert take_all(top) == [10**9, None]
    with pytest.raises(PolicyError) as caught:
        top.reading.finish()
    places = [(mistake.line, mistake.key) for mistake in caught.value.mistakes]
    assert places == [
        (1, "kind"),
        (2, "size"),
        (3, "stray"),
        (4, "nested"),
        (7, "items[1].size"),
        (8, "kind"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TEXT, r"file\.yaml:8: kind: this name appears twice"),
        ("stray: 1", r"file\.yaml:1: stray: no such key; there is kind, size"),
        ("kind: c", r"file\.yaml:1: kind: expected a, b; got 'c'"),
        ("\nsize: 12", r"file\.yaml:2: size: expected a size with its unit"),
        ("nested: 1", r"file\.yaml:1: nested: expected a mapping"),
        ("[1]", r"file\.yaml:1: expected a mapping"),
        ("items: []", r"file\.yaml:1: kind is missing"),
    ],
)
def test_the_first_error_is_raised_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    def take_first() -> None:
        top = read(tmp_path, text)
        top.need("kind", one_of(("a", "b"))) if "items" in top else take_all(top)

    with pytest.raises(InputError, match=message):
        take_first()


def test_without_an_error_nothing_is_raised(tmp_path: Path) -> None:
    text = "kind: a\nsize: 2GB\nnested: {}\nitems: [{size: 0}]\n"
    for collect in (True, False):
        top = read(tmp_path, text, collect=collect)
        assert take_all(top) == [0]
        top.reading.finish()
