"""``memfit measurements``: the saved results of ``memfit tune``, which estimates use."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.options import Json, Output, ShownUnits
from memfit.cli.render.output import emit
from memfit.estimators.base.units import Units

if TYPE_CHECKING:
    from memfit.estimators.runtimes.measurement import Measurement
    from memfit.probes.store import Store

measurements = typer.Typer(
    help="Manage measurements of this machine, used by estimates.", no_args_is_help=True
)
Id = Annotated[str, typer.Argument(metavar="ID", show_default=False)]


@measurements.command("list")
def list_(json_: Json = False, output: Output = None, units: ShownUnits = Units.GB) -> None:
    """List all measurements, the newest last."""
    from memfit.probes.measurement_json import collection_text

    store = _store()
    stored = _all(store)
    if json_:
        emit(collection_text(stored), output)
    elif stored:
        from memfit.cli.render.views.measurements import to_table
        from memfit.cli.render.writers.terminal import to_terminal

        emit(to_terminal(to_table(stored, units), to_file=output is not None), output)
    else:
        emit(f"no measurements in {store.directory}; memfit tune MODEL makes one\n", output)


@measurements.command()
def show(id: Id, json_: Json = False, output: Output = None, units: ShownUnits = Units.GB) -> None:
    """Show every figure of a measurement; import reads its JSON."""
    from memfit.cli.render.views.measurements import to_document
    from memfit.cli.render.writers.terminal import to_terminal
    from memfit.probes.measurement_json import collection_text

    found = _store().get(id)
    if json_:
        emit(collection_text([found]), output)
    else:
        emit(to_terminal(to_document(found, units), to_file=output is not None), output)


@measurements.command()
def rm(ids: Annotated[list[str], typer.Argument(metavar="ID...", show_default=False)]) -> None:
    """Remove measurements by their ids."""
    chosen = set(ids)
    _store().remove(chosen)
    emit(f"{_counted(len(chosen))} removed\n", None)


@measurements.command()
def export(output: Output = None) -> None:
    """Write all measurements as JSON, for import on another machine."""
    from memfit.probes.measurement_json import collection_text

    emit(collection_text(_all(_store())), output)


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
        print(f"memfit: {warning}", file=sys.stderr)
    return stored.measurements


def _counted(count: int) -> str:
    return f"{count} measurement{'' if count == 1 else 's'}"
