"""What an answer says of the host of a GPU, and of one machine of several."""

from memfit.cli.render.views.text import size, tenths
from memfit.estimators.base.units import Units
from memfit.estimators.results.advice import Action
from memfit.estimators.results.estimate import Estimate, RankPlan


def host_bytes(result: Estimate) -> int:
    """What the host of a GPU holds, 0 where it has no memory of its own."""
    has_host = result.device is not None and result.device.has_host
    shares = (result.memories or ()) if has_host else ()
    return sum(share.total_bytes for share in shares if share.name == "host")


def on_host_text(result: Estimate, units: Units) -> str:
    """What is on the host, of how much where that is known; of one memory what is in it."""
    if not result.memories or result.device is None:
        return ""
    if not result.device.has_host:
        both = size(sum(each.total_bytes for each in result.memories), units)
        whole = size(result.device.memory_bytes, units, down=True)
        return f"; with the host {both} of {whole}"
    (memory,) = (each.memory_bytes for each in result.memories if each.name == "host")
    of = f" of {size(memory, units, down=True)}" if memory else ""
    return f"; host {size(host_bytes(result), units)}{of}"


def then_on_host(action: Action, units: Units) -> str:
    """What the host holds after a change, or has to have where its size is not known."""
    if not (action.host_bytes and action.host_memory_bytes):
        return ""
    if action.verdict == "unknown":
        return f", if that has {size(action.host_memory_bytes, units)}"
    return f", which then holds {size(action.host_bytes, units)}"


def alone_text(plan: RankPlan, units: Units) -> str:
    """Which of the machines runs the model without the others, the one with the most room."""
    found = [each for each in plan.alone if each.verdict == "fits"] or list(plan.alone)
    if not found:
        return ""
    best = max(found, key=lambda each: each.working_set_bytes - each.needed_bytes)
    of = f"{tenths(best.needed_bytes, units)} of {size(best.working_set_bytes, units, down=True)}"
    word = "fits it" if best.verdict == "fits" else "fits it tightly"
    return f"{best.device} alone {word} ({of})."
