"""The command line in this process: arguments in, output and exit code out."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

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
        data = json.loads(self.out)
        name = data["schema"].removeprefix("memfit.").partition("/")[0]
        jsonschema.validate(data, json.loads((SCHEMAS / f"{name}.schema.json").read_text()))
        return data


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
