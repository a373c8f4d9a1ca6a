"""``memfit devices``: the machines that memfit knows, and this machine."""

from typing import Annotated

import typer

from memfit.cli.render.output import deliver
from memfit.estimators.machine.device import OsRegime


def devices(
    os_regime: Annotated[
        OsRegime | None, typer.Option("--os-regime", help="Show Macs on this macOS version only.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List Macs and GPUs with the memory that a model can use.

    The first line describes this machine.
    """
    from msgspec import convert

    from memfit.cli.render.view import view_of
    from memfit.estimators.machine.devices import list_devices
    from memfit.estimators.machine.host import detect_host
    from memfit.estimators.results.devices import DeviceTable

    regimes = tuple(OsRegime) if os_regime is None else (os_regime,)
    tables = {regime: list_devices(os_regime=regime) for regime in regimes}
    facts = {
        "host": detect_host(),
        "apple": {
            regime: [device for device in table if device.backend == "metal"]
            for regime, table in tables.items()
        },
        "nvidia": [device for device in tables[regimes[0]] if device.backend == "cuda"],
    }
    table = convert(facts, DeviceTable, from_attributes=True)
    deliver(view_of(table), "json" if as_json else "table", None)
