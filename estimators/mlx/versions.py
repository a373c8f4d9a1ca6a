"""Versions of mlx and mlx-lm, and a model as one of them runs it.

mlx/data/changes.py has what changed between them.
"""

import re
from typing import NamedTuple

from msgspec.structs import replace

from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.arch.registry import class_row
from memfit.estimators.arch.specs import (
    Attention,
    GatedDelta,
    LatentAttention,
    Mixer,
    Recurrent,
    TracedMixer,
)
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.files import short
from memfit.estimators.mlx.data.changes import ADDED, CHANGES, OLDEST_MLX_LM, REWRITTEN

Version = tuple[int, ...]

MLX_VERSION: Version = (0, 32, 4)
"""The newest MLX that the rules were read in."""
MLX_LM_VERSION: Version = (0, 32, 2)
MLX_VLM_VERSION: Version = (0, 7, 10)
OLDEST_MLX_VLM: Version = (0, 6, 7)
"""The oldest whose loop was read."""
OLDEST_MLX: Version = (0, 32, 0)
"""The oldest that memfit's own dependencies allow (pyproject.toml); rules go back further."""

_VERSION = r"(\d{1,4}(?:\.\d{1,4}){1,2})(?:[.+-]?(?:dev|rc|a|b|post)[\w.+]*)?"


class MlxVersions(NamedTuple):
    """The versions of MLX, mlx-lm and mlx-vlm that run a model."""

    mlx: Version = MLX_VERSION
    mlx_lm: Version = MLX_LM_VERSION
    mlx_vlm: Version = MLX_VLM_VERSION

    def has(self, change: str) -> bool:
        """Whether a rule of ``CHANGES`` holds in these versions.

        >>> MlxVersions(mlx=(0, 29, 2)).has("compiled_copies"), MlxVersions().has("compiled_copies")
        (True, False)
        """
        row = CHANGES[change]
        version: Version = getattr(self, row["package"].replace("-", "_"))
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


def check_class(model_type: str, mlx_lm: Version) -> None:
    """Do nothing when a version's class for a type is like that of the newest.

    Raises:
        UnsupportedError: when it is not, or the version is older than the oldest rules.
    """
    version = format_version(mlx_lm)
    if mlx_lm < OLDEST_MLX_LM:
        oldest = format_version(OLDEST_MLX_LM)
        raise UnsupportedError(f"mlx-lm {version}: its rules are described from {oldest} on")
    row = class_row(model_type)
    added = (row.since if row else ADDED.get(model_type)) or OLDEST_MLX_LM
    if mlx_lm < added:
        raise UnsupportedError(
            f"{model_type}: mlx-lm {version} has no class for it; the first is in"
            f" {format_version(added)}"
        )
    rewritten = row.rewritten if row else REWRITTEN.get(model_type)
    first, commit = rewritten or (OLDEST_MLX_LM, "")
    if mlx_lm < first:
        raise UnsupportedError(
            f"{model_type} in mlx-lm {version}: its class is described from {format_version(first)}"
            f" on ({commit}); older ones cache keys and values of every head"
        )


def as_of(model: Model, versions: MlxVersions) -> Model:
    """Return a model as its class in a version of mlx-lm has it.

    Raises:
        UnsupportedError: as `check_class`.
    """
    check_class(model.model_type, versions.mlx_lm)
    layers = model.layers
    if versions.has("narrow_states"):
        layers = tuple(
            replace(layer, mixers=tuple(map(_narrowed, layer.mixers))) for layer in layers
        )
    if versions.has("unused_projections"):
        layers = tuple(map(_with_unused, layers))
    return model if layers == model.layers else replace(model, layers=layers)


def _narrowed(mixer: Mixer) -> Mixer:
    """States of the model's type, as the kernels wrote them."""
    match mixer:
        case GatedDelta():
            return replace(mixer, float32=False)
        case Recurrent() if mixer.kind == "mamba2":
            return replace(mixer, state=tuple(replace(s, float32=False) for s in mixer.state))
        case Attention() | LatentAttention() | Recurrent() | TracedMixer():
            return mixer
        case _:
            assert_never(mixer)


def _with_unused(layer: Layer) -> Layer:
    """Keys and values of a layer that reads another's: a linear layer can be quantised."""
    return replace(
        layer,
        modules=tuple(
            module
            if module.loaded
            else replace(module, loaded=True, quantizable=len(module.shape) > 1)
            for module in layer.modules
        ),
    )
