"""The known machines as data."""

from memfit.estimators.machine.device import KnownDevice, OsRegime
from memfit.estimators.results.result import Result


class DeviceTable(Result, frozen=True, kw_only=True, tag="memfit.devices/1"):
    """The answer of ``memfit devices``; null means not known."""

    host: KnownDevice | None
    """This machine."""
    apple: dict[OsRegime, tuple[KnownDevice, ...]]
    """Macs by the macOS version that they run."""
    nvidia: tuple[KnownDevice, ...]
