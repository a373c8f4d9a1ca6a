"""Options of the workload: tokens, batch, and the KV cache."""

from typing import Annotated, Any

import typer

from memfit.cli.options.groups import OptionGroup, parsed
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import parse_count
from memfit.estimators.base.workload import Workload
from memfit.estimators.sizing.workload import RUNTIME_DEFAULTS, PartialWorkload

DEFAULT_CONTEXT = 4096


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


class WorkloadOptions(OptionGroup, frozen=True, kw_only=True):
    """What a model is asked to do."""

    panel = "Workload options"
    context: Annotated[
        str | None, typer.Option(help="Prompt tokens, with no generation, such as 32k.")
    ] = None
    prompt_tokens: Annotated[str | None, typer.Option(help="Tokens in the prompt.")] = None
    max_tokens: Annotated[str | None, typer.Option(help="Tokens to generate.")] = None
    batch: Annotated[int, typer.Option(help="Sequences that run together.")] = 1
    prefill_step: Annotated[int | None, typer.Option(help="Tokens in a prefill chunk.")] = None
    kv_bits: Annotated[
        int | None,
        typer.Option(parser=_kv_bits, metavar="BITS|none", help="Bits of a quantised KV cache."),
    ] = None
    kv_group_size: Annotated[
        int | None, typer.Option(help="Group size of a quantised KV cache.")
    ] = None
    quantized_kv_start: Annotated[
        int | None, typer.Option(help="Tokens in the KV cache before it is quantised.")
    ] = None
    max_kv_size: Annotated[
        int | None, typer.Option(help="Size of a rotating KV cache, if the model supports one.")
    ] = None

    def partial(self) -> PartialWorkload:
        """Return the workload; settings that are not given follow the runtime.

        Raises:
            InputError: when a value cannot be read or is out of range, or options exclude each
                other.
        """
        prompt, generated = self.tokens()
        given = {
            name: value for name in RUNTIME_DEFAULTS if (value := getattr(self, name)) is not None
        }
        values: dict[str, Any] = {**given, "kv_bits": self.kv_bits or None}  # 0: none anywhere
        workload = Workload(
            prompt_tokens=prompt,
            max_tokens=generated,
            batch=self.batch,
            max_kv_size=self.max_kv_size,
            **values,
        )
        return PartialWorkload(workload, frozenset(given))

    def tokens(self) -> tuple[int, int]:
        """Return the tokens of the prompt and of the generation.

        Raises:
            InputError: when a value cannot be read, or options exclude each other.
        """
        whole = parsed("--context", parse_count, self.context)
        prompt = parsed("--prompt-tokens", parse_count, self.prompt_tokens)
        generated = parsed("--max-tokens", parse_count, self.max_tokens)
        if whole is not None and (prompt is not None or generated is not None):
            raise InputError("--context excludes --prompt-tokens and --max-tokens: use those two")
        if whole is None:
            whole = DEFAULT_CONTEXT
        return (whole if prompt is None else prompt), generated or 0
