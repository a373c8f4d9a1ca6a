"""Escape text from outside for the formats that people read."""

_MARKDOWN = str.maketrans({mark: f"\\{mark}" for mark in "\\|<`*_["})


def escape_markdown(text: str) -> str:
    r"""Return a text that Markdown shows as it is, also in a table cell.

    >>> print(escape_markdown("a_b [c](d) | <e>"))
    a\_b \[c](d) \| \<e>
    """
    return text.translate(_MARKDOWN)
