"""The Macs that are looked through for the smallest that is large enough."""

from collections.abc import Callable, Sequence

from memfit.estimators.machine.devices import memory_device
from memfit.estimators.machine.working_set import GIB
from memfit.estimators.runtimes.facets import NvidiaOnly
from memfit.estimators.sizing.joint import JointSearch, Settings

MAC_SIZES = (8, 16, 24, 32, 48, 64, 96, 128, 256, 512)
"""Memory in GiB."""


def macs(search: JointSearch) -> list[JointSearch]:
    """Return a search on each Mac larger than its own, the smallest first.

    No Mac is larger than a machine that is none. Figures are computed once for all of them.
    """
    own = search.sized.device
    if (own and own.backend != "metal") or search.sized.runtime_model.facet(NvidiaOnly):
        return []
    least = own.memory_bytes if own else 0
    found = []
    search.convert_all()
    for size in MAC_SIZES:
        if size * GIB > least:
            search = search.on(memory_device(size * GIB))
            found.append(search)
    return found


def smallest_mac(
    ladder: Sequence[JointSearch], find: Callable[[JointSearch], tuple[Settings, ...]]
) -> tuple[JointSearch, Settings] | None:
    """Return the first Mac on which the settings that ``find`` returns fit, with them."""
    for on_mac in ladder:
        found = find(on_mac)
        if found and on_mac.verdict(found[-1]) == "fits":
            return on_mac, found[-1]
    return None
