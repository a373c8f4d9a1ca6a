"""Options that name a machine."""

from typing import Annotated

from memfit.cli.options.completion import complete_device
from memfit.cli.options.groups import Option, OptionGroup, parsed
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import parse_memory, parse_size
from memfit.estimators.machine.device import Device, as_it_is_now
from memfit.estimators.machine.working_set import DEFAULT_REGIME, OsRegime


class MachineOptions(OptionGroup, frozen=True, kw_only=True):
    """The machine that has to run a model."""

    panel = "Machine options"
    device: Annotated[
        str | None,
        Option(
            help="A machine such as m4-max-64 (see memfit devices), or host: what is free of this"
            " one.",
            autocompletion=complete_device,
        ),
    ] = None
    memory: Annotated[
        str | None, Option(help="A Mac that is sold with this memory, such as 32 or 32GB.")
    ] = None
    working_set: Annotated[
        str | None, Option(help="A device with this recommended working set, such as 26.8GB.")
    ] = None
    os_regime: Annotated[
        OsRegime, Option(help="macOS version that sets a Mac's recommended working set.")
    ] = DEFAULT_REGIME

    @property
    def given(self) -> int:
        """How many options name a machine."""
        return sum(value is not None for value in (self.device, self.memory, self.working_set))

    def chosen(self) -> Device | None:
        """Return the machine that an option names, else this machine if it has a GPU.

        Raises:
            InputError: when the machine is unknown, or more than one is named.
        """
        from memfit.estimators.machine.devices import working_set_device

        if self.given > 1:
            raise InputError(
                "--device, --memory and --working-set each name a device: give only one"
            )
        if self.memory is not None:
            return self._with_memory(self.memory)
        working_set_bytes = parsed("--working-set", parse_size, self.working_set)
        if working_set_bytes is not None:
            return working_set_device(working_set_bytes)
        if self.device is not None:
            return self.named(self.device)
        from memfit.estimators.machine.host import detect_host

        host = detect_host()
        return host if host and host.backend != "cpu" else None

    def listed(self) -> tuple[Device, ...]:
        """Return the machines of a --device or --memory with several, nothing where it has one.

        Raises:
            InputError: when one is unknown, or another option names a machine too.
        """
        for text, read in ((self.device, self.named), (self.memory, self._with_memory)):
            names = [name.strip() for name in (text or "").split(",")]
            if len(names) > 1 and self.given > 1:
                raise InputError(
                    "--device, --memory and --working-set each name a device: give one"
                )
            if len(names) > 1:
                return tuple(map(read, names))
        return ()

    def _with_memory(self, text: str) -> Device:
        """Return a Mac with this memory."""
        from memfit.estimators.machine.devices import memory_device

        memory_bytes = parsed("--memory", parse_memory, text) or 0
        return memory_device(memory_bytes, os_regime=self.os_regime)

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
