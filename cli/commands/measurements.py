"""``memfit measurements``: the saved results of ``memfit tune``, which estimates use."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.command_groups import Group, GroupedCommand
from memfit.cli.options.groups import Only, OutputOptions, grouped
from memfit.cli.render.output import emit, say, visible

if TYPE_CHECKING:
    from memfit.estimators.runtimes.measurement import Measurement
    from memfit.probes.store import Store

measurements = typer.Typer(
    cls=Group, help="Manage measurements of this machine, used by estimates.", no_args_is_help=True
)
Output = Annotated[OutputOptions, Only("json_", "file", "units")]
Id = Annotated[str, typer.Argument(metavar="ID", show_default=False)]


@measurements.command("list", cls=GroupedCommand)
@grouped
def list_(output: Output) -> None:
    """List all measurements, the newest last."""
    from memfit.probes.measurement_json import collection_text

    store = _store()
    stored = _all(store)
    if output.json_:
        emit(collection_text(stored), output.file)
        return
    from memfit.cli.render.document import Text
    from memfit.cli.render.views.measurements import to_table
    from memfit.cli.render.writers.terminal import to_terminal

    if stored:
        emit(to_terminal(to_table(stored, output.units), to_file=output.to_file), output.file)
    else:
        directory = visible(str(store.directory))
        text = Text((f"no measurements in {directory}; memfit tune MODEL makes one",))
        emit(to_terminal((text,), to_file=output.to_file), output.file)


@measurements.command(cls=GroupedCommand)
@grouped
def show(id: Id, output: Output) -> None:
    """Show every figure of a measurement; import reads its JSON."""
    from memfit.cli.render.views.measurements import to_document
    from memfit.cli.render.writers.terminal import to_terminal
    from memfit.probes.measurement_json import collection_text

    measurement = _store().get(id)
    if output.json_:
        emit(collection_text([measurement]), output.file)
    else:
        emit(
            to_terminal(to_document(measurement, output.units), to_file=output.to_file), output.file
        )


@measurements.command()
def rm(ids: Annotated[list[str], typer.Argument(metavar="ID...", show_default=False)]) -> None:
    """Remove measurements by their ids."""
    chosen = set(ids)
    _store().remove(chosen)
    emit(f"{_counted(len(chosen))} removed\n", None)


@measurements.command(cls=GroupedCommand)
@grouped
def export(output: Annotated[OutputOptions, Only("file")]) -> None:
    """Write all measurements as JSON, for import on another machine."""
    from memfit.probes.measurement_json import collection_text

    emit(collection_text(_all(_store())), output.file)


@measurements.command("import")
def import_(file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False)]) -> None:
    """Add the measurements of an export that are not stored here yet.

    A damaged export changes nothing.
    """
    imported = _store().add(file)
    emit(f"{_counted(imported.added)} added, {imported.skipped} already here\n", None)


def _store() -> "Store":
    from memfit.probes.store import user_store

    return user_store()


def _all(store: "Store") -> "tuple[Measurement, ...]":
    stored = store.all()
    for warning in stored.warnings:
        say(warning)
    return stored.measurements


def _counted(count: int) -> str:
    return f"{count} measurement{'' if count == 1 else 's'}"
