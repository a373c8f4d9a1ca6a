"""What makes a request fit: settings on its own machine, else the smallest Mac."""

from collections.abc import Callable, Sequence

from msgspec import Struct

from memfit.estimators.machine.devices import memory_device
from memfit.estimators.machine.working_set import GIB
from memfit.estimators.sizing.joint import JointSearch, Settings

MAC_SIZES = (8, 16, 24, 32, 48, 64, 96, 128, 256, 512)
"""Memory in GiB of the Macs that are looked through."""


class Solution(Struct, frozen=True):
    """What makes a request fit."""

    settings: tuple[Settings, ...] = ()
    """On its own machine: the cheapest that fit, after cheaper ones that fit tightly."""
    unchanged: tuple[JointSearch, Settings] | None = None
    """The smallest Mac on which nothing else has to change."""
    smallest: tuple[JointSearch, Settings] | None = None
    """The smallest Mac on which any settings fit, with the cheapest of them."""


def solve(search: JointSearch, ladder: Callable[[], Sequence[JointSearch]]) -> Solution:
    """Return what makes a request fit; ``ladder`` gives the Macs to take instead of its own."""
    settings = search.cheapest() if search.sized.device else ()
    if settings and settings[0] == search.requested and search.verdict(settings[-1]) == "fits":
        return Solution(settings)
    larger = ladder()
    unchanged = smallest_mac(larger, lambda on_mac: on_mac.best([search.requested]))
    if settings:
        return Solution(settings, unchanged)
    return Solution((), unchanged, smallest_mac(larger, JointSearch.cheapest))


def macs(search: JointSearch) -> list[JointSearch]:
    """Return a search on each Mac larger than its own, the smallest first.

    No Mac is larger than a machine that is none. Figures are computed once for all of them.
    """
    own = search.sized.device
    if (own and own.backend != "metal") or not search.sized.runtime_model.runs_on_macs:
        return []
    least = own.memory_bytes if own else 0
    larger = []
    search.convert_all()
    for size in MAC_SIZES:
        if size * GIB > least:
            search = search.on(memory_device(size * GIB))
            larger.append(search)
    return larger


def smallest_mac(
    ladder: Sequence[JointSearch], find: Callable[[JointSearch], tuple[Settings, ...]]
) -> tuple[JointSearch, Settings] | None:
    """Return the first Mac on which the settings that ``find`` returns fit, with them."""
    for on_mac in ladder:
        settings = find(on_mac)
        if settings and on_mac.verdict(settings[-1]) == "fits":
            return on_mac, settings[-1]
    return None
