"""``memfit tune``: parse, load and measure, show what was found."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from memfit.cli.exits import CommandStopped, Exit
from memfit.cli.local_model import local_model
from memfit.cli.option_values import requested_workload
from memfit.cli.options import (
    DEFAULT_MARGIN,
    CompareForm,
    CompareFormat,
    Json,
    KVBits,
    KVGroupSize,
    Margin,
    MaxKVSize,
    MaxTokens,
    Output,
    PrefillStep,
    QuantizedKVStart,
    ShownUnits,
    Verbose,
    parsed,
)
from memfit.cli.progress import reporting
from memfit.cli.prompts import prompt_file, prompt_text
from memfit.cli.render.output import emit, require_writable
from memfit.cli.render.tune.output import written
from memfit.estimators.base.errors import InputError, MachineError
from memfit.estimators.base.units import Units, parse_size

if TYPE_CHECKING:
    from memfit.estimators.checkpoint.manifest import Checkpoint
    from memfit.probes.result import TuneResult

TIMEOUT_SECONDS = 600
GENERATED = "32"


def tune(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model's directory, or org/name on the Hub.")
    ],
    prompt: Annotated[
        str | None,
        typer.Option(metavar="TEXT|@FILE|-", help="The prompt, a file with it, or what is piped."),
    ] = None,
    prompt_tokens: Annotated[
        str | None, typer.Option(help="A prompt of so many tokens, in place of a text.")
    ] = None,
    image: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="An image that the prompt is about; needs mlx-vlm."),
    ] = None,
    max_tokens: MaxTokens = GENERATED,
    prefill_step: PrefillStep = None,
    kv_bits: KVBits = None,
    kv_group_size: KVGroupSize = None,
    quantized_kv_start: QuantizedKVStart = None,
    max_kv_size: MaxKVSize = None,
    margin: Margin = DEFAULT_MARGIN,
    force: Annotated[
        bool, typer.Option("--force", help="Run what the estimate says does not fit.")
    ] = False,
    memory_limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The most that MLX may take, such as 8GB.")
    ] = None,
    timeout: Annotated[
        int, typer.Option(metavar="SECONDS", min=1, help="Longest silence before a run is stopped.")
    ] = TIMEOUT_SECONDS,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SETTING=V,V",
            help="Every combination of prefill-step, kv-bits and context; may be repeated.",
        ),
    ] = None,
    wired: Annotated[
        bool, typer.Option("--wired", help="Measure again with the recommended wired limit.")
    ] = False,
    plot: Annotated[
        bool, typer.Option("--plot", help="Draw memory against context, and speed against memory.")
    ] = False,
    flags: Annotated[
        bool,
        typer.Option("--flags", help="Flags of mlx_lm.generate and server, alone on stdout."),
    ] = False,
    download: Annotated[
        bool, typer.Option("--download", help="Fetch a model of the Hub that is not here.")
    ] = False,
    format_: CompareForm = CompareFormat.TABLE,
    json_: Json = False,
    output: Output = None,
    units: ShownUnits = Units.GB,
    verbose: Verbose = False,
) -> None:
    """Load a model, and hold what it takes against the estimate."""
    # The library is imported when it is needed: --help stays quick.
    from memfit.probes.process import ModelProcess, require_installed
    from memfit.probes.sweep_axes import parse_axis
    from memfit.probes.sweep_checkpoint import user_sweeps
    from memfit.probes.tune import TuneRequest, require_room_for
    from memfit.probes.tune import tune as answer

    if (prompt is None) == (prompt_tokens is None):
        raise InputError("give either --prompt TEXT|@FILE|- or --prompt-tokens N")
    if image and prompt is None:
        raise InputError("--image needs --prompt: a text about it")
    form = CompareFormat.JSON if json_ else format_
    if plot and form in (CompareFormat.JSON, CompareFormat.CSV):
        raise InputError(f"--plot draws in tables and in Markdown, not in {form.value}")
    workload = requested_workload(
        context=None,
        prompt_tokens=prompt_tokens or "1",  # until a text is counted
        max_tokens=max_tokens,
        batch=1,
        prefill_step=prefill_step,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
        quantized_kv_start=quantized_kv_start,
        max_kv_size=max_kv_size,
    ).values
    axes = [parsed("--sweep", parse_axis, each) for each in sweep or ()]
    limit = parsed("--memory-limit", parse_size, memory_limit)
    margin_bytes = parsed("--margin", parse_size, margin) or 0
    text = None if prompt is None else prompt_text(prompt)
    file = prompt_file(prompt)
    require_writable(output, needs_stdout=flags)

    def hold(checkpoint: "Checkpoint") -> None:
        require_installed(has_image=image is not None)
        if not force:
            require_room_for(
                checkpoint,
                workload,
                margin_bytes=margin_bytes,
                memory_limit_bytes=limit,
                units=units,
            )

    with reporting(verbose=verbose) as progress, _forcible(), _interruptible():
        checkpoint, path = local_model(
            model, before_download=hold if download else None, progress=progress
        )
        result = answer(
            TuneRequest(
                model=_pasted(model, checkpoint, path),
                checkpoint=checkpoint,
                workload=workload,
                prompt=text,
                command_prompt=None if file or prompt == "-" else prompt,
                prompt_file=file,
                has_image=image is not None,
                tries_wired=wired,
                axes=tuple(filter(None, axes)),
                sweep_kv_start=quantized_kv_start or 0,
                margin_bytes=margin_bytes,
                memory_limit_bytes=limit,
                force=force,
                units=units,
            ),
            start=partial(
                ModelProcess,
                path,
                memory_limit_bytes=limit,
                timeout_seconds=float(timeout),
                image=image,
            ),
            sweeps=user_sweeps(),
            progress=progress,
        )
    report = written(result, form, units, to_file=output is not None, plot=plot)
    if flags:
        _deliver_flags(result, report, output)
    else:
        emit(report, output)
    _leave(result, nothing_fits=flags and not result.flags)


def _pasted(reference: str, checkpoint: "Checkpoint", path: Path) -> str:
    """How a line for mlx-lm's programs names a model: they know no revisions and no other store."""
    return reference if checkpoint.source == "hub" and "@" not in reference else str(path)


