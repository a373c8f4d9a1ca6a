"""Show what a terminal or a page must not interpret."""

import sys


def visible(text: str) -> str:
    r"""Return a text with escape sequences for control characters and marks of direction.

    Also for "##[": it starts a command to GitHub's runner, which reads all that a job prints.

    >>> visible("a\x1b[1m b\u202e")
    'a\\x1b[1m b\\u202e'
    """
    if not text.isprintable():
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return text.replace("##[", r"##\x5b")


def message(text: str) -> str:
    """Return a message for standard error, in one line."""
    return f"memfit: {visible(' '.join(text.split()))}"


def say(text: str) -> None:
    """Write a message to standard error."""
    print(message(text), file=sys.stderr)
