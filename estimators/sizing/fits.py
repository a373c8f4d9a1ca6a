"""Every model of a list with the most weight bits that fit one machine."""

from collections.abc import Iterable
from pathlib import Path

from memfit.estimators.base.errors import MemfitError, OtherModelError
from memfit.estimators.base.files import printable
from memfit.estimators.base.progress import NULL_PROGRESS, Progress
from memfit.estimators.checkpoint.local.local_models import LocalModel
from memfit.estimators.images.processor import takes_images
from memfit.estimators.machine.device import Device
from memfit.estimators.questions.question import WorkloadQuestion
from memfit.estimators.questions.target import MARGIN_BYTES
from memfit.estimators.results.comparison import Unavailable
from memfit.estimators.results.fits import Fit, Fits, NotSized
from memfit.estimators.runtimes.run_limits import notes_beyond, prompt_verdict
from memfit.estimators.sizing.advise import search_of
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.estimate import device_summary, estimate
from memfit.estimators.sizing.grid import weights_label
from memfit.estimators.sizing.image_advice import image_advice
from memfit.estimators.sizing.joint import JointSearch, Longest, RequestSettings, macs, smallest_mac
from memfit.estimators.sizing.resolved import resolved
from memfit.estimators.sizing.sized_model import SizedModel, require_loaded

_ORDER = ("fits", "tight", "exceeds")


def fits(
    catalog: Catalog,
    kept: Iterable[LocalModel],
    device: Device,
    question: WorkloadQuestion,
    progress: Progress = NULL_PROGRESS,
    adapter: Path | None = None,
) -> Fits:
    """Return what fits a device, the largest model first, and why a model has no figures.

    ``progress`` advances by one for each model. With an ``adapter``, only the models that it was
    trained on are looked at.

    Raises:
        MemfitError: as `read_adapter`.
    """
    if adapter:
        catalog.adapter(adapter)
    prompt, generated = question.tokens()
    rows: list[Fit] = []
    not_sized: list[NotSized] = []
    without_images: list[str] = []
    of_other_adapters: list[str] = []
    for each in kept:
        try:
            if question.has_images and not takes_images(catalog.checkpoint(each.reference)):
                without_images.append(each.name)
                continue
            sized = require_loaded(catalog.sized(each.reference, device=device, adapter=adapter))
            rows.append(_fit(sized, each, question))
        except OtherModelError:
            of_other_adapters.append(each.name)
        except MemfitError as error:
            not_sized.append(NotSized(*_shown(each), Unavailable(error.slug, str(error))))
        finally:
            progress.advance()
    rows.sort(key=_rank)
    return Fits(
        device=device_summary(device),
        prompt_tokens=prompt,
        max_tokens=generated,
        margin_bytes=MARGIN_BYTES,
        fitting=sum(row.verdict != "exceeds" for row in rows),
        models=tuple(rows),
        not_sized=tuple(sorted(not_sized, key=lambda row: row.name)),
        without_images=tuple(sorted(without_images)),
        of_other_adapters=tuple(sorted(of_other_adapters)),
    )


def _shown(kept: LocalModel) -> LocalModel:
    return kept._replace(reference=printable(Path(kept.reference)))


def _rank(row: Fit) -> tuple[int, float, int, str]:
    """Of models that do not fit, those for the smallest Mac come first."""
    mac = float(row.smallest_memory_bytes or "inf") if row.verdict == "exceeds" else 0
    return _ORDER.index(row.verdict), mac, -row.model.parameters, row.name


def _fit(sized: SizedModel, kept: LocalModel, question: WorkloadQuestion) -> Fit:
    target = resolved(sized, question, keeps_runtime=False)
    search = search_of(target.sized, target.workload)
    settings, smallest = _best(search)
    best, workload = search.model(settings.weight_bits), search.workload_with(settings)
    result = estimate(best, workload, advises=False)
    longest = _longest(search, settings)
    bits = settings.weight_bits
    return Fit(
        **_shown(kept)._asdict(),
        model=result.model,
        runtime=result.runtime,
        weights=f"{bits} bits" if bits else weights_label(search),
        weight_bits=bits,
        prefill_step=settings.prefill_step,
        verdict=result.verdict,
        exceeded=result.exceeded,
        peak_bytes=result.peak_bytes,
        peak_range_bytes=result.peak_range_bytes,
        needed_bytes=result.needed_bytes,
        weights_bytes=result.components.weights.resident_bytes,
        context_tokens=longest.tokens,
        context_step=longest.settings.prefill_step,
        context_verdict=prompt_verdict(best.runtime_model, workload, longest.tokens),
        images=image_advice(best, workload),
        decode_speed=result.decode_speed,
        smallest_memory_bytes=smallest,
        warnings=(
            *(note for note in result.notes if note.level == "warning"),
            *notes_beyond(best.runtime_model, workload, longest.tokens),
        ),
    )


def _best(search: JointSearch) -> tuple[RequestSettings, int | None]:
    """The most weight bits that fit with any prefill step, else on the smallest Mac with it."""
    kv_bits, steps = search.workload.kv_bits, search.steps()
    candidates = [
        RequestSettings(step, kv_bits, bits)
        for bits in (None, *search.weight_bits)
        for step in steps
    ]
    if best := search.best(candidates):
        return best[-1], None
    on_smallest = smallest_mac(macs(search), lambda on_mac: on_mac.best(candidates))
    if on_smallest is None or on_smallest[0].sized.device is None:
        return search.requested, None
    return on_smallest[1], on_smallest[0].sized.device.memory_bytes


def _longest(search: JointSearch, settings: RequestSettings) -> Longest:
    if search.searches_prompts:
        return search.longest(settings)
    return Longest(search.longest_with(settings), settings)
