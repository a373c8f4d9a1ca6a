"""What a word means: one published model of the index, or the ones that it could be."""

import re
from collections.abc import Iterable
from decimal import Decimal
from typing import NamedTuple

from memfit.estimators.base.errors import CheckpointError
from memfit.estimators.base.files import printable
from memfit.estimators.checkpoint.index.names import (
    Name,
    find,
    is_copy,
    is_plain,
    name_words,
    originals,
    same_family,
)
from memfit.estimators.checkpoint.index.records import Index, IndexedModel

_LISTED = 8
_MILLION, _BILLION = 10**6, 10**9
_NAMED = re.compile(r"(?:(\d+)x)?e?(\d+(?:\.\d+)?)([bm])")
_DRAFTS = re.compile(r"dflash|eagle\d*|speculator|draft|drafter")
"""Words of models that draft for the one whose size is in their name."""


class Meaning(NamedTuple):
    """The model that a word was taken for, and what else it could be."""

    model: IndexedModel
    others: tuple[str, ...]


def look_up(word: str, index: Index) -> Meaning | None:
    """Return the model of the index that a word means; None where there is none.

    Raises:
        CheckpointError: when it could be models of several sizes, which the message lists.
    """
    if word in index.names:
        return Meaning(index.model(word), ())
    found = find(word, index.names)
    if not found.best:
        return None
    if not name_words(word).size:
        _require_one_size(word, (*found.best, *found.others), index)
    models = [index.model(name) for name in found.best]
    # Those with a config first, of these the first publisher's, of these the newest.
    models.sort(key=lambda model: (model.released, model.name), reverse=True)
    models.sort(key=lambda model: (model.config is None, is_copy(model.name)))
    taken = models[0].name
    less = [
        name for name in same_family(taken, found.others) if is_plain(name) and not is_copy(name)
    ]
    less.sort(key=lambda name: name.partition("/")[0] != taken.partition("/")[0])
    others = originals([*(model.name for model in models), *less])[1:]
    return Meaning(models[0], tuple(others))


def model_size(model: IndexedModel) -> str:
    """Return a model's parameters as text: what is published, else what its name says.

    >>> model_size(IndexedModel(name="Qwen/Qwen3-8B", parameters=8190735360))
    '8.2 B'
    """
    if count := model.parameters or _whole_total(model):
        return f"{count / _BILLION:.{1 if count >= _BILLION else 2}f} B"
    return name_words(model.name).size.upper()


def _require_one_size(word: str, names: Iterable[str], index: Index) -> None:
    known = list(names)
    plain = [name for name in known if is_plain(name) and not is_copy(name)] or known
    unique: dict[Name, str] = {}
    for name in same_family(word, plain) or plain:
        words = name_words(name)
        unique.setdefault(Name(words.family, words.size, ()), name)
    if len(unique) < 2:
        return
    models = sorted((index.model(name) for name in unique.values()), key=_parameters)
    sizes = ((model.name, model_size(model)) for model in models[:_LISTED])
    listed = [f"{name} ({size})" if size else name for name, size in sizes]
    more = f" and {len(models) - _LISTED} more" if len(models) > _LISTED else ""
    raise CheckpointError(
        f"{printable(word)!r}: no such path, and several models: {', '.join(listed)}{more};"
        " write one with its size"
    )


def _parameters(model: IndexedModel) -> tuple[int, str]:
    return model.parameters or _whole_total(model) or _named(model.name), model.name


def _whole_total(model: IndexedModel) -> int:
    """Return the published total, 0 where there is none or it is of a part of the model.

    Sources count what some files have, or the tensors that are not packed: less than half of what
    the name says is not the model, unless it is one that drafts.

    >>> _whole_total(IndexedModel(name="baidu/ERNIE-4.5-21B-A3B-PT", published=2760376320))
    0
    """
    drafts = any(map(_DRAFTS.fullmatch, name_words(model.name).rest))
    total = model.published or 0
    return total if drafts or 2 * total >= _named(model.name) else 0


def _named(name: str) -> int:
    """Return the parameters that a name states, 0 where it states none.

    >>> _named("upstage/Solar-Open-100B"), _named("google/gemma-3-270m"), _named("a/Mixtral-8x7B")
    (100000000000, 270000000, 56000000000)
    """
    parts = _NAMED.fullmatch(name_words(name).size)
    if not parts:
        return 0
    unit = _BILLION if parts[3] == "b" else _MILLION
    return int(int(parts[1] or 1) * Decimal(parts[2]) * unit)
