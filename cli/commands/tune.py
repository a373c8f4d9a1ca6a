"""``memfit tune``: load and run a model, and compare its memory with the estimate."""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer
from msgspec.structs import replace

from memfit.cli.exits import Exit, exit_of
from memfit.cli.measuring import interruptible, measuring
from memfit.cli.options.groups import TICKETS, Only, TabularOutput, grouped, option
from memfit.cli.options.questions import NamedModel, RankedMachine, RuntimeOptions, WorkloadOptions
from memfit.cli.options.run import RunOptions
from memfit.cli.progress import reporting
from memfit.cli.prompts import prompt_file, prompt_text
from memfit.cli.render.output import emit, rendered, require_writable, say, visible
from memfit.estimators.base.errors import InputError, MachineError
from memfit.estimators.base.units import parse_count
from memfit.estimators.base.workload import Workload
from memfit.estimators.questions.question import RUNTIME_DEFAULTS, WorkloadQuestion, read_setting
from memfit.estimators.questions.target import ModelQuestion

if TYPE_CHECKING:
    from memfit.estimators.checkpoint.manifest import Checkpoint
    from memfit.estimators.questions.target import Ranks
    from memfit.probes.experiments.generate import TuneRequest
    from memfit.probes.result import TuneResult


_PANEL = "Workload options"  # beside those of `WorkloadQuestion`


class TuneOptions(RunOptions, frozen=True, kw_only=True):
    """How a prompt is run."""

    prompt: str | None = option(
        rich_help_panel=_PANEL,
        metavar="TEXT|@FILE|-",
        help="The prompt: a text, a file, or - for standard input.",
    )
    prompt_tokens: str | None = option(
        rich_help_panel=_PANEL, help="Length of a generated prompt, in place of a text."
    )
    image: list[str] | None = option(
        rich_help_panel=_PANEL,
        metavar="FILE",
        help="An image for the prompt; can be repeated; needs mlx-vlm.",
    )
    video: list[str] | None = option(
        rich_help_panel=_PANEL,
        metavar="FILE|DIR",
        help="A video for the prompt, or a folder of its frames; can be repeated.",
    )
    max_tokens: str | None = option(
        rich_help_panel=_PANEL, help="Tokens to generate.", default="32"
    )
    shortest_prompt: int | None = option(
        rich_help_panel=_PANEL,
        metavar="TOKENS",
        help="The shortest prompt of a batch; lengths are spread.",
        read=parse_count,
    )

    footprint: bool = option(
        "--footprint", help="Read what macOS charges the process for, too.", default=False
    )
    kit: bool = option(
        "--kit",
        help="Without MODEL: measure small models that are made for it; -o kit.json saves them.",
        default=False,
    )

    def of_prompt(self, workload: WorkloadQuestion) -> Workload:
        """Return a workload with the prompt; the length of a text replaces it later.

        Raises:
            InputError: when a value cannot be read, or there is no prompt or two.
        """
        if (self.prompt is None) == (self.prompt_tokens is None):
            raise InputError("give either --prompt TEXT|@FILE|- or --prompt-tokens N")
        if (self.image or self.video) and self.prompt is None:
            raise InputError("--image and --video also need a text: give --prompt")
        prompt = {name: getattr(self, name) for name in ("max_tokens", "image", "video")}
        read = WorkloadQuestion.read({**prompt, "prompt_tokens": self.prompt_tokens or "1"})
        return replace(
            workload,
            prompt_tokens=read.prompt_tokens,
            max_tokens=read.max_tokens,
            image=read.image,
            video=read.video,
        ).under(None)

    def shortest(self, batch: int) -> int | None:
        """Return the tokens of the shortest prompt of a batch, None when all have the same length.

        Raises:
            InputError: when it is less than 1, or there is no batch.
        """
        tokens = self.shortest_prompt
        if tokens is not None and (tokens < 1 or batch < 2):
            raise InputError("--shortest-prompt: give at least 1 token, and --batch 2 or more")
        return tokens


