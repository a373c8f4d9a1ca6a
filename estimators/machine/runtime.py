"""Runtimes and the constants their memory follows from."""

from dataclasses import dataclass

from memfit.estimators.errors import InputError
from memfit.estimators.machine.tables import load_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """A runtime as it comes; all counts are tokens. Versions are those the rules were read in."""

    name: str
    version: str
    mlx_version: tuple[int, ...]
    prefill_step: int
    kv_step: int
    kv_group_size: int
    quantized_kv_start: int
    rotating_keep: int


def get_runtime(name: str) -> Runtime:
    """Return the runtime of that name.

    Raises:
        InputError: when it is not described.

    >>> get_runtime("mlx-lm").kv_step
    256
    """
    runtimes = load_table("runtimes")
    if name not in runtimes:
        raise InputError(f"no runtime is called {name!r}; there is {', '.join(runtimes)}")
    row = dict(runtimes[name])
    return Runtime(name=name, mlx_version=tuple(row.pop("mlx_version")), **row)
