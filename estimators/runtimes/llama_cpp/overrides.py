"""``--override-tensor``: where tensors are whose names match a pattern.

Source: llama.cpp common/arg.cpp, parse_tensor_buffer_overrides, and src/llama-model-loader.cpp,
which takes the first pattern that is found anywhere in a name (build b11549).
"""

import re
from typing import NamedTuple

from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.setting_names import setting
from memfit.estimators.runtimes.llama_cpp.ggml import Place

_MOST_CHARACTERS, _MOST = 2000, 64
_GPU = re.compile(r"(CUDA|ROCm|Vulkan|Metal|MTL|GPU)0?", re.IGNORECASE)
# A group that is repeated can take longer than all time to match.
_REPEATED = re.compile(r"\)[*+{]")


class Override(NamedTuple):
    """The place of tensors whose names contain a match."""

    pattern: str
    place: Place

    def matches(self, name: str) -> bool:
        return re.search(self.pattern, name) is not None


def parse_overrides(text: str) -> tuple[Override, ...]:
    """Return the overrides of a text such as ``ffn_.*_exps=CPU,blk\\.0\\.=CUDA0``.

    Raises:
        InputError: for a pattern that is none, or one of too many.
        UnsupportedError: for a memory that is neither the host's nor that of one GPU.
    """
    parts = text.split(",")
    if len(text) > _MOST_CHARACTERS or len(parts) > _MOST:
        raise InputError(
            f"{text[:40]!r}...: at most {_MOST} patterns in {_MOST_CHARACTERS} characters"
        )
    return tuple(map(_override, parts))


def _override(text: str) -> Override:
    pattern, sign, where = text.rpartition("=")
    if not sign or not pattern:
        raise InputError(f"{text[:60]!r}: expected PATTERN=CPU, such as ffn_.*_exps=CPU")
    if _REPEATED.search(pattern):
        raise InputError(f"{pattern[:60]!r}: a group that is repeated is not read")
    try:
        re.compile(pattern)
    except re.error as error:
        raise InputError(f"{pattern[:60]!r}: not a pattern: {error}") from None
    if where.upper() in ("CPU", "CUDA_HOST"):
        return Override(pattern, Place.HOST)
    if _GPU.fullmatch(where):
        return Override(pattern, Place.GPU)
    raise UnsupportedError(
        f"{setting('override_tensor')}: {where[:40]!r}: tensors are placed on CPU or on the first"
        " GPU, as CUDA0"
    )


def place_of(overrides: tuple[Override, ...], name: str, usual: Place) -> Place:
    """Return where a tensor is."""
    return next((each.place for each in overrides if each.matches(name)), usual)


def as_text(overrides: tuple[Override, ...]) -> str:
    """Return overrides as llama.cpp reads them."""
    names = {Place.HOST: "CPU", Place.GPU: "CUDA0"}
    return ",".join(f"{each.pattern}={names[each.place]}" for each in overrides)