class TuneOutput(TabularOutput, frozen=True, kw_only=True):
    """The output of a run."""

    plot: bool = option(
        "--plot", help="Draw memory against context and speed against memory.", default=False
    )
    flags: bool = option(
        "--flags",
        help="Print only commands for mlx_lm.generate and mlx_lm.server to stdout.",
        default=False,
    )
    tickets: Literal["yaml", "python", "swift"] | None = TICKETS

    @property
    def shows_more(self) -> bool:
        """Whether more than the report is to be written, or something else."""
        return bool(self.flags or self.plot or self.tickets)

    def require_drawable(self) -> None:
        """Check that --plot can be drawn in the format.

        Raises:
            InputError: when it cannot.
        """
        if self.plot and self.form in ("json", "csv"):
            raise InputError(f"--plot: the format {self.form} has no charts")


@grouped
def tune(
    model: Annotated[NamedModel, Only("model", "model_option")],
    run: TuneOptions,
    settings: Annotated[WorkloadOptions, Only("batch", *RUNTIME_DEFAULTS, "max_kv_size")],
    runtime: Annotated[RuntimeOptions, Only("margin")],
    output: TuneOutput,
    over: Annotated[RankedMachine, Only("ranks", "parallel", "split", "hosts")],
) -> None:
    """Run a model, and compare its memory with the estimate."""
    if run.kit:
        _kit(model, run, output)
    if ranks := over.over():
        hosts = over.hosts
        _over_ranks(model, run, settings, output, (ranks, hosts), runtime.margin)
    from memfit.probes.experiments.generate import require_startable
    from memfit.probes.experiments.generate import tune as answer
    from memfit.probes.experiments.sweep import user_sweeps
    from memfit.probes.process import ModelProcess

    reference = model.reference()
    request_of = _request(run, settings, runtime.margin, output)
    sweeps = user_sweeps()

    def check(checkpoint: "Checkpoint") -> None:
        require_startable(request_of(model=checkpoint.id, checkpoint=checkpoint))

    with measuring(reference, run, verbose=output.verbose, check=check) as model_run:
        checkpoint, path, progress = model_run
        request = request_of(model=_command_model(checkpoint, path), checkpoint=checkpoint)
        process = partial(
            ModelProcess,
            images=tuple(map(Path, run.image or ())),
            videos=tuple(map(Path, run.video or ())),
            shortest_prompt=request.shortest_prompt,
            footprint=request.footprint,
        )
        result = answer(request, start=run.start(process, path), sweeps=sweeps, progress=progress)
    _deliver(result, output)
    sweeps.finish()
    _leave(result, nothing_fits=output.flags and not result.flags)


def _kit(model: ModelQuestion, run: TuneOptions, output: TuneOutput) -> NoReturn:
    """Measure the kit's own models."""
    if model.model or run.prompt or run.prompt_tokens or run.sweep or output.shows_more:
        raise InputError("--kit makes its own models and prompts: give only --timeout and -o FILE")
    if output.form in ("csv", "svg"):
        raise InputError(f"--kit: a kit is not written as {output.form}: give -o FILE.json")
    from memfit.probes.experiments.kit import tune_kit
    from memfit.probes.process import ModelProcess, require_installed

    require_installed(has_image=False)
    require_writable(output.file)
    start = partial(ModelProcess, timeout_seconds=float(run.timeout))
    with reporting(verbose=output.verbose) as progress, interruptible():
        result = tune_kit(start, progress=progress)
    output.write(result, units=output.units)
    raise typer.Exit(Exit.YES)


