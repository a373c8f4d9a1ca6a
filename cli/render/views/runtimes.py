"""The known runtimes as a document, and as data."""

from collections.abc import Iterator

from memfit.cli.render.document import Document, Table, Text
from memfit.cli.render.view import view
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.runtimes.runtime import Runtime, RuntimeTable

_HEADINGS = ("Runtime", "Version", "Growth", "Step", "Cache in", "Prefill", "Budget")
_MEMORIES = {
    "working_set": "of the working set",
    "working_set_for_cache": "of the working set, for the cache",
    "memory": "of the memory",
}


@view(RuntimeTable)
def to_document(result: RuntimeTable) -> Document:
    """Return a row for each runtime, then how each allocates and what is wrong in it."""
    table = Table(_HEADINGS, [_row(runtime) for runtime in result.runtimes], align="l")
    return (table, *(text for runtime in result.runtimes for text in _texts(runtime)))


def _texts(runtime: Runtime) -> Iterator[Text]:
    yield Text([f"{runtime.name}: {runtime.allocates}"], gap=True)
    faults = (f"known to be wrong: {fault}" for fault in runtime.faults)
    lines = (f"charges {runtime.charges}; keeps {runtime.keeps}", *faults)
    yield Text(lines, indent=2)
    yield Text([f"source: {runtime.source}"], style="dim", indent=2)


def _row(runtime: Runtime) -> tuple[str, ...]:
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
