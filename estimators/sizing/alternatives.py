"""What to run on a machine in place of a model that does not fit it."""

from collections.abc import Iterator

from memfit.estimators.checkpoint.index.names import name_words
from memfit.estimators.checkpoint.local.local_models import LocalModel, shipped_samples
from memfit.estimators.machine.device import Device
from memfit.estimators.questions.question import WorkloadQuestion
from memfit.estimators.results.advice import Alternative
from memfit.estimators.results.estimate import Estimate
from memfit.estimators.results.fits import Fit
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.fits import Selection, fits

_OTHERS = 2


def alternatives(name: str, device: Device, question: WorkloadQuestion) -> tuple[Alternative, ...]:
    """Return what fits a device: other weights of the model first, then the largest models.

    ``name`` is that of the model, or of its repository. These are samples of memfit.
    """
    catalog = Catalog()
    same, others = _divided(name)
    found = fits(catalog, same, device, question).models if same else ()
    siblings = [row for row in found if row.verdict != "exceeds"]
    best = fits(
        catalog, others, device, question, selection=Selection(rows=_OTHERS, next_rows=0)
    ).models
    return tuple(_alternative(row) for row in (*siblings, *best) if row.verdict != "exceeds")


def is_hopeless(result: Estimate) -> bool:
    """Return whether no settings make a model fit its Mac."""
    is_mac = result.device is not None and result.device.backend == "metal"
    needs_more = result.best is None or "memory_bytes" in result.best.settings
    is_bytes = "context" not in result.exceeded
    return is_mac and is_bytes and result.verdict == "exceeds" and needs_more and not result.ranks


def _alternative(row: Fit) -> Alternative:
    return Alternative(
        name=row.name,
        weights=row.weights,
        weight_bits=row.weight_bits,
        prefill_step=row.prefill_step,
        verdict=row.verdict,
        needed_bytes=row.needed_bytes,
        context_tokens=row.context_tokens,
    )


def _divided(name: str) -> tuple[list[LocalModel], list[LocalModel]]:
    """The samples of the same model, without the one of this name, and all others."""
    words = name_words(name)
    same: list[LocalModel] = []
    others: list[LocalModel] = []
    for each in _others_than(name):
        other = name_words(each.name)
        is_same = (other.family, other.size) == (words.family, words.size)
        (same if is_same else others).append(each)
    return same, others


def _others_than(name: str) -> Iterator[LocalModel]:
    own = name.rpartition("/")[2].lower()
    return (each for each in shipped_samples() if each.name != own)
