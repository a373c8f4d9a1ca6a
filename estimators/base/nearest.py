"""What a mistyped name was probably meant to be."""

from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], *, most: int = 3) -> str:
    """Return the known names nearest to a name, joined with commas; empty when none is near.

    >>> nearest("llamacpp", ["mlx-lm", "llama.cpp"])
    'llama.cpp'
    """
    import difflib  # costs more than most look-ups, and only a typo needs it

    return ", ".join(difflib.get_close_matches(name, list(known), n=most, cutoff=0.5))
