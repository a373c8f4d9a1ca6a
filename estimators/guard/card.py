"""Memory cards as files: read strictly, and their evaluators in five languages."""

from importlib.resources import files
from itertools import pairwise
from pathlib import Path

from msgspec import DecodeError, ValidationError, to_builtins
from msgspec.json import decode

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import printable, read_whole, short
from memfit.estimators.guard.evaluators.memory_card import peak
from memfit.estimators.results.card import Knot, MemoryCard

LANGUAGES = {
    "python": "memory_card.py",
    "javascript": "memory_card.js",
    "go": "memory_card.go",
    "rust": "memory_card.rs",
    "swift": "memory_card.swift",
}
MOST_BYTES = 2**20


def evaluator(language: str) -> str:
    """Return the source of an evaluator: one file without dependencies."""
    folder = files("memfit.estimators.guard.evaluators")
    return folder.joinpath(LANGUAGES[language]).read_text(encoding="utf-8")


def read_card(path: Path) -> MemoryCard:
    """Return the card of a file, whose tables are in order and give its own vectors.

    Raises:
        InputError: naming what is wrong, for anything else.
    """
    name = printable(str(path))
    try:
        card = decode(read_whole(path, limit=MOST_BYTES), type=MemoryCard)
    except (ValidationError, DecodeError) as error:
        raise InputError(f"{name}: no memory card: {error}") from None
    if fault := _fault(card):
        raise InputError(f"{name}: {fault}; make the card again with memfit card")
    return card


def _fault(card: MemoryCard) -> str:
    """Return what is wrong with a card, nothing where it can be evaluated."""
    lengths = [row.tokens for row in card.rows]
    if not card.steps or not lengths or max(card.steps) > lengths[-1]:
        return "rows: they end before the longest prefill step"
    if any(left >= right for left, right in pairwise(lengths)):
        return "rows: their tokens do not ascend"
    tables = {"decode": card.decode, "growing": card.growing}
    for row in card.rows:
        tables |= {f"rows, {row.tokens}, first": row.first, f"rows, {row.tokens}, later": row.later}
    for name, knots in tables.items():
        if not _ascends(knots, card.max_tokens):
            return f"{name}: its knots do not ascend to {card.max_tokens} tokens"
    plain = to_builtins(card)
    for *question, expected in card.vectors:
        try:
            answer = peak(plain, *question)
        except ValueError as error:
            return f"vectors: {short(question)}: {error}"
        if answer != expected:
            return f"vectors: {short(question)} gives {answer}, not {expected}"
    if not card.vectors:
        return "vectors: there are none to check it by"
    return "" if card.sha256 == card.digest() else "sha256: the card was altered"


def _ascends(knots: tuple[Knot, ...], most: int) -> bool:
    keys = [each[0] for each in knots]
    ascends = all(left < right for left, right in pairwise(keys))
    return ascends and len(keys) > 1 and keys[-1] >= most
