"""``memfit gate``: check a policy's targets against their limits; ``init`` writes a policy."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from memfit.cli.command_groups import Group, GroupedCommand
from memfit.cli.exits import Exit
from memfit.cli.options.completion import complete_device, complete_model
from memfit.cli.options.groups import FORMAT, JSON, VERBOSE, OptionGroup, argument, grouped, option
from memfit.cli.progress import reporting
from memfit.cli.render.output import DRAWN, Format, deliver, format_of, rendered, say
from memfit.estimators.base.errors import InputError, PolicyError
from memfit.estimators.base.progress import Progress
from memfit.estimators.gate import POLICY as POLICY_NAME
from memfit.estimators.questions.question import read_setting

if TYPE_CHECKING:
    from memfit.estimators.gate.report import GateReport

POLICY = Path(POLICY_NAME)
# GitHub shows this Markdown on the page of a run (docs.github.com, "Workflow commands").
SUMMARY = "GITHUB_STEP_SUMMARY"


GateFormat = Literal["table", "github", "junit", "markdown", "html", "svg", "json"]


class GateGroup(Group):
    """Runs ``check`` when no command is given; a model called init must be written ./init."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert ``check`` when no command is given."""
        if not args and ctx.resilient_parsing:  # a shell completes the commands
            return super().parse_args(ctx, args)
        named = bool(args) and args[0] in (*self.commands, "--help", "-h")
        return super().parse_args(ctx, args if named else ["check", *args])


gate = typer.Typer(
    cls=GateGroup,
    help="Check models against the limits of a policy file.\n\n`memfit gate` is short for"
    " `memfit gate check`, and takes its options.",
)


class Upgrade(OptionGroup, frozen=True, kw_only=True):
    """Two models in place of those of the policy."""

    old: str | None = argument(metavar="[OLD]", help="The model to replace.")
    new: str | None = argument(metavar="[NEW]", help="The new model.")


class CheckOptions(OptionGroup, frozen=True, kw_only=True):
    """What is checked."""

    policy: Path = option(help="The policy file.", default=POLICY)
    target: list[str] | None = option(help="Check only this target; repeat for more.")
    allow_bounds: bool = option(
        "--allow-bounds", help="Accept an upper bound where no figure is known.", default=False
    )
    update: bool = option(
        "--update", help="Write the current figures to memfit.lock.json.", default=False
    )


class GateOutput(OptionGroup, frozen=True, kw_only=True):
    """How and where the report is written."""

    panel = "Output options"
    format_: GateFormat = FORMAT
    json_: bool = JSON
    files: list[str] | None = option(
        "--output",
        "-o",
        metavar="FORMAT=FILE",
        help="Also write a file, in this format or that of its suffix; repeat for more.",
    )
    verbose: bool = VERBOSE

    @property
    def form(self) -> GateFormat:
        """The format that --json or --format sets."""
        return "json" if self.json_ else self.format_


@gate.command(cls=GroupedCommand)
@grouped
def check(upgrade: Upgrade, options: CheckOptions, output: GateOutput) -> None:
    """Check every target against its limits and the baseline.

    Targets are read from memfit.yaml, the baseline from memfit.lock.json in the same directory.
    With OLD and NEW, every target checks NEW, and the growth limits compare it with OLD.
    `memfit gate init MODEL --memory 32GB` writes a first policy.
    """
    from memfit.estimators.base.files import is_there, printable

    if upgrade.old is not None and upgrade.new is None:
        raise InputError(
            f"{printable(upgrade.old)}: is neither a command of gate (check, init) nor an upgrade;"
            " an upgrade needs both OLD and NEW"
        )
    if options.policy == POLICY and not is_there(POLICY):
        raise InputError(
            f"{POLICY}: no such file; memfit gate init MODEL --memory 32GB writes a first one, or"
            " name a file with --policy"
        )
    files = _parsed_outputs(output.files or [], get_args(GateFormat))
    try:
        with reporting(verbose=output.verbose) as progress:
            report = _report(upgrade, options, progress)
    except PolicyError as error:
        if output.form == "github":  # at the lines of the policy, where a reviewer looks
            from memfit.cli.render.views.gate import MistakesView

            deliver(MistakesView(error), output.form, None)
        raise
    _deliver(report, output.form, files)
    raise typer.Exit(_EXITS[report.verdict])


