"""docs/schema has the JSON Schema of every document for programs, generated from its type.

``python -m tests.test_schemas`` rewrites them.
"""

import ast
import inspect
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Any

import msgspec
from jsonschema import Draft202012Validator
from msgspec import UNSET, Struct
from msgspec.inspect import StructType

from memfit.estimators.gate.policy_file import PolicyKeys
from memfit.estimators.results.result import Result

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "schema"
FILES = sorted(FOLDER.glob("*.json"))
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def documents(base: type[Result] = Result) -> Iterator[type[Result]]:
    """Yield every type of document in the modules that are imported."""
    for kind in base.__subclasses__():
        yield kind
        yield from documents(kind)


def texts() -> dict[str, str]:
    """Return the content of every schema file, by its name."""
    for path in (*ROOT.glob("estimators/**/*.py"), *ROOT.glob("probes/**/*.py")):
        if "(Result, " in path.read_text(encoding="utf-8"):
            import_module(".".join(("memfit", *path.relative_to(ROOT).with_suffix("").parts)))
    schemas = [*map(schema_of, documents()), schema_of(PolicyKeys)]
    return {_file(schema): json.dumps(schema, indent=2) + "\n" for schema in schemas}


def schema_of(document: type[Struct]) -> dict[str, Any]:
    """Return the JSON Schema of a document."""
    info = msgspec.inspect.type_info(document)
    assert isinstance(info, StructType)
    definitions = msgspec.json.schema(document)["$defs"]
    for each in _structs(info):
        definitions[each.cls.__name__] |= _completed(definitions[each.cls.__name__], each)
    top = definitions.pop(document.__name__)
    return {"$schema": DIALECT, **top, "title": info.tag, "$defs": definitions}


def _file(schema: dict[str, Any]) -> str:
    name, _, _ = schema["title"].removeprefix("memfit.").partition("/")
    return f"{name}.schema.json"


def _structs(info: Any) -> Iterator[StructType]:
    """Yield every struct that a type contains, each at least once."""
    if isinstance(info, StructType):
        yield info
        for field in info.fields:
            yield from _structs(field.type)
    for name in ("type", "types", "item_type", "item_types", "key_type", "value_type"):
        inner = getattr(info, name, ())
        for each in inner if isinstance(inner, tuple) else (inner,):
            yield from _structs(each)


def _completed(definition: dict[str, Any], info: StructType) -> dict[str, Any]:
    """Add the docstrings; a document has every key unless its type leaves it out."""
    optional = {
        field.name
        for field in msgspec.structs.fields(info.cls)
        if field.default is UNSET
        or (info.cls.__struct_config__.omit_defaults and not field.required)
    }
    texts = described(info.cls)
    if "prefixItems" in definition:  # a list whose places are its fields
        names = [field.name for field in msgspec.structs.fields(info.cls)]
        items = [
            {"title": name, **each, **({"description": texts[name]} if name in texts else {})}
            for name, each in zip(names, definition["prefixItems"], strict=True)
        ]
        return {"description": _plain(info.cls.__doc__ or ""), "prefixItems": items}
    properties = {
        name: {
            **{key: value for key, value in each.items() if key != "default"},
            **({"description": texts[name]} if name in texts else {}),
        }
        for name, each in definition["properties"].items()
    }
    return {
        "description": _plain(info.cls.__doc__ or ""),
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def described(kind: type) -> dict[str, str]:
    """Return the docstring under each field of a struct and of those that it extends."""
    found = {}
    for each in reversed(kind.__mro__):
        if each.__module__.startswith("memfit."):
            (tree,) = ast.parse(dedent(inspect.getsource(each))).body
            assert isinstance(tree, ast.ClassDef)
            for field, text in zip(tree.body, tree.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    found[ast.unparse(field.target)] = _plain(ast.literal_eval(text.value))
    return found


def _plain(docstring: str) -> str:
    text = inspect.cleandoc(docstring).partition("\n\nRaises:")[0]
    return " ".join(text.replace("``", "`").split())


def test_the_schemas_are_those_of_the_types() -> None:
    """After a change of a type run ``make docs``."""
    assert {path.name: path.read_text(encoding="utf-8") for path in FILES} == texts()


def test_every_schema_is_valid() -> None:
    for path in FILES:
        Draft202012Validator.check_schema(json.loads(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    for name, text in texts().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
