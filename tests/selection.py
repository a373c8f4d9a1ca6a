"""Which cases of a long list `make test`, `make check` and `make test-all` run."""

import os
from collections.abc import Container, Iterable, Sequence
from typing import Any
from zlib import crc32

import pytest
from hypothesis import settings

IS_SHARED = os.environ.get("MEMFIT_TESTS") == "day"
"""Whether this is `make check`."""
DAYS = 20
"""The exhaustive tests are divided between so many days, so that CI takes minutes."""

# One config for each kind of layer, and for each shape that kinds are combined in.
QUICK_CONFIGS = frozenset(
    (
        *("deepseek_v3", "deepseek_v32", "falcon_h1", "gemma3_text", "gemma3n", "gemma4_text"),
        *("gpt_oss", "jamba", "kimi_linear", "lfm2", "llama", "llama4", "mamba", "mamba2"),
        *("mimo_v2_flash", "minimax", "mistral3", "qwen3_moe", "qwen3_next", "recurrent_gemma"),
        *("rwkv7", "step3p5"),
    )
)


# Of these the ones with the most in common with all others, for what is slow.
FEW_CONFIGS = frozenset(
    (
        *("deepseek_v3", "falcon_h1", "gemma3_text", "llama", "qwen3_moe", "qwen3_next"),
        "recurrent_gemma",
    )
)

# A dense class, a mixture and a hybrid, for what is slow and the same for each kind of layer.
THREE_CONFIGS = frozenset(("deepseek_v3", "gemma3_text", "qwen3_next"))

# One sample for each kind of layer and format, and the largest.
QUICK_SAMPLES = frozenset(
    (
        *("deepseek-v2-lite", "falcon-h1-7b", "gemma-3-27b", "gemma-3n-e4b", "gpt-oss-20b"),
        *("kimi-k2-4bit", "lfm2-1.2b", "llama-4-scout", "mamba-2.8b", "qwen3-30b-a3b-4bit"),
        *("qwen3-8b-4bit", "qwen3.5-35b-a3b", "recurrentgemma-2b", "rwkv7-2.9b"),
    )
)


def share(
    values: Iterable[Any], part: int, parts: int, names: Container[Any] = FEW_CONFIGS
) -> list[Any]:
    """Return the parameters of one of several tests that divide a list between them.

    Each has those in ``names`` too. With MEMFIT_TESTS=all it has the whole list, for a change of
    what all of them test.
    """
    is_whole = os.environ.get("MEMFIT_TESTS") == "all"
    return [
        value
        for number, value in enumerate(values)
        if is_whole or number % parts == part or getattr(value, "stem", value) in names
    ]


def examples(many: int, profile: str | None = None) -> int:
    """Return how many examples a test draws: a fifth of ``many`` in `make test`."""
    is_quick = (profile or settings.get_current_profile_name()) == "few"
    return max(1, many // 5) if is_quick else many


def quick(values: Iterable[Any], names: Container[Any] = QUICK_CONFIGS) -> list[Any]:
    """Return parameters; those not in ``names``, by the stem of a path, are exhaustive.

    A tuple is of several parameters.
    """
    return [
        value
        if getattr(value, "stem", value) in names
        else pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.exhaustive
        )
        for value in values
    ]


def of_day(items: Sequence[pytest.Item], day: int) -> list[pytest.Item]:
    """Return the tests without the exhaustive ones that are another day's.

    Those marked ``exhaustive(daily=True)`` stay: what they hold is seen by no quick test.
    """
    return [item for item in items if not _is_divided(item) or _day(item.nodeid) == day % DAYS]


def _is_divided(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("exhaustive")
    return mark is not None and not mark.kwargs.get("daily")


def _day(name: str) -> int:
    return crc32(name.encode()) % DAYS
