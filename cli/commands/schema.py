"""``memfit schema``: the JSON Schema of each document for programs."""

import json
from typing import Annotated, NamedTuple

import typer

from memfit.cli.render.document import Document, Text
from memfit.cli.render.output import emit, rendered
from memfit.estimators.base.errors import InputError

_SUFFIX = ".schema.json"


class Schemas(NamedTuple):
    """The schemas by their names."""

    texts: dict[str, str]

    def document(self) -> Document:
        """Return a line for each schema."""
        described = {name: json.loads(text)["description"] for name, text in self.texts.items()}
        return (Text(tuple(f"{name}: {text}" for name, text in described.items())),)


def schema(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="A schema of the list; without it, the list."),
    ] = None,
) -> None:
    """Print the JSON Schema of what a command writes.

    Without a name, list all schemas.
    """
    texts = _texts()
    if name is None:
        emit(rendered(Schemas(texts), "table", to_file=False), None)
    elif name in texts:
        emit(texts[name], None)
    else:
        raise InputError(f"no schema {name[:40]!r}; memfit schema lists all")


def _texts() -> dict[str, str]:
    from importlib.resources import files

    schemas = (file for file in files("memfit.schema").iterdir() if file.name.endswith(_SUFFIX))
    return {
        file.name.removesuffix(_SUFFIX): file.read_text(encoding="utf-8")
        for file in sorted(schemas, key=lambda file: file.name)
    }
