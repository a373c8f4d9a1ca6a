"""The known machines as a document, and as data."""

from memfit.cli.render.document import Document, Table, Text
from memfit.cli.render.view import view
from memfit.cli.render.views.text import memory
from memfit.estimators.base.units import Units, format_bytes, format_limit
from memfit.estimators.machine.device import (
    KnownDevice,
    OsRegime,
    name_as_sold,
    regime_name,
    stock_working_set,
)
from memfit.estimators.results.devices import DeviceTable

_NOTES = (
    "~ computed: no Mac with that memory was measured on that macOS",
    "- no Mac with that chip runs that macOS",
)


@view(DeviceTable)
def to_document(result: DeviceTable) -> Document:
    """Return this machine, then a table of Macs and a table of GPUs."""
    gpus = [
        (gpu.name, memory(gpu, Units.GB), format_limit(gpu.working_set_bytes))
        for gpu in result.nvidia
    ]
    return (
        Text([_host_text(result.host)]),
        _macs(result.apple),
        Text(_NOTES),
        Table(("name", "memory", "MLX's limit"), gpus, "NVIDIA GPUs"),
    )


def _host_text(host: KnownDevice | None) -> str:
    if host is None:
        return "This machine: not known (supported: macOS on Apple silicon, and Linux)"
    parts = [
        f"{memory(host, Units.GB)} of memory",
        f"{format_limit(host.working_set_bytes)} working set",
    ]
    if host.max_buffer_bytes is not None:
        parts.append(f"{format_limit(host.max_buffer_bytes)} largest buffer")
    if host.used_by_others_bytes is not None:
        parts.append(f"{format_bytes(host.used_by_others_bytes)} in use")
    if host.note:
        parts.append(host.note)
    return f"This machine: {name_as_sold(host.name)} ({host.backend}); {', '.join(parts)}"


def _macs(tables: dict[OsRegime, tuple[KnownDevice, ...]]) -> Table:
    newest = tables[max(tables, key=lambda regime: len(tables[regime]))]
    by_name = {regime: {mac.name: mac for mac in macs} for regime, macs in tables.items()}
    rows = [
        (
            mac.name,
            memory(mac, Units.GB),
            *(_working_set(known.get(mac.name), regime) for regime, known in by_name.items()),
        )
        for mac in newest
    ]
    headings = ("name", "memory", *map(regime_name, tables))
    return Table(headings, rows, "Macs: recommended working set by macOS")


def _working_set(mac: KnownDevice | None, os_regime: OsRegime) -> str:
    if mac is None:
        return "-"
    measured = stock_working_set(mac.memory_bytes, os_regime=os_regime).measured
    return ("" if measured else "~ ") + format_limit(mac.working_set_bytes)
