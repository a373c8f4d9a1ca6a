"""Options that several commands share, and their texts made into values."""

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import Units
from memfit.estimators.machine.working_set import OsRegime
from memfit.estimators.sizing.workload import MARGIN_BYTES

Value = TypeVar("Value")


class Format(str, Enum):
    """How a result is written."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    MARKDOWN = "markdown"


class CompareFormat(str, Enum):
    """How a comparison is written."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    MARKDOWN = "markdown"


class PlanFormat(str, Enum):
    """How a plan is written."""

    TABLE = "table"
    JSON = "json"
    MARKDOWN = "markdown"


class Method(str, Enum):
    """How figures are come by; auto is the formulas where they describe the model."""

    AUTO = "auto"
    FORMULA = "formula"
    TRACE = "trace"


def parsed(option: str, parse: Callable[[str], Value], text: str | None) -> Value | None:
    """Return the value of an option's text, None when it was not given.

    Raises:
        InputError: naming the option, when the text cannot be read.
    """
    if text is None:
        return None
    try:
        return parse(text)
    except InputError as error:
        raise InputError(f"{option}: {error}") from None


def _alone(ctx: typer.Context, json_: bool) -> bool:
    """Refuse --json beside a --format, which is read before it, wherever it stands."""
    source = ctx.get_parameter_source("format_")
    if json_ and source is not None and source.name == "COMMANDLINE":
        raise InputError("--json and --format both say how the answer is written: give one of them")
    return json_


Json = Annotated[bool, typer.Option("--json", callback=_alone, help="The same as --format json.")]
Form = Annotated[Format, typer.Option("--format", is_eager=True, help="How the answer is written.")]
CompareForm = Annotated[
    CompareFormat, typer.Option("--format", is_eager=True, help="How the answer is written.")
]
PlanForm = Annotated[
    PlanFormat, typer.Option("--format", is_eager=True, help="How the plan is written.")
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the answer to a file.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Say which requests are made, and their bytes.")
]
ShownUnits = Annotated[Units, typer.Option(help="Decimal or binary sizes.")]

Context = Annotated[str | None, typer.Option(help="Prompt tokens with no generation, such as 32k.")]
PromptTokens = Annotated[str | None, typer.Option(help="Tokens of the prompt.")]
MaxTokens = Annotated[str | None, typer.Option(help="Tokens to generate.")]
Batch = Annotated[int, typer.Option(help="Sequences run together.")]
PrefillStep = Annotated[int | None, typer.Option(help="Tokens of a prefill chunk.")]


def _kv_bits(text: str) -> int:
    """Bits, 0 for none; None is an option that was not given: the runtime's own bits."""
    if text == "none":
        return 0
    try:
        bits = int(text)
    except ValueError:
        bits = 0
    if not bits:
        raise InputError(f"--kv-bits: {text[:40]!r} is neither a number of bits nor none")
    return bits


KVBits = Annotated[
    int | None,
    typer.Option(parser=_kv_bits, metavar="BITS|none", help="Bits of a quantised KV cache."),
]
KVGroupSize = Annotated[int | None, typer.Option(help="Its group size.")]
QuantizedKVStart = Annotated[int | None, typer.Option(help="Tokens before the cache is quantised.")]
MaxKVSize = Annotated[
    int | None, typer.Option(help="Limit of a rotating cache, where the model takes one.")
]
CacheType = Annotated[
    str | None,
    typer.Option(metavar="KEYS[,VALUES]", help="Types of llama.cpp's cache, such as q8_0."),
]
Quantize = Annotated[
    int | None, typer.Option(metavar="BITS", help="As converted by mlx_lm.convert to BITS.")
]
GroupSize = Annotated[int | None, typer.Option(help="Group size of --quantize.")]
QuantMode = Annotated[
    str | None, typer.Option(help="Mode of --quantize: affine, mxfp4, nvfp4 or mxfp8.")
]
DeviceName = Annotated[
    str | None,
    typer.Option(help="A machine such as m4-max-64 (see memfit devices), or host."),
]
Memory = Annotated[str | None, typer.Option(help="A Mac with this RAM, such as 32GB.")]
WorkingSet = Annotated[str | None, typer.Option(help="A recommended working set, such as 26.8GB.")]
Regime = Annotated[
    OsRegime, typer.Option(help="Whose working sets apply to a Mac by name or memory.")
]
ChosenRuntime = Annotated[
    str | None,
    typer.Option(
        help="Whose allocation rules apply (see memfit runtimes): mlx-lm, or llama.cpp for GGUF.",
        show_default=False,
    ),
]
Margin = Annotated[str, typer.Option(help="Kept free above the peak.")]
DEFAULT_MARGIN = f"{MARGIN_BYTES // 10**6}MB"
