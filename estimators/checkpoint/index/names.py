"""Names of models as people write them: family and size, Ollama's tags, display names.

A name is split into words. Those before the size are the family and have to be the same, so that
``Qwen3-4B`` is never ``Qwen3-VL-4B``; those after it narrow the choice (``-Instruct``, ``-2507``).
"""

import re
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

_WORD = re.compile(
    r"\d\d-\d{4}(?!\d)"  # a month: 12-2024
    r"|\d+x\d+(?:\.\d+)?b"  # experts by size: 8x7b
    r"|[ae]?\d+(?:\.\d+)?[bm](?![a-z0-9])"  # sizes: 0.6b, 135m; active: a3b; effective: e4b
    r"|(?<![a-z])[a-z]\d+(?:\.\d+)*[a-z]?(?![a-z0-9])"  # versions: r1, v0.3, m2.5, r7b
    r"|[a-z]+|\d+(?:\.\d+)*"
)
_SIZE = re.compile(r"\d+x\d+(?:\.\d+)?b|e?\d+(?:\.\d+)?[bm]")
_DATE = re.compile(r"\d{4}|\d\d-\d{4}")
_CHAT = ("instruct", "it", "chat")
# Words of a name that do not make it another model where none of them is asked for.
_DETAIL = re.compile(r"a\d+(?:\.\d+)?b|\d{1,3}e|hf|bf16|v\d+(?:\.\d+)*|preview|instruct|it|chat")
_ACTIVE = re.compile(r"a\d+(?:\.\d+)?b|\d{1,3}e|hf|bf16")
_OWNER = re.compile(r"^(?:meta|nvidia|c4ai|mistralai|google)[-_ ]+")
# Who publishes the same weights again.
_COPIES = (
    "huggyllama lmstudio-community mlx-community nousresearch primeintellect redhatai thebloke"
    " unsloth"
).split()


class Name(NamedTuple):
    """The words of a name."""

    family: tuple[str, ...]
    size: str
    rest: tuple[str, ...]


class Found(NamedTuple):
    """The names that a word can mean."""

    best: tuple[str, ...]
    """Those that fit it best, equally well; the likeliest first."""
    others: tuple[str, ...]
    """Those that fit it less well."""


@cache
def name_words(name: str) -> Name:
    """Split a name, or a repository without its owner, into words.

    >>> name_words("Qwen/Qwen3-30B-A3B-Instruct-2507")
    Name(family=('qwen', '3'), size='30b', rest=('a3b', 'instruct', '2507'))
    """
    text = _OWNER.sub("", name.rpartition("/")[2].lower()).removesuffix(":latest")
    words = _WORD.findall(text)
    size = next((i for i, word in enumerate(words) if i and _SIZE.fullmatch(word)), None)
    end = len(words) if size is None else size
    while size is None and end > 1 and (_DATE.fullmatch(words[end - 1]) or words[end - 1] in _CHAT):
        end -= 1
    dates = [word for word in words[1:end] if _DATE.fullmatch(word)]
    family = tuple(word for word in words[:end] if word not in dates)
    if size is None:
        return Name(family, "", (*dates, *words[end:]))
    return Name(family, words[size], (*dates, *words[size + 1 :]))


def find(word: str, known: Iterable[str]) -> Found:
    """Return the known names that a word can mean; none where its family or size is unknown.

    >>> find("qwen3:8b", ["Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base", "Qwen/Qwen3-VL-8B-Instruct"])
    Found(best=('Qwen/Qwen3-8B',), others=('Qwen/Qwen3-8B-Base',))
    """
    wanted = name_words(word)
    if not wanted.family:
        return Found((), ())
    start = wanted.family[0]
    ranked: dict[int, list[str]] = {}
    for name in known:
        if start in name.lower() and (rank := _rank(wanted, name_words(name))) is not None:
            ranked.setdefault(rank, []).append(name)
    ordered = [sorted(ranked[rank], key=_order) for rank in sorted(ranked)]
    if not ordered:
        return Found((), ())
    rest = [name for names in ordered[1:] for name in names]
    return Found(tuple(ordered[0]), tuple(rest))


def same_family(word: str, names: Iterable[str]) -> list[str]:
    """Return the names of the family alone that a word names, whatever their size is."""
    family = name_words(word).family
    return [name for name in names if name_words(name).family == family]


def originals(names: Iterable[str]) -> list[str]:
    """Return the first of the names that are the same but for who publishes them."""
    unique: dict[Name, str] = {}
    for name in names:
        unique.setdefault(name_words(name), name)
    return list(unique.values())


def is_plain(name: str) -> bool:
    """Return whether a name says no more than a model, its size and its release.

    Not of quantised weights, or of a model made from another.
    """
    rest = name_words(name).rest
    return all(_DETAIL.fullmatch(each) or _DATE.fullmatch(each) for each in rest)


def is_copy(name: str) -> bool:
    """Return whether a repository is of one who publishes the weights of others again."""
    return name.partition("/")[0].lower() in _COPIES


def _rank(wanted: Name, name: Name) -> int | None:
    """How far a name is from what is wanted; None: it is another model."""
    known = len(wanted.family)
    if name.family[:known] != wanted.family or (wanted.size and wanted.size != name.size):
        return None
    extra = len(name.family) - known
    if extra and wanted.size:  # more words of the family are another model
        return None
    rest = list(name.rest)
    for each in wanted.rest:
        if each not in rest:
            return None
        rest.remove(each)
    details = [each for each in rest if _DETAIL.fullmatch(each) or _DATE.fullmatch(each)]
    counted = [each for each in details if not _ACTIVE.fullmatch(each)]
    return 16 * extra + 8 * (len(rest) - len(details)) + len(counted)


def _order(name: str) -> tuple[bool, str]:
    return is_copy(name), name.lower()
