"""The hostfile of ``mlx.launch``, with a device or a memory size for each host."""

import re
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import printable, read_whole, short
from memfit.estimators.base.reading.section import Section, json_section
from memfit.estimators.base.units import parse_size
from memfit.estimators.machine.device import Device, OsRegime
from memfit.estimators.machine.devices import memory_device

_MAX_BYTES = 1 << 20
_MAX_VALUES = 10_000
_SETTING = re.compile(r"MLX_[A-Z0-9_]+=")
_SSH_NAME = re.compile(r"[A-Za-z0-9._:@%][A-Za-z0-9._:@%-]{0,254}")


class Host(Struct, frozen=True):
    """One machine of a hostfile."""

    name: str
    """As ``ssh`` finds it."""
    device: Device | None
    """None where the file names none."""


def read_hosts(
    path: Path, *, find_device: Callable[[str], Device], os_regime: OsRegime
) -> tuple[Host, ...]:
    """Return the hosts of a file, in the order of their ranks.

    The format is MLX's (mlx/_distributed_utils/common.py, Hostfile): an object with ``hosts``, or
    the list of hosts alone. MLX leaves out the keys ``device`` and ``memory``.

    Raises:
        CheckpointError: when there is no such file.
        InputError: when it is no hostfile, or a device is not known.
    """
    return tuple(_host(one, find_device, os_regime) for one in _hosts(_hostfile(path), path))


def require_addresses(path: Path) -> None:
    """Require that each host has an address to connect to, and that ``envs`` are MLX's settings.

    Raises:
        InputError: when one has none, which MLX's ring does not run on, or a variable is another
            one: mlx.launch sets it for the processes of all ranks, PYTHONPATH and LD_PRELOAD too.
    """
    top = _hostfile(path)
    variables = top.values.get("envs", [])
    if not isinstance(variables, list) or not all(
        isinstance(each, str) and _SETTING.match(each) for each in variables
    ):
        raise top.fail("envs", 'expected settings of MLX, such as ["MLX_METAL_FAST_SYNCH=1"]')
    for host in _hosts(top, path):
        addresses = host.values.get("ips")
        _ssh_name(host)
        if not (isinstance(addresses, list) and addresses and isinstance(addresses[0], str)):
            raise host.fail("ips", 'the ring needs an address of the host, such as ["10.0.1.1"]')


def _hostfile(path: Path) -> Section:
    content = read_whole(path, limit=_MAX_BYTES)
    if content.lstrip()[:1] == b"[":
        content = b'{"hosts":' + content + b"}"
    return json_section(content, path, what="the hostfile", max_values=_MAX_VALUES)


def _hosts(top: Section, path: Path) -> tuple[Section, ...]:
    hosts = tuple(top.mappings("hosts"))
    if not hosts:
        raise InputError(f"{printable(path)}: hosts: the list is empty; name a host for each rank")
    return hosts


def _ssh_name(values: Section) -> str:
    """Return a name that ssh takes for a host: mlx.launch puts it into a command as it is."""
    name = values.text("ssh")
    if not _SSH_NAME.fullmatch(name):
        raise values.fail(
            "ssh",
            f"{short(name)} is not the name of a host: it has letters, digits and . _ : @ % -,"
            " and does not begin with -",
        )
    return name


def _host(values: Section, find_device: Callable[[str], Device], os_regime: OsRegime) -> Host:
    name = _ssh_name(values)
    if values.has("device") and values.has("memory"):
        raise values.fail("memory", "give device or memory, not both")
    key = next((key for key in ("device", "memory") if values.has(key)), None)
    if key is None:
        return Host(name, None)
    text = values.text(key)
    try:
        if key == "device":
            return Host(name, find_device(text))
        return Host(name, memory_device(parse_size(text), os_regime=os_regime))
    except InputError as error:
        raise values.fail(key, str(error)) from None
