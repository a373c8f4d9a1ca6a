"""``memfit cache``: the headers kept of models on the Hub."""

import typer

from memfit.cli.render.output import emit
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import format_bytes

cache = typer.Typer(help="Headers kept of models on the Hub.", no_args_is_help=True)


@cache.command()
def info() -> None:
    """Say where they are kept, and how much there is."""
    from memfit.estimators.checkpoint.hub.header_cache import user_cache

    kept = user_cache()
    usage = kept.usage()
    amount = _amount(usage.entries, usage.nbytes, f"at most {format_bytes(kept.max_bytes)}")
    emit(f"{kept.directory}\n{amount}\n", None)


@cache.command()
def clear() -> None:
    """Remove them."""
    from memfit.estimators.checkpoint.hub.header_cache import user_cache

    kept = user_cache()
    try:
        removed = kept.clear()
    except OSError as error:
        raise InputError(f"{kept.directory}: cannot be cleared: {error.strerror}") from None
    emit(_amount(removed.entries, removed.nbytes, "removed") + "\n", None)


def _amount(entries: int, nbytes: int, rest: str) -> str:
    noun = "entry" if entries == 1 else "entries"
    return f"{entries} {noun}, {format_bytes(nbytes)}; {rest}"
