"""A recipe to plan, and the batches that mlx-lm's trainer makes of its data set.

Source: mlx_lm/tuner/trainer.py, iterate_batches, and datasets.py, CacheDataset.itemlen.
"""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.workload import PAD_TO, Recipe


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


class TrainingData(NamedTuple):
    """The examples of a directory."""

    directory: str
    train: Sequence[Example]
    valid: Sequence[Example]
    is_tokenized: bool


class TrainQuestion(Struct, frozen=True, kw_only=True):
    """A recipe, on data or on batches of the longest sequences."""

    recipe: Recipe
    quantize: Quantization | None = None
    data: TrainingData | None = None
    config: str | None = None
    """The file of mlx_lm.lora that has the adapter of the recipe."""

    def tokens(self, recipe: Recipe) -> int:
        """Return the tokens of each sequence of the longest batch.

        Raises:
            InputError: when the data has fewer examples than a batch.
        """
        data = self.data
        return longest_batch(data.train, recipe, data.directory) if data else recipe.max_seq_length

    def lengths(self, recipe: Recipe) -> int:
        """Return how many lengths the batches have, at most: mx.compile keeps a step for each."""
        if self.data is None:
            return len(
                {recipe.padded(each) for each in range(1, recipe.max_seq_length + 1, PAD_TO)}
            )
        ordered = sorted(self.data.train, key=lambda example: example.keys)
        size = recipe.batch_size
        starts = range(0, len(ordered) - size + 1, size)
        longest = (max(each.tokens for each in ordered[start : start + size]) for start in starts)
        return len({recipe.padded(tokens) for tokens in longest})

    def validated(self, recipe: Recipe) -> int | None:
        """Return the same of the validation, None where there is none."""
        if self.data is None:
            return recipe.max_seq_length
        valid = self.data.valid
        # The trainer needs a whole batch here too.
        return longest_batch(valid, recipe, f"{self.data.directory}: valid") if valid else None
