"""Options of several machines that run one model together."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from memfit.cli.options.groups import Option, parsed
from memfit.cli.options.machine import MachineOptions
from memfit.estimators.base.errors import InputError
from memfit.estimators.machine.device import Device

if TYPE_CHECKING:
    from memfit.estimators.sizing.ranks import Ranks


LISTS = ("--device", "--memory")
"""Options that name a machine for each rank, with commas or given again."""


class RankedMachine(MachineOptions, frozen=True, kw_only=True):
    """The machine, or the machines of several ranks; ``device`` may then be a list."""

    pasted: ClassVar[tuple[str, ...]] = ("tensor_parallel_size",)
    ranks: Annotated[
        int | None,
        Option(metavar="N", help="Run the model over N ranks of mlx.launch, one a machine."),
    ] = None
    parallel: Annotated[
        Literal["tensor", "pipeline"] | None,
        Option(help="How ranks share the model. Default: as mlx_lm's sharded_load chooses."),
    ] = None
    tensor_parallel_size: Annotated[
        int,
        Option(*("--tensor-parallel-size", "-tp"), min=1, help="As --ranks N --parallel tensor."),
    ] = 1
    split: Annotated[
        str | None, Option(metavar="A,B", help="Layers of each rank of a pipeline, such as 20,12.")
    ] = None
    hosts: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="The hostfile of mlx.launch, with a device or memory for each host.",
        ),
    ] = None

    def chosen(self) -> Device | None:
        """Return the machine that an option names, of several the first.

        Raises:
            InputError: when a machine is unknown, or options contradict each other.
        """
        devices = self._devices()
        return devices[0] if devices else MachineOptions.chosen(self)

    def over(self) -> "Ranks | None":
        """Return the ranks, None when no option names any.

        Raises:
            InputError: when options contradict each other or cannot be read.
        """
        devices = self._devices()
        split = parsed("--split", _layers, self.split)
        size, parallel = self.ranks, self.parallel
        if self.tensor_parallel_size > 1:
            if (size, parallel, split) != (None, None, None):
                raise InputError("--tensor-parallel-size sets the ranks: leave out their options")
            size, parallel = self.tensor_parallel_size, "tensor"
        elif size is None:
            size = len(devices or split or ())
            if not size:
                if parallel:
                    raise InputError("--parallel needs --ranks N")
                return None
        from memfit.estimators.sizing.ranks import Ranks

        return Ranks(size, parallel, split, devices)

    def _devices(self) -> tuple[Device | None, ...]:
        """Return a machine for each rank, nothing when at most one is named."""
        if self.hosts is not None:
            return self._of_hosts(self.hosts)
        return self.listed()

    def _of_hosts(self, path: Path) -> tuple[Device | None, ...]:
        from memfit.estimators.machine.hosts import read_hosts

        hosts = read_hosts(path, find_device=self.named, os_regime=self.os_regime)
        default = MachineOptions.chosen(self) if self.given else None
        if default is None and (bare := next((h for h in hosts if h.device is None), None)):
            raise InputError(
                f"{path}: host {bare.name[:60]!r} has no device and no memory; add"
                ' "memory": "128GB", or give --device for all'
            )
        return tuple(host.device or default for host in hosts)


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{text[:40]!r}: write the layers of each rank, such as 20,12") from None
