"""``memfit estimate``: parse, ask the library, show the answer."""

from pathlib import Path
from typing import Annotated

import typer

from memfit.cli.exits import Exit
from memfit.cli.options import Format, Json, Method, parsed
from memfit.cli.render.output import deliver
from memfit.estimators.arch.quantization import DEFAULTS, Quantization
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.errors import InputError
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.working_set import DEFAULT_REGIME, OsRegime
from memfit.estimators.units import Units, parse_count, parse_size
from memfit.estimators.workload import Workload

DEFAULT_CONTEXT = 4096
SAMPLE = "qwen3-4b-4bit.yaml"


def estimate(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A directory, a .safetensors file, a config.json or a sample .yaml;"
            " without it, an embedded sample.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        str | None, typer.Option(help="Prompt tokens with no generation, such as 32k.")
    ] = None,
    prompt_tokens: Annotated[str | None, typer.Option(help="Tokens of the prompt.")] = None,
    max_tokens: Annotated[str | None, typer.Option(help="Tokens to generate.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences run together.")] = 1,
    prefill_step: Annotated[int | None, typer.Option(help="Tokens of a prefill chunk.")] = None,
    kv_bits: Annotated[int | None, typer.Option(help="Bits of a quantised KV cache.")] = None,
    kv_group_size: Annotated[int | None, typer.Option(help="Its group size.")] = None,
    quantized_kv_start: Annotated[
        int | None, typer.Option(help="Tokens before the cache is quantised.")
    ] = None,
    max_kv_size: Annotated[
        int | None, typer.Option(help="Limit of a rotating cache, where the model takes one.")
    ] = None,
    quantize: Annotated[
        int | None, typer.Option(metavar="BITS", help="As converted by mlx_lm.convert to BITS.")
    ] = None,
    group_size: Annotated[int | None, typer.Option(help="Group size of --quantize.")] = None,
    quant_mode: Annotated[
        str | None, typer.Option(help="Mode of --quantize: affine, mxfp4, nvfp4 or mxfp8.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="A machine such as m4-max-64 (see memfit devices), or host."),
    ] = None,
    memory: Annotated[str | None, typer.Option(help="A Mac with this RAM, such as 32GB.")] = None,
    working_set: Annotated[
        str | None, typer.Option(help="A recommended working set, such as 26.8GB.")
    ] = None,
    os_regime: Annotated[
        OsRegime, typer.Option(help="Whose working sets apply to a Mac by name or memory.")
    ] = DEFAULT_REGIME,
    runtime: Annotated[str, typer.Option(help="Whose allocation rules apply.")] = "mlx-lm",
    method: Annotated[Method, typer.Option(help="How the figures are come by.")] = Method.AUTO,
    margin: Annotated[str, typer.Option(help="Kept free above the peak.")] = "64MB",
    adapter: Annotated[
        Path | None, typer.Option(help="A directory with adapters.safetensors, added.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A draft model, added.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show every formula.")] = False,
    plot: Annotated[bool, typer.Option("--plot", help="Show memory against context.")] = False,
    format_: Annotated[
        Format, typer.Option("--format", help="How the answer is written.")
    ] = Format.TABLE,
    json_: Json = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the answer to a file.")
    ] = None,
    units: Annotated[Units, typer.Option(help="Decimal or binary sizes.")] = Units.GB,
) -> None:
    """Say how much memory a model takes, whether it fits, and what to set."""
    # The library is imported when it is needed: --help stays quick.
    from memfit.estimators.checkpoint.adapters import read_adapter
    from memfit.estimators.checkpoint.opening import open_checkpoint
    from memfit.estimators.estimate import curve
    from memfit.estimators.estimate import estimate as answer
    from memfit.estimators.explain import explain as explanation
    from memfit.estimators.machine.runtime import get_runtime
    from memfit.estimators.sizing import size

    rules = get_runtime(runtime)
    prompt, generated = _tokens(context, prompt_tokens, max_tokens)
    workload = Workload(
        prompt_tokens=prompt,
        max_tokens=generated,
        batch=batch,
        prefill_step=_given(prefill_step, rules.prefill_step),
        kv_bits=kv_bits,
        kv_group_size=_given(kv_group_size, rules.kv_group_size),
        quantized_kv_start=_given(quantized_kv_start, rules.quantized_kv_start),
        max_kv_size=max_kv_size,
    )
    sizing = size(
        open_checkpoint(model) if model is not None else _sample(),
        device=_device(device, memory, working_set, os_regime),
        margin_bytes=parsed("--margin", parse_size, margin) or 0,
        quantize=_quantization(quantize, group_size, quant_mode),
        adapter=read_adapter(adapter) if adapter else None,
        draft=open_checkpoint(draft) if draft is not None else None,
    )
    result = answer(sizing, workload, runtime=rules, units=units)
    deliver(
        result,
        Format.JSON if json_ else format_,
        output=output,
        units=units,
        curve=curve(sizing, workload) if plot else (),
        explanation=explanation(sizing, workload, units) if explain else (),
    )
    raise typer.Exit(Exit.NO if result.verdict == "exceeds" else Exit.YES)


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _tokens(
    context: str | None, prompt_tokens: str | None, max_tokens: str | None
) -> tuple[int, int]:
    """The prompt's and the generation's tokens."""
    whole = parsed("--context", parse_count, context)
    prompt = parsed("--prompt-tokens", parse_count, prompt_tokens)
    generated = parsed("--max-tokens", parse_count, max_tokens)
    if whole is not None and (prompt is not None or generated is not None):
        raise InputError("--context stands alone; use --prompt-tokens with --max-tokens")
    if whole is None:
        whole = DEFAULT_CONTEXT
    return (whole if prompt is None else prompt), generated or 0


def _quantization(
    bits: int | None, group_size: int | None, mode: str | None
) -> Quantization | None:
    if bits is None:
        if group_size is not None or mode is not None:
            raise InputError("--group-size and --quant-mode belong to --quantize BITS")
        return None
    mode = mode or "affine"
    default = DEFAULTS.get(mode)
    return Quantization(bits, group_size or (default[1] if default else 64), mode)


def _device(
    name: str | None, memory: str | None, working_set: str | None, regime: OsRegime
) -> Device | None:
    """The device that was named one way or another, else this machine if it has a GPU."""
    from memfit.estimators.machine.devices import find_device, memory_device, working_set_device
    from memfit.estimators.machine.host import detect_host

    if sum(value is not None for value in (name, memory, working_set)) > 1:
        raise InputError("--device, --memory and --working-set exclude each other: give one")
    memory_bytes = parsed("--memory", parse_size, memory)
    working_set_bytes = parsed("--working-set", parse_size, working_set)
    if memory_bytes is not None:
        return memory_device(memory_bytes, os_regime=regime)
    if working_set_bytes is not None:
        return working_set_device(working_set_bytes)
    if name is not None and name != "host":
        return find_device(name, os_regime=regime)
    host = detect_host()
    if name == "host" and host is None:
        raise InputError("--device host: this machine's memory could not be read; use --memory")
    return host if host and (name == "host" or host.backend != "cpu") else None


def _sample() -> Checkpoint:
    from importlib.resources import as_file, files

    from memfit.estimators.checkpoint.opening import open_checkpoint

    with as_file(files("memfit.sample_configs") / SAMPLE) as path:
        return open_checkpoint(str(path))
