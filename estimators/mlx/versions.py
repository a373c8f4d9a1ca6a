"""Versions of MLX and mlx-lm, and what changed between them: mlx/data/changes.py has the rows."""

import re
from typing import NamedTuple

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import short
from memfit.estimators.mlx.data.changes import CHANGES

Version = tuple[int, ...]

MLX_VERSION: Version = (0, 32, 4)
"""The newest MLX that the rules were read in."""
MLX_LM_VERSION: Version = (0, 32, 2)
OLDEST_MLX: Version = (0, 32, 0)
"""The oldest that memfit's own dependencies allow (pyproject.toml); rules go back further."""

_VERSION = r"(\d{1,4}(?:\.\d{1,4}){1,2})(?:[.+-]?(?:dev|rc|a|b|post)[\w.+]*)?"


class MlxVersions(NamedTuple):
    """The versions of MLX and mlx-lm that run a model."""

    mlx: Version = MLX_VERSION
    mlx_lm: Version = MLX_LM_VERSION

    def has(self, change: str) -> bool:
        """Whether a rule of ``CHANGES`` holds in these versions.

        >>> MlxVersions(mlx=(0, 29, 2)).has("compiled_copies"), MlxVersions().has("compiled_copies")
        (True, False)
        """
        row = CHANGES[change]
        version = self.mlx if row["package"] == "mlx" else self.mlx_lm
        return reaches(version, row.get("since", ())) and not (
            "until" in row and reaches(version, row["until"])
        )


def reaches(version: Version, since: Version) -> bool:
    """Whether a version is not older; a shorter one means the newest that begins so.

    >>> reaches((0, 32), (0, 32, 4)), reaches((0, 31, 2), (0, 32))
    (True, False)
    """
    return version >= since[: len(version)]


def same_version(one: Version, other: Version) -> bool:
    """Whether two versions are the same, as far as the shorter one goes.

    >>> same_version((0, 32), (0, 32, 4)), same_version((0, 32, 4), (0, 32, 1))
    (True, False)
    """
    return all(a == b for a, b in zip(one, other, strict=False))


def parse_version(text: str) -> Version:
    """Return the numbers of a version; a development version counts as its release.

    Raises:
        InputError: when the text is no version.

    >>> parse_version("0.32.0"), parse_version("0.29.2.dev20251008")
    ((0, 32, 0), (0, 29, 2))
    """
    found = re.fullmatch(_VERSION, text.strip(), re.ASCII)
    if found is None:
        raise InputError(f"expected a version such as 0.32.1, got {short(text)}")
    return tuple(map(int, found[1].split(".")))


def installed_version(package: str) -> Version | None:
    """Return the version of a package that is installed here, None where it is not."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return parse_version(version(package))
    except (PackageNotFoundError, InputError):
        return None


def format_version(version: Version) -> str:
    """Return a version as text.

    >>> format_version((0, 32, 4))
    '0.32.4'
    """
    return ".".join(map(str, version))