def _over_ranks(
    model: ModelQuestion,
    run: TuneOptions,
    settings: WorkloadQuestion,
    output: TuneOutput,
    over: "tuple[Ranks, Path | None]",
    margin_bytes: int,
) -> NoReturn:
    """Run a model over ranks, and compare each of them with its estimate."""
    reference = model.reference()
    from memfit.probes.experiments.ranks import RankTuneRequest, tune_ranks

    others = (run.sweep, run.wired, run.footprint, output.shows_more)
    if run.prompt_tokens is None or any(others):
        raise InputError(
            "--ranks runs a prompt of --prompt-tokens N once: leave out --prompt, --sweep, --wired,"
            " --footprint, --flags, --tickets and --plot"
        )
    if settings.batch > 1 or run.shortest_prompt:
        raise InputError("--ranks runs one request: leave out --batch and --shortest-prompt")
    ranks, hostfile = over
    if ranks.size == 1:
        raise InputError("--ranks 1 is the model by itself: leave out the options of ranks")
    workload, limits = run.of_prompt(settings), run.settings(margin_bytes, output.units)
    with measuring(reference, run, verbose=output.verbose) as (checkpoint, path, progress):
        request = RankTuneRequest(
            checkpoint=checkpoint,
            path=path,
            workload=workload,
            ranks=ranks,
            timeout_seconds=float(run.timeout),
            hostfile=hostfile,
            **limits,
        )
        result = tune_ranks(request, progress=progress)
    output.write(result, units=output.units)
    raise typer.Exit(Exit.YES)


def _request(
    run: TuneOptions,
    settings: WorkloadQuestion,
    margin_bytes: int,
    output: TuneOutput,
) -> "partial[TuneRequest]":
    """Return `TuneRequest` with the options; all are checked before anything is fetched."""
    from memfit.probes.experiments.generate import TuneRequest
    from memfit.probes.sweep_axes import parse_axis

    output.require_drawable()
    others = {"--plot": output.plot, "--flags": output.flags}
    output.require_tickets_alone(output.tickets, others)
    workload = run.of_prompt(settings)
    axes = [read_setting("sweep", parse_axis, each) for each in run.sweep or ()]
    given, file = run.prompt, prompt_file(run.prompt)
    request_of = partial(
        TuneRequest,
        workload=workload,
        prompt=None if given is None else prompt_text(given),
        command_prompt=None if file or given == "-" else given,
        prompt_file=file,
        shortest_prompt=run.shortest(settings.batch),
        tries_wired=run.wired,
        footprint=run.footprint,
        axes=tuple(axes),
        sweep_kv_start=settings.quantized_kv_start or 0,
        **run.settings(margin_bytes, output.units),
    )
    require_writable(output.file, needs_stdout=output.flags)
    return request_of


def _command_model(checkpoint: "Checkpoint", path: Path) -> str:
    """The model's name in commands for mlx-lm, which supports neither revisions nor stores."""
    is_name = checkpoint.source == "hub" and "@" not in checkpoint.id
    return checkpoint.id if is_name else str(path)


def _deliver(result: "TuneResult", output: TuneOutput) -> None:
    """Write the report, or the tickets; with --flags commands replace it on standard output."""
    from memfit.cli.render.view import view_of

    if output.tickets:
        emit(result.tickets().text(output.tickets), output.file)
        return
    view = view_of(result, units=output.units, plot=output.draws(output.plot))
    report = rendered(view, output.form, to_file=output.to_file)
    if output.flags and not output.to_file:
        print(report, end="", file=sys.stderr)
    else:
        emit(report, output.file)
    if output.flags and result.flags:
        emit("\n".join(map(visible, result.flags)) + "\n", None)


def _leave(result: "TuneResult", *, nothing_fits: bool) -> NoReturn:
    """Exit with the verdict; with a message when a point failed, which the report has too."""
    failed = [point for point in result.points if point.status == "failed"]
    if not failed:
        raise typer.Exit(Exit.NO if result.verdict == "exceeds" or nothing_fits else Exit.YES)
    reason = failed[0].reason or "the run stopped"
    if failed[0] is result.points[0]:
        say(reason)
    else:
        say(
            f"{len(failed)} of {len(result.points)} points failed, the first because of {reason};"
            " the same command measures them again"
        )
    raise typer.Exit(exit_of(MachineError(reason)))
