"""The command line in this process: arguments in, output and exit code out."""

import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from memfit.cli.app import main

SCHEMAS = Path(__file__).parents[2] / "docs" / "schema"


@dataclass(frozen=True)
class Run:
    """The exit code and output of one run."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The output as JSON, validated with the schema that it names."""
        return validated(json.loads(self.out))


def validated(document: Any) -> Any:
    """Return a document that agrees with the schema that it names."""
    name = document["schema"].removeprefix("memfit.").partition("/")[0]
    _validator(name).validate(document)
    return document


@cache
def _validator(name: str) -> Draft202012Validator:
    # test_schemas.py checks the schemas themselves, which takes longer than a document.
    return Draft202012Validator(json.loads((SCHEMAS / f"{name}.schema.json").read_text()))


class Memfit:
    """Runs the command line and captures its output."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: str | Path) -> Run:
        self._monkeypatch.setattr(sys, "argv", ["memfit", *map(str, arguments)])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = self._capsys.readouterr()
        return Run(int(exit_.value.code or 0), captured.out, captured.err)
