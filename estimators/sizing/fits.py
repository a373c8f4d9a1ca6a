"""Every model of a list with the most weight bits that fit one machine."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.errors import MemfitError, OtherModelError
from memfit.estimators.base.files import printable
from memfit.estimators.base.progress import NULL_PROGRESS, Progress
from memfit.estimators.checkpoint.local.local_models import LocalModel
from memfit.estimators.images.processor import takes_images
from memfit.estimators.machine.device import Device
from memfit.estimators.questions.question import WorkloadQuestion
from memfit.estimators.questions.target import MARGIN_BYTES
from memfit.estimators.results.comparison import Unavailable
from memfit.estimators.results.fits import Fit, Fits, NotSized, Sort, Use
from memfit.estimators.results.terms import Verdict
from memfit.estimators.sizing.advise import search_of
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.estimate import device_summary, estimate
from memfit.estimators.sizing.grid import weights_label
from memfit.estimators.sizing.image_advice import image_advice
from memfit.estimators.sizing.joint import JointSearch, Longest, RequestSettings, macs, smallest_mac
from memfit.estimators.sizing.resolved import resolved
from memfit.estimators.sizing.run_limits import notes_beyond, prompt_verdict
from memfit.estimators.sizing.search import CONTEXT_STEP, is_accepted, longest_prompt
from memfit.estimators.sizing.sized_model import SizedModel, require_loaded

_ORDER = ("fits", "tight", "exceeds")
# Tokens that a use needs room for: a conversation, and an agent's instructions, tools and files.
CONTEXT_OF_USE: dict[Use, int] = {"chat": 8192, "agents": 32768, "images": 0}
_SHIPPED = ("sample", "index")
# Bits of 32 weights at the fewest bits: mxfp4 has a scale of 8 bits for them (mlx, quantize).
_LEAST_WEIGHT = 4 * 32 + 8
NEXT_ROWS = 5
"""How many of the models that do not fit are in a list that is cut."""


class Selection(Struct, frozen=True, kw_only=True):
    """Which of the models that fit are listed, and in which order."""

    rows: int | None = None
    """How many of those that fit; None: all, and all that do not fit."""
    next_rows: int = NEXT_ROWS
    """How many of those that do not fit, where ``rows`` are given."""
    sort: Sort = "size"
    use: Use | None = None
    least_context: int = 0

    @property
    def context_tokens(self) -> int:
        """The tokens that a model has to have room for."""
        return max(self.least_context, CONTEXT_OF_USE[self.use] if self.use else 0)


EVERYTHING = Selection()


def fits(
    catalog: Catalog,
    kept: Iterable[LocalModel],
    device: Device,
    question: WorkloadQuestion,
    progress: Progress = NULL_PROGRESS,
    adapter: Path | None = None,
    selection: Selection = EVERYTHING,
) -> Fits:
    """Return what fits a device, the largest model first, and why a model has no figures.

    ``progress`` advances by one for each model. With an ``adapter``, only the models that it was
    trained on are looked at. A ``selection`` of rows looks at the models on this machine, then at
    those shipped with memfit, the largest first, until there are enough.

    Raises:
        MemfitError: as `read_adapter`.
    """
    if adapter:
        catalog.adapter(adapter)
    prompt, generated = question.tokens()
    listing = _Listing(catalog, device, question, adapter, selection)
    for each in _ordered(kept, device):
        if listing.is_wanted(each):
            listing.look_at(each)
        progress.advance()
    rows = sorted(listing.rows, key=lambda row: _rank(row, selection.sort))
    shown = _cut(rows, selection)
    return Fits(
        device=device_summary(device),
        prompt_tokens=prompt,
        max_tokens=generated,
        margin_bytes=MARGIN_BYTES,
        fitting=sum(row.verdict != "exceeds" for row in shown),
        left_out=listing.left_out + len(rows) - len(shown),
        least_context=selection.context_tokens,
        without_room=listing.without_room,
        models=tuple(shown),
        not_sized=tuple(sorted(listing.not_sized, key=lambda row: row.name)),
        without_images=tuple(sorted(listing.without_images)),
        of_other_adapters=tuple(sorted(listing.of_other_adapters)),
    )


class _Listing:
    """The rows so far."""

    def __init__(
        self,
        catalog: Catalog,
        device: Device,
        question: WorkloadQuestion,
        adapter: Path | None,
        selection: Selection,
    ) -> None:
        self._catalog, self._device, self._question = catalog, device, question
        self._adapter, self._selection = adapter, selection
        self.rows: list[Fit] = []
        self.not_sized: list[NotSized] = []
        self.without_images: list[str] = []
        self.of_other_adapters: list[str] = []
        self.left_out = self.without_room = 0
        self._found: Counter[Verdict] = Counter()

    def is_wanted(self, model: LocalModel) -> bool:
        """Whether a model has to be looked at for the rows that are asked for."""
        most = self._selection.rows
        if most is None or model.store not in _SHIPPED:
            return True
        if _is_too_large(model, self._device):
            wanted = self._found["exceeds"] < self._selection.next_rows
        else:
            # Another order than that of the sizes takes all figures.
            wanted = self._selection.sort != "size" or self._found["fits"] < most
        self.left_out += not wanted
        return wanted

    def look_at(self, model: LocalModel) -> None:
        """Add a row, or why there is none."""
        by_image = self._question.has_images or self._selection.use == "images"
        try:
            if by_image and not takes_images(self._catalog.checkpoint(model.reference)):
                self.without_images.append(model.name)
                return
            sized = self._catalog.sized(model.reference, device=self._device, adapter=self._adapter)
            row = _fit(require_loaded(sized), model, self._question)
        except OtherModelError:
            self.of_other_adapters.append(model.name)
        except MemfitError as error:
            path, why = printable(Path(model.reference)), Unavailable(error.slug, str(error))
            self.not_sized.append(NotSized(model.name, model.store, path, why))
        else:
            fits = row.verdict != "exceeds"
            if fits and row.context_tokens < self._selection.context_tokens:
                self.without_room += 1
                return
            self._found[row.verdict] += 1
            self.rows.append(row)


def _ordered(models: Iterable[LocalModel], device: Device) -> list[LocalModel]:
    """Those on this machine, then of the shipped ones the largest that may fit."""

    def key(model: LocalModel) -> tuple[bool, bool, int]:
        size, is_too_large = model.parameters or 0, _is_too_large(model, device)
        return model.store in _SHIPPED, is_too_large, size if is_too_large else -size

    return sorted(models, key=key)


def _is_too_large(model: LocalModel, device: Device) -> bool:
    """Whether the weights alone, at the fewest bits, are more than the machine gives."""
    return (model.parameters or 0) * _LEAST_WEIGHT // (8 * 32) > device.working_set_bytes


def _cut(rows: list[Fit], selection: Selection) -> list[Fit]:
    if selection.rows is None:
        return rows
    fitting = [row for row in rows if row.verdict != "exceeds"]
    others = [row for row in rows if row.verdict == "exceeds"]
    return [*fitting[: selection.rows], *others[: selection.next_rows]]


def _rank(row: Fit, sort: Sort) -> tuple[int, float, float, int, str]:
    """Of models that do not fit, those for the smallest Mac come first."""
    mac = float(row.smallest_memory_bytes or "inf") if row.verdict == "exceeds" else 0
    by = 0.0
    if sort == "context":
        by = -row.context_tokens
    elif sort == "speed" and row.decode_speed:
        by = -row.decode_speed.most_tokens_per_second
    return _ORDER.index(row.verdict), mac, by, -row.model.parameters, row.name


class _Choice(NamedTuple):
    """The settings of a row."""

    settings: RequestSettings
    longest: Longest
    smallest_memory_bytes: int | None = None


def _fit(sized: SizedModel, kept: LocalModel, question: WorkloadQuestion) -> Fit:
    target = resolved(sized, question, keeps_runtime=False)
    search = search_of(target.sized, target.workload)
    settings, longest, smallest = _choose(search)
    best, workload = search.model(settings.weight_bits), search.workload_with(settings)
    result = estimate(best, workload, advises=False)
    bits = settings.weight_bits
    return Fit(
        name=kept.name,
        store=kept.store,
        reference=printable(Path(kept.reference)),
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
        context_verdict=prompt_verdict(best, workload, longest.tokens),
        images=image_advice(best, workload),
        decode_speed=result.decode_speed,
        first_token=result.first_tokens[0] if result.first_tokens else None,
        smallest_memory_bytes=smallest,
        warnings=(
            *(note for note in result.notes if note.level == "warning"),
            *notes_beyond(best, workload, longest.tokens),
        ),
    )


def _choose(search: JointSearch) -> _Choice:
    """The most weight bits that leave room for the longest prompt, with the largest step."""
    if not search.searches_prompts:
        return _traced(search)
    requested = search.requested
    for bits in (None, *search.weight_bits):
        settings = replace(requested, weight_bits=bits)
        if not is_accepted(search.converts, settings):
            continue
        most = longest_prompt(search.model(bits)) // CONTEXT_STEP * CONTEXT_STEP
        # A prompt may be longer than the model's own limit.
        step = search.step_at(settings, max(most, search.workload.prompt_tokens))
        if step and (found := search.best(_steps(search, bits))):
            longest = Longest(most, replace(settings, prefill_step=step))
            return _Choice(found[-1], longest)
    # The fewest bits leave the most room.
    fewest = _fewest_bits(search)
    if found := search.best(_steps(search, fewest)):
        return _Choice(found[-1], search.longest(found[-1]))
    return _on_a_mac(search, _steps(search, fewest))


def _fewest_bits(search: JointSearch) -> int | None:
    for bits in reversed(search.weight_bits):
        if is_accepted(search.converts, replace(search.requested, weight_bits=bits)):
            return bits
    return None


def _steps(search: JointSearch, bits: int | None) -> list[RequestSettings]:
    kv_bits = search.workload.kv_bits
    return [RequestSettings(step, kv_bits, bits) for step in search.steps()]


def _traced(search: JointSearch) -> _Choice:
    """The most weight bits that fit: each other prompt would take traces of its own."""
    candidates = [each for bits in (None, *search.weight_bits) for each in _steps(search, bits)]
    if found := search.best(candidates):
        return _Choice(found[-1], Longest(search.longest_with(found[-1]), found[-1]))
    return _on_a_mac(search, candidates)


def _on_a_mac(search: JointSearch, candidates: list[RequestSettings]) -> _Choice:
    """What the smallest Mac runs it with."""
    found = smallest_mac(macs(search), lambda on_mac: on_mac.best(candidates))
    if found is None or found[0].sized.device is None:
        settings = candidates[0] if search.weight_bits else search.requested
        return _Choice(settings, Longest(0, settings))
    return _Choice(found[1], Longest(0, found[1]), found[0].sized.device.memory_bytes)
