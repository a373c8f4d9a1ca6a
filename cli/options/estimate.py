"""Options of an estimate, and of the library: the model with what is loaded, and the runtime."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from memfit.cli.options.groups import Option, parsed
from memfit.cli.options.model import FORMATS, AdapterDirectory, AsType, NamedModel
from memfit.cli.options.runtime import ServedRuntime
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.quantization import converted, parse_format
from memfit.estimators.sizing.workload import DRAFT_TOKENS

if TYPE_CHECKING:
    from memfit.estimators.sizing.catalog import Draft


MOST_DRAFT_TOKENS = 64
SAMPLE = "qwen3-4b-4bit"
"""The sample that is estimated where no model is named."""


class EstimatedModel(NamedModel, frozen=True, kw_only=True):
    """The model, and what is loaded with it."""

    adapter: AdapterDirectory = None
    draft: Annotated[
        str | None,
        Option(
            *("--draft", "--draft-model", "--model-draft", "-md"),
            metavar="MODEL",
            help="Include this draft model.",
        ),
    ] = None
    draft_quantize: Annotated[
        str | None,
        Option(metavar=FORMATS, help="Size the draft model as mlx_lm.convert quantises it."),
    ] = None
    num_draft_tokens: Annotated[
        int, Option(help="Tokens that the draft model proposes in a step.")
    ] = DRAFT_TOKENS
    as_type: AsType = None
    mmproj: Annotated[
        Path | None,
        Option(
            *("--mmproj", "-mm"),
            metavar="FILE",
            help="Include this vision projector of a GGUF model.",
        ),
    ] = None

    @property
    def is_named(self) -> bool:
        """Whether a model is named; without one a sample is estimated."""
        return self.model is not None or self.model_option is not None

    def drafting(self) -> "Draft | None":
        """Return the draft model of --draft with its settings.

        Raises:
            InputError: for bits that MLX does not have, bits without a draft model, or a number
                of tokens that is out of range.
        """
        from memfit.estimators.sizing.catalog import Draft

        if not 1 <= self.num_draft_tokens <= MOST_DRAFT_TOKENS:
            raise InputError(
                f"--num-draft-tokens {self.num_draft_tokens}: give from 1 to {MOST_DRAFT_TOKENS}"
            )
        if self.draft is None:
            if self.draft_quantize is not None:
                raise InputError("--draft-quantize needs --draft MODEL")
            return None
        found = parsed("--draft-quantize", parse_format, self.draft_quantize)
        quantize = converted(found[0], mode=found[1]) if found else None
        return Draft(self.draft, quantize, self.num_draft_tokens)


MethodOption = Annotated[
    Literal["auto", "formula", "trace"], Option(help="How to compute the figures.")
]


class EstimateRuntime(ServedRuntime, frozen=True, kw_only=True):
    """The runtime, and how its figures are computed."""

    method: MethodOption = "auto"
