"""The machine, or the machines of several ranks, that have to run a model."""

from pathlib import Path
from typing import Annotated, Any

from msgspec import Struct

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.ranks import MAX_RANKS, Parallel
from memfit.estimators.base.reading.section import memory_value, number_or_text, one_of
from memfit.estimators.base.setting_names import setting
from memfit.estimators.base.units import parse_size
from memfit.estimators.machine.device import DEFAULT_REGIME, Device, OsRegime, as_it_is_now
from memfit.estimators.questions.question import Integer, PathSetting, Question, each, integer, text


class Ranks(Struct, frozen=True):
    """How many processes run a model together, how, and where."""

    size: int
    parallel: Parallel | None = None
    """None: as mlx-lm's sharded_load chooses."""
    split: tuple[int, ...] | None = None
    """Layers of each rank; None: as mlx-lm's programs split them."""
    devices: tuple[Device | None, ...] = ()
    """One for each rank; empty: all on the model's."""

    def __post_init__(self) -> None:
        name = setting("ranks")
        if not 1 <= self.size <= MAX_RANKS:
            raise InputError(f"{name} {self.size}: give from 1 to {MAX_RANKS}")
        if self.devices and len(self.devices) != self.size:
            raise InputError(f"{name} {self.size}: {len(self.devices)} devices are named")

    def device(self, index: int, default: Device | None) -> Device | None:
        return self.devices[index] if self.devices else default


def _layers(written: Any) -> tuple[int, ...]:
    if isinstance(written, list | tuple):
        return tuple(map(integer, written))
    try:
        return tuple(int(part) for part in text(written).split(","))
    except ValueError:
        raise InputError(
            f"{written[:40]!r}: write the layers of each rank, such as 20,12"
        ) from None


def _regime(value: Any) -> OsRegime:
    return OsRegime(one_of(tuple(OsRegime))(value))


class MachineQuestion(Question, frozen=True, kw_only=True):
    """A machine, or one for each rank; ``device`` and ``memory`` have several for ranks."""

    device: Annotated[tuple[str, ...], each(text, ",")] = ()
    memory: Annotated[tuple[int, ...], each(memory_value, ",")] = ()
    """Bytes."""
    working_set: Annotated[int | None, number_or_text(parse_size)] = None
    """Bytes."""
    os_regime: Annotated[OsRegime, _regime] = DEFAULT_REGIME
    ranks: Integer = None
    parallel: Annotated[Parallel | None, one_of(("tensor", "pipeline"))] = None
    split: Annotated[tuple[int, ...] | None, _layers] = None
    hosts: PathSetting = None

    @property
    def is_named(self) -> bool:
        """Whether a setting names a machine."""
        return bool(self.device or self.memory or self.working_set is not None)

    def machine(self) -> Device | None:
        """Return the machine; where none is named this one, if it has a GPU.

        Raises:
            InputError: when the machine is unknown, or more than one is named.
        """
        from memfit.estimators.machine.devices import working_set_device

        self._require_one_name()
        if len(self.device) > 1 or len(self.memory) > 1:
            name = setting("device" if self.device else "memory")
            raise InputError(f"{name}: give one machine, several are for ranks only")
        if self.memory:
            return self._with_memory(self.memory[0])
        if self.working_set is not None:
            return working_set_device(self.working_set)
        if self.device:
            return self.named(self.device[0])
        from memfit.estimators.machine.host import detect_host

        host = detect_host()
        return host if host and host.backend != "cpu" else None

    def first_machine(self) -> Device | None:
        """Return the machine, of several ranks that of the first.

        Raises:
            InputError: when a machine is unknown, or settings contradict each other.
        """
        devices = self.machines()
        return devices[0] if devices else self.machine()

    def machines(self) -> tuple[Device | None, ...]:
        """Return a machine for each rank, nothing where at most one is named.

        Raises:
            InputError: as `first_machine`.
        """
        if self.hosts is not None:
            return self._of_hosts(self.hosts)
        if len(self.device) > 1 or len(self.memory) > 1:
            self._require_one_name()
            return (*map(self.named, self.device), *map(self._with_memory, self.memory))
        return ()

    def over(self) -> Ranks | None:
        """Return the ranks, None where no setting names any.

        Raises:
            InputError: as `first_machine`, or for ranks that are out of range.
        """
        devices = self.machines()
        size = len(devices or self.split or ()) if self.ranks is None else self.ranks
        if self.ranks is None and not size:
            if self.parallel:
                raise InputError(f"{setting('parallel')} needs {setting('ranks')} N")
            return None
        return Ranks(size, self.parallel, self.split, devices)

    def named(self, name: str) -> Device:
        """Return the machine with a name; ``host`` is this machine with what is free of it now.

        Raises:
            InputError: when no machine has that name, or this one's memory cannot be read.
        """
        from memfit.estimators.machine.devices import find_device

        if name != "host":
            return find_device(name, os_regime=self.os_regime)
        from memfit.estimators.machine.host import detect_host

        host = detect_host()
        if host is None:
            raise InputError(
                "host: this machine's memory could not be read; name a device or a memory size"
            )
        return as_it_is_now(host)

    def _require_one_name(self) -> None:
        if bool(self.device) + bool(self.memory) + (self.working_set is not None) > 1:
            *names, last = map(setting, ("device", "memory", "working_set"))
            raise InputError(f"{', '.join(names)} and {last} each name a device: give only one")

    def _with_memory(self, memory_bytes: int) -> Device:
        from memfit.estimators.machine.devices import memory_device

        return memory_device(memory_bytes, os_regime=self.os_regime)

    def _of_hosts(self, path: Path) -> tuple[Device | None, ...]:
        from memfit.estimators.machine.hosts import read_hosts

        hosts = read_hosts(path, find_device=self.named, os_regime=self.os_regime)
        default = self.machine() if self.is_named else None
        if default is None and (bare := next((h for h in hosts if h.device is None), None)):
            raise InputError(
                f"{path}: host {bare.name[:60]!r} has no device and no memory; add"
                f' "memory": "128GB", or give {setting("device")} for all'
            )
        return tuple(host.device or default for host in hosts)
