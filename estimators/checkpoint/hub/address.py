"""Addresses of the Hub: pages of a model as a browser has them, and names as Ollama writes them."""

from typing import NamedTuple
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from memfit.estimators.base.errors import CheckpointError, UnsupportedError
from memfit.estimators.base.files import printable

_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
# What the first word of a path is where it is no organisation.
_OTHER = {
    "datasets": "a data set",
    "spaces": "a space",
    "collections": "a collection",
    "papers": "a paper",
    "docs": "a page of the documentation",
}
_OF_FILES = ("tree", "blob", "resolve", "raw", "commit", "commits")
_SUFFIX = ".gguf"


class _Page(NamedTuple):
    """A page of a repository."""

    name: str
    revision: str = ""
    choice: str = ""
    """A GGUF file, or its quantisation."""
    path: str = ""
    """Of a folder or another file in the repository."""


def hub_name(address: str, *, endpoint: str) -> str:
    """Return ``org/name[@revision][:file]`` of an address.

    ``endpoint`` is the address of the Hub that is configured, which can be a mirror.

    Raises:
        CheckpointError: when it is no address of a model on the Hub.
        UnsupportedError: for a page of something else, such as a data set.

    >>> hub_name("https://hf.co/org/name/blob/main/a-Q4_0.gguf", endpoint="")
    'org/name@main:a-Q4_0.gguf'
    """
    page = _page(_split(address, endpoint), address)
    if "/" in page.path:
        raise CheckpointError(
            f"{printable(address)}: in a folder of {page.name}; memfit reads the model at the top"
            f" of a repository, or {page.name}:folder/file.gguf"
        )
    revision = f"@{page.revision}" if page.revision else ""
    return f"{page.name}{revision}{f':{page.choice}' if page.choice else ''}"


def _split(address: str, endpoint: str) -> SplitResult:
    try:
        parts = urlsplit(address if "://" in address else f"https://{address}")
        host, served = parts.netloc.rpartition("@")[2].lower(), urlsplit(endpoint).netloc.lower()
    except ValueError:
        raise CheckpointError(f"{printable(address)}: not an address; write org/name") from None
    if host not in (*_HOSTS, served):
        raise CheckpointError(
            f"{printable(address)}: not an address of the Hub ({served or _HOSTS[0]}); write"
            " org/name; HF_ENDPOINT names another Hub"
        )
    return parts


def _page(parts: SplitResult, address: str) -> _Page:
    words = [unquote(word) for word in parts.path.split("/") if word]
    if words and words[0] in _OTHER:
        raise UnsupportedError(
            f"{printable(address)}: is {_OTHER[words[0]]}, not a model; give a model's page"
        )
    if len(words) < 2:
        raise CheckpointError(f"{printable(address)}: names no model; write org/name")
    name, _, tag = words[1].partition(":")
    repository = f"{words[0]}/{name}"
    if len(words) > 3 and words[2] in _OF_FILES:
        path = "/".join(words[4:])
        if path.lower().endswith(_SUFFIX):
            return _Page(repository, words[3], choice=path)
        return _Page(repository, words[3], path=f"{path}/" if words[2] == "tree" and path else path)
    # The page of a repository with the table of a file's tensors.
    shown = next(iter(parse_qs(parts.query).get("show_file_info", ())), "")
    choice = shown if shown.lower().endswith(_SUFFIX) else ""
    return _Page(repository, choice=choice or ("" if tag == "latest" else tag))