def _parsed_outputs(
    texts: Sequence[str], formats: Sequence[Format]
) -> tuple[tuple[Format, Path], ...]:
    """The formats and files of texts such as ``junit=report.xml``, or ``report.html``."""
    outputs: list[tuple[Format, Path]] = []
    for text in texts:
        named, _, name = text.partition("=")
        if not name and Path(text).suffix:
            named, name = format_of(Path(text), formats), text
        form = next((each for each in formats if each == named), None)
        if form is None or not name:
            raise InputError(
                f"--output {text!r}: write it as FORMAT=FILE or FILE.html; formats are"
                f" {', '.join(formats)}"
            )
        if Path(name) in [path for _, path in outputs]:
            raise InputError(f"--output {text!r}: the file is named twice")
        outputs.append((form, Path(name)))
    return tuple(outputs)


def _deliver(report: "GateReport", form: Format, files: Sequence[tuple[Format, Path]]) -> None:
    """Write the report to files and to standard output.

    In the format ``github`` the job summary gets the Markdown as well.
    """
    from memfit.cli.render.view import view_of

    for other, path in (*files, (form, None)):
        deliver(view_of(report, plot=other in DRAWN), other, path)
    if "github" in (form, *(other for other, _ in files)):
        _append_summary(rendered(view_of(report), "markdown", to_file=True))


def _append_summary(text: str) -> None:
    path = os.environ.get(SUMMARY)
    if not path:
        return
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise InputError(f"{SUMMARY}: {path}: cannot be written: {error.strerror}") from None


_EXITS = {
    "passed": Exit.YES,
    "broken": Exit.NO,
    "invalid": Exit.INPUT,
    "undecided": Exit.UNSUPPORTED,
    "unreachable": Exit.UNREACHABLE,
}


def _report(upgrade: Upgrade, options: CheckOptions, progress: Progress) -> "GateReport":
    from memfit.cli.render.output import write_whole
    from memfit.estimators.base.files import one_at_a_time
    from memfit.estimators.gate.baseline import NAME, read_baseline, to_text
    from memfit.estimators.gate.evaluate import run_between, run_gate, select, updated
    from memfit.estimators.gate.policy import read_policy

    policy = read_policy(options.policy)
    chosen = select(policy, tuple(options.target or ()))
    old, new, bounds = upgrade.old, upgrade.new, options.allow_bounds
    if old is not None and new is not None:
        if options.update:
            raise InputError("--update uses the policy's own models; remove OLD and NEW")
        return run_between(chosen, old, new, allow_bounds=bounds, progress=progress).report
    lock = options.policy.with_name(NAME)
    outcome = run_gate(
        chosen,
        read_baseline(lock),
        allow_bounds=bounds,
        is_update=options.update,
        progress=progress,
    )
    if options.update:
        # Read again: another update may have written other targets while this one computed.
        with one_at_a_time(lock.parent):
            write_whole(lock, to_text(updated(outcome, read_baseline(lock), policy)))
        say(f"wrote {lock}")
    return outcome.report


@gate.command(cls=GroupedCommand)
def init(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="The model of the first target.", autocompletion=complete_model
        ),
    ],
    device: Annotated[
        list[str] | None,
        typer.Option(
            help="A machine that must run it; repeat for more.", autocompletion=complete_device
        ),
    ] = None,
    memory: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZE", help="A Mac that is sold with this memory; repeat for more."),
    ] = None,
) -> None:
    """Write a first policy with comments to memfit.yaml."""
    from memfit.cli.render.output import write_whole
    from memfit.estimators.base.files import is_there
    from memfit.estimators.base.units import parse_memory
    from memfit.estimators.gate.init_policy import init_policy
    from memfit.estimators.machine.devices import find_device, memory_device
    from memfit.estimators.sizing.catalog import Catalog

    if is_there(POLICY):
        raise InputError(f"{POLICY} exists already; edit it, or move it away first")
    sizes = [read_setting("memory", parse_memory, text) for text in memory or ()]
    devices = (*map(find_device, device or ()), *map(memory_device, sizes))
    if not devices:
        raise InputError("name a machine that must run it: --device m4-max-64, or --memory 32GB")
    write_whole(POLICY, init_policy(Catalog(), model, devices))
    next_step = "next: memfit gate --update, then commit both files"
    say(f"wrote {POLICY}; {next_step}")
