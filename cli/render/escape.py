"""Show what a terminal or a page must not interpret."""


def visible(text: str) -> str:
    r"""Return a text in which control characters and marks of direction are escape sequences.

    >>> visible("a\x1b[1m b\u202e")
    'a\\x1b[1m b\\u202e'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
