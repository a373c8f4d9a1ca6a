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
        return version >= row.get("since", ()) and not ("until" in row and version >= row["until"])


def parse_version(text: str) -> Version:
    """Return the three numbers of a version; a development version counts as its release.

    A missing number is zero, as in PEP 440: versions are compared as tuples.

    Raises:
        InputError: when the text is not a version.

    >>> parse_version("0.32"), parse_version("0.29.2.dev20251008")
    ((0, 32, 0), (0, 29, 2))
    """
    result = re.fullmatch(_VERSION, text.strip(), re.ASCII)
    if result is None:
        raise InputError(f"expected a version such as 0.32.1, got {short(text)}")
    major, minor, *patch = map(int, result[1].split("."))
    return (major, minor, *(patch or [0]))


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
