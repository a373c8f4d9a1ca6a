"""Options that several commands share."""

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
    """How figures are computed; auto uses the formulas when they describe the model."""

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


def _reject_format_and_json(ctx: typer.Context, json_: bool) -> bool:
    """Reject --json with --format; --format is eager, so it is parsed first in any order."""
    source = ctx.get_parameter_source("format_")
    if json_ and source is not None and source.name == "COMMANDLINE":
        raise InputError("--json and --format both set the output format: give one of them")
    return json_


Json = Annotated[
    bool,
    typer.Option(
        "--json", callback=_reject_format_and_json, help="Print JSON, as --format json does."
    ),
]
Form = Annotated[Format, typer.Option("--format", is_eager=True, help="Output format.")]
CompareForm = Annotated[
    CompareFormat, typer.Option("--format", is_eager=True, help="Output format.")
]
PlanForm = Annotated[PlanFormat, typer.Option("--format", is_eager=True, help="Output format.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the result to a file.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show each network request with its size.")
]
ShownUnits = Annotated[Units, typer.Option(help="Units of sizes: decimal or binary.")]

Context = Annotated[
    str | None, typer.Option(help="Prompt tokens, with no generation, such as 32k.")
]
PromptTokens = Annotated[str | None, typer.Option(help="Tokens in the prompt.")]
MaxTokens = Annotated[str | None, typer.Option(help="Tokens to generate.")]
Batch = Annotated[int, typer.Option(help="Sequences that run together.")]
PrefillStep = Annotated[int | None, typer.Option(help="Tokens in a prefill chunk.")]


def _kv_bits(text: str) -> int:
    """Bits, 0 for none. Without the option the value is None: the runtime's default."""
    if text == "none":
        return 0
    try:
        bits = int(text)
    except ValueError:
        bits = 0
    if not bits:
        raise InputError(f"--kv-bits: expected a number of bits or none, got {text[:40]!r}")
    return bits


KVBits = Annotated[
    int | None,
    typer.Option(parser=_kv_bits, metavar="BITS|none", help="Bits of a quantised KV cache."),
]
KVGroupSize = Annotated[int | None, typer.Option(help="Group size of a quantised KV cache.")]
QuantizedKVStart = Annotated[
    int | None, typer.Option(help="Tokens in the KV cache before it is quantised.")
]
MaxKVSize = Annotated[
    int | None, typer.Option(help="Size of a rotating KV cache, if the model supports one.")
]
CacheType = Annotated[
    str | None,
    typer.Option(metavar="KEYS[,VALUES]", help="Types of llama.cpp's KV cache, such as q8_0."),
]
Quantize = Annotated[
    int | None,
    typer.Option(metavar="BITS", help="Size the model as mlx_lm.convert would quantise it."),
]
GroupSize = Annotated[int | None, typer.Option(help="Group size for --quantize.")]
QuantMode = Annotated[
    str | None, typer.Option(help="Mode for --quantize: affine, mxfp4, nvfp4 or mxfp8.")
]
DeviceName = Annotated[
    str | None,
    typer.Option(help="A machine such as m4-max-64 (see memfit devices), or host for this one."),
]
Memory = Annotated[str | None, typer.Option(help="A Mac with this much memory, such as 32GB.")]
WorkingSet = Annotated[
    str | None, typer.Option(help="A device with this recommended working set, such as 26.8GB.")
]
Regime = Annotated[
    OsRegime, typer.Option(help="macOS version that sets a Mac's recommended working set.")
]
ChosenRuntime = Annotated[
    str | None,
    typer.Option(
        help="Runtime to estimate for (see memfit runtimes). Default: mlx-lm, for GGUF llama.cpp.",
        show_default=False,
    ),
]
Margin = Annotated[str, typer.Option(help="Memory to keep free above the peak.")]
DEFAULT_MARGIN = f"{MARGIN_BYTES // 10**6}MB"