def _deliver_flags(result: "TuneResult", report: str, output: Path | None) -> None:
    """Flags alone on standard output."""
    if output is None:
        print(report, end="", file=sys.stderr)
    else:
        emit(report, output)
    if result.flags:
        emit("\n".join(result.flags) + "\n", None)


def _leave(result: "TuneResult", *, nothing_fits: bool) -> NoReturn:
    """What was reached is shown by now: say what stopped it, or what the verdict is."""
    failed = [point for point in result.points if point.status == "failed"]
    if failed and failed[0] is result.points[0]:
        raise MachineError(failed[0].reason or "the run stopped")
    if failed:
        raise MachineError(
            f"{len(failed)} of {len(result.points)} points failed, the first by {failed[0].reason};"
            " the same command measures them again"
        )
    raise typer.Exit(Exit.NO if result.verdict == "exceeds" or nothing_fits else Exit.YES)


@contextmanager
def _forcible() -> Iterator[None]:
    """Name the option that overrides a refusal; the library knows no options."""
    from memfit.probes.preflight import RefusedError
    from memfit.probes.tune import TooLongError

    try:
        yield
    except (RefusedError, TooLongError) as error:
        raise type(error)(f"{error}; --force runs it all the same") from None


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let it be said what is kept of a sweep; of an interrupt Typer leaves no word.

    SIGTERM ends it as Ctrl-C does: by way of every block that has a process to end.
    """
    terminated = False

    def terminate(_number: int, _frame: object) -> None:
        nonlocal terminated
        terminated = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except KeyboardInterrupt as stop:
        code = Exit.TERMINATED if terminated else Exit.INTERRUPTED
        raise CommandStopped(str(stop) or "interrupted", code) from None
    finally:
        signal.signal(signal.SIGTERM, before)
