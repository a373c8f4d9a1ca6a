"""``memfit index``: the index of published models."""

from typing import Annotated

import typer

from memfit.cli.command_groups import Group
from memfit.cli.render.output import emit, visible
from memfit.estimators.base.errors import InputError, MemfitError

index = typer.Typer(cls=Group, help="Manage the index of published models.", no_args_is_help=True)


@index.command()
def info() -> None:
    """Show which index is used, when it was made, and what it has."""
    from memfit.estimators.checkpoint.index.records import index as known
    from memfit.estimators.checkpoint.index.records import updated_file

    current = known()
    models = [current.model(name) for name in current.names]
    configs = sum(model.config is not None for model in models)
    checked = sum(bool(model.checked) for model in models)
    place = visible(str(updated_file())) if updated_file().is_file() else "shipped with memfit"
    emit(
        f"{place}, made {current.header.made}\n{len(models)} repositories, {configs} with their"
        f" config, {checked} checked against the published total\n",
        None,
    )


@index.command()
def update(
    owners: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OWNER...]", help="Owners on the Hub; default: all in the index."),
    ] = None,
) -> None:
    """Make the index again from the Hub; resumes what was interrupted."""
    from memfit.cli.progress import reporting
    from memfit.estimators.checkpoint.hub.settings import configured_hub
    from memfit.estimators.checkpoint.index.checkpoint import indexed_checkpoint
    from memfit.estimators.checkpoint.index.records import (
        IndexedModel,
        shipped_index,
        updated_file,
    )
    from memfit.estimators.checkpoint.index.update import publishers, update_index
    from memfit.estimators.sizing.catalog import Catalog

    def parameters(model: IndexedModel) -> int | None:
        catalog = Catalog()
        try:
            return catalog.sized(catalog.add(indexed_checkpoint(model))).footprint.parameters
        except MemfitError:
            return None

    path, former = updated_file(), shipped_index()
    chosen = owners or publishers(former)
    with reporting(verbose=False) as progress:
        try:
            made = update_index(path, former, configured_hub(), parameters, chosen, progress)
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from None
    emit(
        f"{made.models} models of {len(chosen)} owners read, {made.kept} kept as they were;"
        f" {made.refused} without a config that can be read\n{visible(str(path))}\n",
        None,
    )
