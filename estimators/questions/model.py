"""Which model, the conversion that it is sized with, and what is loaded with it."""

import os
from typing import Annotated

from msgspec import Struct

from memfit.estimators.base.dtypes import Quantization, converted, parse_format
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.reading.values import number_or_text
from memfit.estimators.base.setting_names import setting
from memfit.estimators.questions.question import Integer, PathSetting, Question, Text, integer

DRAFT_TOKENS = 3  # mlx_lm/generate.py and server.py, --num-draft-tokens
MOST_DRAFT_TOKENS = 64


class Draft(Struct, frozen=True):
    """A draft model for speculative decoding."""

    reference: str
    quantize: Quantization | None = None
    tokens: int = DRAFT_TOKENS
    """Tokens that it proposes in each step."""


def model_reference(model: str | os.PathLike[str]) -> str:
    """Return the text that names a model; a path is never a name on the Hub."""
    name = os.fsdecode(model)
    return name if isinstance(model, str) or os.path.isabs(name) else os.path.join(os.curdir, name)


Format = Annotated[
    tuple[int, str] | None, number_or_text(parse_format, lambda bits: (bits, "affine"))
]
"""Bits and mode."""


class ModelQuestion(Question, frozen=True, kw_only=True):
    """A model, its conversion, and what is loaded with it."""

    model: Annotated[str | None, model_reference] = None
    quantize: Format = None
    group_size: Integer = None
    quant_mode: Text = None
    adapter: PathSetting = None
    draft: Text = None
    draft_quantize: Format = None
    num_draft_tokens: Annotated[int, integer] = DRAFT_TOKENS
    as_type: Text = None
    mmproj: PathSetting = None

    def reference(self) -> str:
        """Return what names the model.

        Raises:
            InputError: when it is not named.
        """
        if self.model is None:
            name = setting("model")
            raise InputError(f"{name} is missing; name a directory, a file, or org/name on the Hub")
        return self.model

    def quantization(self) -> Quantization | None:
        """Return the conversion, None for the model as it is.

        Raises:
            InputError: for a format that MLX does not have, or a group size or mode without bits.
        """
        quantize, quant_mode = setting("quantize"), setting("quant_mode")
        if self.quantize is None:
            if self.group_size is not None or self.quant_mode is not None:
                size = setting("group_size")
                raise InputError(f"{size} and {quant_mode} need {quantize} BITS")
            return None
        bits, mode = self.quantize
        if self.quant_mode not in (None, mode) and mode != "affine":
            raise InputError(f"{quantize} {mode} and {quant_mode} {self.quant_mode}: give one")
        return converted(bits, self.group_size, self.quant_mode or mode)

    def drafting(self) -> Draft | None:
        """Return the draft model with its settings, None without one.

        Raises:
            InputError: for bits that MLX does not have, bits without a draft model, or a number
                of tokens that is out of range.
        """
        if not 1 <= self.num_draft_tokens <= MOST_DRAFT_TOKENS:
            raise InputError(
                f"{setting('num_draft_tokens')} {self.num_draft_tokens}: give from 1 to"
                f" {MOST_DRAFT_TOKENS}"
            )
        if self.draft is None:
            if self.draft_quantize is not None:
                raise InputError(f"{setting('draft_quantize')} needs {setting('draft')} MODEL")
            return None
        bits, mode = self.draft_quantize or (None, "affine")
        quantize = None if bits is None else converted(bits, mode=mode)
        return Draft(self.draft, quantize, self.num_draft_tokens)
