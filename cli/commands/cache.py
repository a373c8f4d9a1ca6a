"""``memfit cache``: the cached headers of models on the Hub."""

import typer

from memfit.cli.command_groups import Group
from memfit.cli.render.output import emit, visible
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import format_bytes

cache = typer.Typer(
    cls=Group, help="Manage the cached headers of models on the Hub.", no_args_is_help=True
)


@cache.command()
def info() -> None:
    """Show the directory of the cache and its size."""
    from memfit.estimators.checkpoint.hub.header_cache import user_cache

    headers = user_cache()
    usage = headers.usage()
    amount = _amount(usage.entries, usage.nbytes, f"at most {format_bytes(headers.max_bytes)}")
    emit(f"{visible(str(headers.directory))}\n{amount}\n", None)


@cache.command()
def clear() -> None:
    """Remove all cached headers."""
    from memfit.estimators.checkpoint.hub.header_cache import user_cache

    headers = user_cache()
    try:
        removed = headers.clear()
    except OSError as error:
        raise InputError(f"{headers.directory}: cannot be cleared: {error.strerror}") from None
    emit(_amount(removed.entries, removed.nbytes, "removed") + "\n", None)


def _amount(entries: int, nbytes: int, rest: str) -> str:
    noun = "entry" if entries == 1 else "entries"
    return f"{entries} {noun}, {format_bytes(nbytes)}; {rest}"
