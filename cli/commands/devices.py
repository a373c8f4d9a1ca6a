"""``memfit devices``: the machines that memfit knows, and this machine."""

from typing import Annotated

import typer

from memfit.cli.render.output import deliver
from memfit.estimators.machine.working_set import OsRegime


def devices(
    os_regime: Annotated[
        OsRegime | None, typer.Option("--os-regime", help="Show Macs on this macOS version only.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List Macs and GPUs with the memory that a model can use.

    The first line describes this machine.
    """
    from memfit.cli.render.views.devices import DevicesView
    from memfit.estimators.machine.devices import list_devices
    from memfit.estimators.machine.host import detect_host

    regimes = tuple(OsRegime) if os_regime is None else (os_regime,)
    tables = {regime: list_devices(os_regime=regime) for regime in regimes}
    deliver(DevicesView(detect_host(), tables), "json" if as_json else "table", None)
