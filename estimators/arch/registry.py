"""From a config to a model: which family describes which ``model_type``."""

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from memfit.estimators import dtypes
from memfit.estimators.arch.fields import Fields
from memfit.estimators.arch.model import Model
from memfit.estimators.arch.structural import unexplained
from memfit.estimators.errors import UnsupportedError

# model_type -> module of arch/families, imported only when asked for.
FAMILIES: dict[str, str] = {
    "qwen3_next": "qwen3_next",
}

_MAX_CONTEXT_KEYS = (
    "max_position_embeddings",
    "max_sequence_length",
    "model_max_length",
    "max_seq_len",
    "n_positions",
    "seq_length",
)


def build_model(config: Mapping[str, Any], name: str) -> Model:
    """Return the model a config describes; ``name`` is how messages name the config.

    Raises:
        ConfigError: when a key is missing or holds a wrong value.
        UnsupportedError: when the model type is not described, or a key that looks
            structural was read by nobody.
    """
    fields = Fields(config, name)
    model_type = fields.text("model_type")
    if model_type not in FAMILIES:
        raise UnsupportedError(_unknown_type(name, model_type))
    model = _family(model_type).build(fields)
    unknown = list(unexplained(fields))
    if unknown:
        raise UnsupportedError(
            f"{name}: {', '.join(unknown[:5])}: looks structural and is not described for"
            f" model type {model_type!r}; its caches and workspace cannot be given"
        )
    return replace(
        model, dtype=_dtype(fields, name), max_context=model.max_context or _max_context(fields)
    )


def _family(model_type: str) -> Any:
    return import_module(f"memfit.estimators.arch.families.{FAMILIES[model_type]}")


def _unknown_type(name: str, model_type: str) -> str:
    import difflib

    near = difflib.get_close_matches(model_type, FAMILIES, n=3, cutoff=0.5)
    hint = f"; nearest known: {', '.join(near)}" if near else ""
    return f"{name}: model_type: {model_type[:60]!r} is not described{hint}"


def _sections(fields: Fields) -> tuple[Fields, ...]:
    return (fields, fields.section("text_config")) if fields.has("text_config") else (fields,)


def _dtype(fields: Fields, name: str) -> str:
    for section in _sections(fields):
        for key in ("dtype", "torch_dtype"):
            if section.has(key):
                where = f"{name}: {section.full_path(key)}"
                return dtypes.from_config_name(section.text(key), where=where)
    return "BF16"


def _max_context(fields: Fields) -> int | None:
    for section in reversed(_sections(fields)):
        for key in _MAX_CONTEXT_KEYS:
            if section.has(key):
                return section.count(key)
    return None
