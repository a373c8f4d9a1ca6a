"""``memfit runtimes``: the runtimes that memfit knows, and what is wrong in their answers."""

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from memfit.cli.options import Json, Output
from memfit.cli.render.data import json_text
from memfit.cli.render.output import emit
from memfit.estimators.base.version import __version__

if TYPE_CHECKING:
    from memfit.estimators.runtimes.runtime import Runtime

SCHEMA = "memfit.runtimes/1"


def runtimes(json_: Json = False, output: Output = None) -> None:
    """List runtimes, and how each allocates its cache.

    Shows the cache's types and budget too, and the source of each rule.
    """
    from memfit.estimators.runtimes.registry import list_runtimes

    found = list_runtimes()
    if json_:
        rows = [_facts(runtime) for runtime in found]
        data = {"schema": SCHEMA, "memfit_version": __version__, "runtimes": rows}
        emit(json_text(data), output)
    else:
        emit(_table(found, to_file=output is not None), output)


def _facts(runtime: "Runtime") -> dict[str, Any]:
    """What all runtimes have, without the settings of one."""
    from memfit.estimators.runtimes.runtime import Runtime

    every = asdict(runtime)
    return {field.name: every[field.name] for field in fields(Runtime)}


def _table(found: "tuple[Runtime, ...]", *, to_file: bool) -> str:
    from memfit.cli.render import grid
    from memfit.cli.render.terminal import open_page

    page = open_page(to_file=to_file, least_width=64)
    grid.draw(page, _HEADINGS, [_row(runtime) for runtime in found], left=len(_HEADINGS))
    for runtime in found:
        page.console.print(f"\n{runtime.name}: {runtime.allocates}", soft_wrap=True)
        page.console.print(f"  charges {runtime.charges}; keeps {runtime.keeps}", soft_wrap=True)
        for fault in runtime.faults:
            page.console.print(f"  known to be wrong: {fault}", soft_wrap=True)
        page.console.print(f"  source: {runtime.source}", style="dim", soft_wrap=True)
    return page.text()


_HEADINGS = ("Runtime", "Version", "Growth", "Step", "Cache in", "Prefill", "Budget")
_MEMORIES = {
    "working_set": "of the working set",
    "working_set_for_cache": "of the working set, for the cache",
    "memory": "of the memory",
}


def _row(runtime: "Runtime") -> tuple[str, ...]:
    from memfit.estimators.base.units import Units, format_bytes

    dtype = f"{runtime.kv_bits} bits" if runtime.kv_bits else runtime.cache_dtype or "activations"
    budget = runtime.budget
    if budget.bytes is not None:
        limit = f"{format_bytes(budget.bytes, Units.GIB)} of cache"
    else:
        limit = f"{budget.share} % {_MEMORIES[budget.of]}"
    return (
        runtime.name,
        runtime.version,
        runtime.growth,
        str(runtime.kv_step),
        dtype,
        str(runtime.prefill_step),
        limit,
    )
