"""``memfit tune``: load and run a model, and compare its memory with the estimate."""

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
from memfit.cli.render.output import emit, rendered, require_writable
from memfit.estimators.base.errors import InputError, MachineError
from memfit.estimators.base.units import Units, parse_size

if TYPE_CHECKING:
    from memfit.estimators.checkpoint.manifest import Checkpoint
    from memfit.probes.result import TuneResult

TIMEOUT_SECONDS = 600
DEFAULT_MAX_TOKENS = "32"


def tune(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model's directory, or org/name on the Hub.")
    ],
    prompt: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT|@FILE|-", help="The prompt: a text, a file, or - for standard input."
        ),
    ] = None,
    prompt_tokens: Annotated[
        str | None, typer.Option(help="Length of a generated prompt, in place of a text.")
    ] = None,
    image: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="An image for the prompt; needs mlx-vlm."),
    ] = None,
    max_tokens: MaxTokens = DEFAULT_MAX_TOKENS,
    prefill_step: PrefillStep = None,
    kv_bits: KVBits = None,
    kv_group_size: KVGroupSize = None,
    quantized_kv_start: QuantizedKVStart = None,
    max_kv_size: MaxKVSize = None,
    margin: Margin = DEFAULT_MARGIN,
    force: Annotated[
        bool, typer.Option("--force", help="Run even if the estimate says that it does not fit.")
    ] = False,
    memory_limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory that MLX may use, such as 8GB.")
    ] = None,
    timeout: Annotated[
        int, typer.Option(metavar="SECONDS", min=1, help="Stop a run without progress after this.")
    ] = TIMEOUT_SECONDS,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SETTING=V,V",
            help="Values of prefill-step, kv-bits or context; repeat it to measure every"
            " combination.",
        ),
    ] = None,
    wired: Annotated[
        bool, typer.Option("--wired", help="Measure again with the recommended wired limit.")
    ] = False,
    plot: Annotated[
        bool, typer.Option("--plot", help="Draw memory against context and speed against memory.")
    ] = False,
    flags: Annotated[
        bool,
        typer.Option(
            "--flags", help="Print only commands for mlx_lm.generate and mlx_lm.server to stdout."
        ),
    ] = False,
    download: Annotated[
        bool, typer.Option("--download", help="Download a Hub model that is not cached here.")
    ] = False,
    format_: CompareForm = CompareFormat.TABLE,
    json_: Json = False,
    output: Output = None,
    units: ShownUnits = Units.GB,
    verbose: Verbose = False,
) -> None:
    """Run a model, and compare its memory with the estimate."""
    # The library is imported here so that --help stays fast.
    from memfit.cli.render.views.tune import TuneView
    from memfit.probes.process import ModelProcess, require_installed
    from memfit.probes.sweep_axes import parse_axis
    from memfit.probes.sweep_checkpoint import user_sweeps
    from memfit.probes.tune import TuneRequest, require_room_for
    from memfit.probes.tune import tune as answer

    if (prompt is None) == (prompt_tokens is None):
        raise InputError("give either --prompt TEXT|@FILE|- or --prompt-tokens N")
    if image and prompt is None:
        raise InputError("--image also needs a text: give --prompt")
    form = CompareFormat.JSON if json_ else format_
    if plot and form in (CompareFormat.JSON, CompareFormat.CSV):
        raise InputError(f"--plot works with --format table and markdown, not with {form.value}")
    workload = requested_workload(
        context=None,
        prompt_tokens=prompt_tokens or "1",  # replaced by the length of a text
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

    def check_before_download(checkpoint: "Checkpoint") -> None:
        require_installed(has_image=image is not None)
        if not force:
            require_room_for(
                checkpoint,
                workload,
                margin_bytes=margin_bytes,
                memory_limit_bytes=limit,
                units=units,
            )

    with reporting(verbose=verbose) as progress, _naming_force(), _interruptible():
        checkpoint, path = local_model(
            model, before_download=check_before_download if download else None, progress=progress
        )
        result = answer(
            TuneRequest(
                model=_command_model(model, checkpoint, path),
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
    report = rendered(TuneView(result, units, plot), form.value, to_file=output is not None)
    if flags:
        _deliver_flags(result, report, output)
    else:
        emit(report, output)
    _leave(result, nothing_fits=flags and not result.flags)


def _command_model(reference: str, checkpoint: "Checkpoint", path: Path) -> str:
    """The model's name in commands for mlx-lm, which supports neither revisions nor stores."""
    return reference if checkpoint.source == "hub" and "@" not in reference else str(path)


def _deliver_flags(result: "TuneResult", report: str, output: Path | None) -> None:
    """Write the commands to standard output, and the report to a file or standard error."""
    if output is None:
        print(report, end="", file=sys.stderr)
    else:
        emit(report, output)
    if result.flags:
        emit("\n".join(result.flags) + "\n", None)


def _leave(result: "TuneResult", *, nothing_fits: bool) -> NoReturn:
    """Exit with an error when a point failed, else with the verdict."""
    failed = [point for point in result.points if point.status == "failed"]
    if failed and failed[0] is result.points[0]:
        raise MachineError(failed[0].reason or "the run stopped")
    if failed:
        raise MachineError(
            f"{len(failed)} of {len(result.points)} points failed, the first because of"
            f" {failed[0].reason}; the same command measures them again"
        )
    raise typer.Exit(Exit.NO if result.verdict == "exceeds" or nothing_fits else Exit.YES)


@contextmanager
def _naming_force() -> Iterator[None]:
    """Add the name of the option that overrides an error; the library knows no options."""
    from memfit.probes.preflight import RefusedError
    from memfit.probes.tune import TooLongError

    try:
        yield
    except (RefusedError, TooLongError) as error:
        raise type(error)(f"{error}; --force runs it anyway") from None


@contextmanager
def _interruptible() -> Iterator[None]:
    """Turn an interrupt into a message that says what is saved; Typer prints none.

    SIGTERM is handled as Ctrl-C, so that every block can end its process.
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
