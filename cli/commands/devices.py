"""``memfit devices``: the machines that memfit knows, and this machine."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from memfit.cli.render.data import json_text
from memfit.cli.render.output import emit
from memfit.estimators.base.units import format_bytes
from memfit.estimators.base.version import __version__
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.working_set import OsRegime

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA = "memfit.devices/1"


def devices(
    os_regime: Annotated[
        OsRegime | None,
        typer.Option("--os-regime", help="Show Macs on this macOS version only."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List Macs and GPUs with the memory that a model can use.

    The first line describes this machine.
    """
    from memfit.estimators.machine.devices import list_devices
    from memfit.estimators.machine.host import detect_host

    regimes = tuple(OsRegime) if os_regime is None else (os_regime,)
    tables = {regime: list_devices(os_regime=regime) for regime in regimes}
    if as_json:
        emit(json_text(as_document(detect_host(), tables)), None)
    else:
        emit(_tables(detect_host(), tables), None)


def as_document(host: Device | None, tables: dict[OsRegime, tuple[Device, ...]]) -> dict[str, Any]:
    """Return the ``memfit.devices/1`` document; sizes are bytes, null means not known."""
    return {
        "schema": SCHEMA,
        "memfit_version": __version__,
        "host": None if host is None else _as_entry(host),
        "apple": {
            regime.value: [_as_entry(device) for device in table if device.backend == "metal"]
            for regime, table in tables.items()
        },
        "nvidia": [_as_entry(device) for device in _gpus(tables)],
    }


def _as_entry(device: Device) -> dict[str, Any]:
    # "budget" names a limit of one process; it is not a property of the machine.
    names = (name for name in Device.__dataclass_fields__ if name != "budget")
    return {name: getattr(device, name) for name in names}


def _gpus(tables: dict[OsRegime, tuple[Device, ...]]) -> list[Device]:
    return [device for device in next(iter(tables.values())) if device.backend == "cuda"]


def _tables(host: Device | None, tables: dict[OsRegime, tuple[Device, ...]]) -> str:
    from memfit.cli.render.terminal import open_page

    page = open_page(to_file=False, least_width=64)
    console = page.console
    console.print(_host_text(host), soft_wrap=True)
    console.print()
    console.print(_mac_table(tables))
    console.print("~ computed: no Mac with that memory was measured on that macOS")
    console.print("- no Mac with that chip runs that macOS")
    console.print()
    console.print(_gpu_table(_gpus(tables)))
    return page.text()


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


def _mac_table(tables: dict[OsRegime, tuple[Device, ...]]) -> "Table":
    from memfit.estimators.machine.working_set import regime_name

    table = _table("Macs: recommended working set by macOS", "memory")
    for regime in tables:
        table.add_column(regime_name(regime), justify="right", no_wrap=True)
    newest = tables[max(tables, key=lambda regime: len(tables[regime]))]
    by_name = {regime: {mac.name: mac for mac in macs} for regime, macs in tables.items()}
    for mac in newest:
        if mac.backend == "metal":
            sets = [_working_set(known.get(mac.name), regime) for regime, known in by_name.items()]
            table.add_row(mac.name, format_bytes(mac.memory_bytes), *sets)
    return table


def _working_set(mac: Device | None, os_regime: OsRegime) -> str:
    if mac is None:
        return "-"
    from memfit.estimators.machine.working_set import stock_working_set

    measured = stock_working_set(mac.memory_bytes, os_regime=os_regime).measured
    return ("" if measured else "~ ") + format_bytes(mac.working_set_bytes)


def _gpu_table(gpus: list[Device]) -> "Table":
    table = _table("NVIDIA GPUs", "memory")
    table.add_column("MLX's limit", justify="right", no_wrap=True)
    for gpu in gpus:
        table.add_row(gpu.name, format_bytes(gpu.memory_bytes), format_bytes(gpu.working_set_bytes))
    return table


def _table(title: str, *sizes: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("name", overflow="ellipsis", no_wrap=True)
    for size in sizes:
        table.add_column(size, justify="right", no_wrap=True)
    return table
