"""What depends on the address of the repository: the project's URLs, and the links of the README.

pyproject.toml has everything else. A package index shows the README away from its files, so that
relative links lead nowhere there.
"""

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = ""
"""Its address, such as https://github.com/NAME/memfit, without a slash at the end. Set it here."""

_RELATIVE = r"\((?!https?:)([^()\s]+)\)"
_IMAGE = re.compile(rf"!\[([^\[\]]*)\]{_RELATIVE}")
_LINK = re.compile(rf"\[((?:!\[[^\[\]]*\]\([^()]*\)|[^\[\]])*)\]{_RELATIVE}")


def index_page(readme: str, repository: str) -> str:
    """Return a README with links into the repository; without one with paths, and no pictures."""
    if repository:
        page = _IMAGE.sub(rf"![\1]({repository}/raw/HEAD/\2)", readme)
        return _LINK.sub(rf"[\1]({repository}/blob/HEAD/\2)", page)
    page = _LINK.sub(_path, _IMAGE.sub("", readme))
    page = re.sub(r"\n{3,}", "\n\n", page)
    return f"{page}\nPaths are those of the source distribution.\n"


def _path(link: re.Match[str]) -> str:
    text, target = link.groups()
    return f"{text} (`{target}`)" if text not in ("", target) else text


def urls(repository: str) -> dict[str, str]:
    """Return the URLs of the project."""
    pages = {
        "Documentation": "/blob/HEAD/docs/index.md",
        "Source": "",
        "Changelog": "/blob/HEAD/CHANGELOG.md",
        "Issues": "/issues",
    }
    return {name: f"{repository}{page}" for name, page in pages.items()} if repository else {}


if __name__ == "__main__":
    setup(
        long_description=index_page(Path("README.md").read_text(encoding="utf-8"), REPOSITORY),
        long_description_content_type="text/markdown",
        project_urls=urls(REPOSITORY),
    )
