"""The known machines as a document, and as data."""

from typing import NamedTuple

from msgspec import convert

from memfit.cli.render.document import Document, Table, Text
from memfit.estimators.base.units import format_bytes
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.working_set import OsRegime, regime_name, stock_working_set
from memfit.estimators.results.devices import DeviceTable

_NOTES = (
    "~ computed: no Mac with that memory was measured on that macOS",
    "- no Mac with that chip runs that macOS",
)


class DevicesView(NamedTuple):
    """This machine, and the known machines by macOS version."""

    host: Device | None
    tables: dict[OsRegime, tuple[Device, ...]]

    @property
    def result(self) -> DeviceTable:
        apple = {
            regime: [device for device in table if device.backend == "metal"]
            for regime, table in self.tables.items()
        }
        facts = {"host": self.host, "apple": apple, "nvidia": _gpus(self.tables)}
        return convert(facts, DeviceTable, from_attributes=True)

    def document(self) -> Document:
        """Return this machine, then a table of Macs and a table of GPUs."""
        gpus = [
            (gpu.name, format_bytes(gpu.memory_bytes), format_bytes(gpu.working_set_bytes))
            for gpu in _gpus(self.tables)
        ]
        return (
            Text([_host_text(self.host)]),
            _macs(self.tables),
            Text(_NOTES),
            Table(("name", "memory", "MLX's limit"), gpus, "NVIDIA GPUs"),
        )


def _gpus(tables: dict[OsRegime, tuple[Device, ...]]) -> list[Device]:
    return [device for device in next(iter(tables.values())) if device.backend == "cuda"]


def _host_text(host: Device | None) -> str:
    if host is None:
        return "This machine: not known (supported: macOS on Apple silicon, and Linux)"
    parts = [
        f"{format_bytes(host.memory_bytes)} memory",
        f"{format_bytes(host.working_set_bytes)} working set",
    ]
    if host.max_buffer_bytes is not None:
        parts.append(f"{format_bytes(host.max_buffer_bytes)} largest buffer")
    if host.used_by_others_bytes is not None:
        parts.append(f"{format_bytes(host.used_by_others_bytes)} in use")
    if host.note:
        parts.append(host.note)
    return f"This machine: {host.name} ({host.backend}); {', '.join(parts)}"


def _macs(tables: dict[OsRegime, tuple[Device, ...]]) -> Table:
    newest = tables[max(tables, key=lambda regime: len(tables[regime]))]
    by_name = {regime: {mac.name: mac for mac in macs} for regime, macs in tables.items()}
    rows = [
        (
            mac.name,
            format_bytes(mac.memory_bytes),
            *(_working_set(known.get(mac.name), regime) for regime, known in by_name.items()),
        )
        for mac in newest
        if mac.backend == "metal"
    ]
    headings = ("name", "memory", *map(regime_name, tables))
    return Table(headings, rows, "Macs: recommended working set by macOS")


def _working_set(mac: Device | None, os_regime: OsRegime) -> str:
    if mac is None:
        return "-"
    measured = stock_working_set(mac.memory_bytes, os_regime=os_regime).measured
    return ("" if measured else "~ ") + format_bytes(mac.working_set_bytes)
