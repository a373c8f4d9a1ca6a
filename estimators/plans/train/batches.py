"""The batches that mlx-lm's trainer makes of a data set.

Source: mlx_lm/tuner/trainer.py, iterate_batches, and datasets.py, CacheDataset.itemlen.
"""

from collections.abc import Sequence
from typing import NamedTuple

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.recipe import Recipe


class Example(NamedTuple):
    """One line of a data set."""

    tokens: int
    keys: int
    """Of its JSON object: mlx-lm sorts by them, and not by tokens."""


def longest_batch(examples: Sequence[Example], recipe: Recipe, directory: str) -> int:
    """Return the tokens of each sequence of the longest batch, padded and truncated.

    The examples that do not fill the last batch are never used.

    Raises:
        InputError: when there are fewer examples than a batch has.
    """
    size = recipe.batch_size
    if len(examples) < size:
        raise InputError(
            f"{directory}: {len(examples)} examples are fewer than the batch size {size}; give a"
            " smaller --batch-size"
        )
    ordered = sorted(examples, key=lambda example: example.keys)
    used = ordered[: len(ordered) // size * size]
    return recipe.padded(max(example.tokens for example in used))
