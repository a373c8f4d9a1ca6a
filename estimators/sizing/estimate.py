"""An estimate: a sized model and a workload in, an `Estimate` out."""

from collections.abc import Iterator

from msgspec import UNSET, UnsetType, convert
from msgspec.structs import asdict, replace

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.setting_names import setting
from memfit.estimators.base.units import open_limit, open_size
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.kinds import predicts_more
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.devices import by_macos
from memfit.estimators.results.advice import Grid, ImageAdvice, StepSchedule
from memfit.estimators.results.estimate import (
    KV,
    Component,
    Components,
    CurvePoint,
    DeviceSummary,
    Estimate,
    FileChoice,
    MacosWorkingSet,
    MemoryPool,
    MemoryShare,
    ModelSummary,
    Note,
    Refusal,
    Weights,
    Workspace,
)
from memfit.estimators.results.result import both_units
from memfit.estimators.results.terms import Basis, Phase
from memfit.estimators.runtimes.facets import (
    HeadDrafting,
    OnMlx,
    SplitMemory,
    Views,
    decoding_rows,
    is_grouped,
    loaded_weights,
    pool,
    runs_kv_bits,
)
from memfit.estimators.runtimes.held import held_note
from memfit.estimators.runtimes.interface import MemoryFigures
from memfit.estimators.runtimes.registry import runtime_summary
from memfit.estimators.runtimes.runtime import Need, judge
from memfit.estimators.runtimes.source import Formula, Interpolated
from memfit.estimators.sizing.advise import NO_ADVICE, advise
from memfit.estimators.sizing.decode_speed import decode_speed
from memfit.estimators.sizing.prefill_speed import first_tokens
from memfit.estimators.sizing.run_limits import (
    ending_notes,
    largest_buffer,
    run_limits,
    tightened,
)
from memfit.estimators.sizing.search import longest_prompt
from memfit.estimators.sizing.sized_model import (
    SizedModel,
    draft_figures,
    error_bytes_of,
    held_of,
    peak_of,
    refusal_of,
    runtimes_that_load,
    verdict_of,
    workspace_error_of,
)
from memfit.estimators.sizing.step_schedule import step_schedule

SHORTEST_PLOTTED = 1024


def estimate(sized: SizedModel, workload: Workload, *, advises: bool = True) -> Estimate:
    """Return what a workload takes and what follows.

    Without ``advises`` no other settings are searched.

    Raises:
        UnsupportedError: when the runtime cannot run the workload.
    """
    figures, runtime_model = sized.figures_for(workload), sized.runtime_model
    need = sized.requirement(workload)
    limits = (*largest_buffer(sized.device, figures), *run_limits(sized, workload))
    verdict, exceeded = verdict_of(sized, workload)
    peak_bytes, held = peak_of(sized, workload), held_of(sized, workload)
    advises = advises and not refusal_of(sized)
    advice = advise(sized, workload) if advises else NO_ADVICE
    drafted = draft_figures(sized, workload)
    prompts = advice.grid.columns if advice.grid.axis == "context_tokens" else ()
    return Estimate(
        model=model_summary(sized),
        workload=workload,
        runtime=runtime_summary(runtime_model.runtime),
        device=device_summary(sized.device) if sized.device else None,
        components=_components(sized, workload, figures),
        peak_bytes=peak_bytes,
        peak_range_bytes=_peak_range(sized, workload, figures, peak_bytes),
        peak_phase=(drafted.phase if drafted else None) or figures.moment.phase,
        needed_bytes=need.peak_bytes,
        held_bytes=UNSET if held is None else held,
        held_phase=UNSET if held is None else _held_phase(sized, figures),
        verdict=tightened(verdict, limits),
        exceeded=exceeded,
        assumptions=both_units(tuple(_assumptions(sized, workload))),
        notes=both_units(tuple(_notes(sized, workload))),
        limits=limits,
        method=runtime_model.source.method,
        refusal=Refusal(refusal_of(sized), runtimes_that_load(sized))
        if refusal_of(sized)
        else UNSET,
        decode_speed=decode_speed(sized, workload),
        first_tokens=first_tokens(sized, workload, prompts) or UNSET,
        schedule=_schedule(sized, workload, advice.grid),
        pool=_pool(sized, workload) or UNSET,
        memories=_memories(sized, workload) or UNSET,
        files=tuple(_files(sized, workload, need)) or UNSET,
        images=(_image_advice(sized, workload) if advises else None) or UNSET,
        **asdict(advice),
    )


def _held_phase(sized: SizedModel, figures: MemoryFigures) -> Phase | UnsetType:
    # A draft's loop clears after the prompt alone.
    return "decode" if sized.draft else figures.moment.held_phase or UNSET


def _schedule(sized: SizedModel, workload: Workload, grid: Grid) -> StepSchedule | UnsetType:
    own = next((row for row in grid.rows if not row.settings), None)
    if own is None or grid.axis != "context_tokens" or own.context_step >= workload.prefill_step:
        return UNSET
    return step_schedule(sized, workload, longest_prompt(sized)) or UNSET


def _pool(sized: SizedModel, workload: Workload) -> MemoryPool | None:
    draft_bytes = sized.draft.resident_bytes if sized.draft else 0
    return pool(sized.runtime_model, workload, draft_bytes=draft_bytes)


def _memories(sized: SizedModel, workload: Workload) -> tuple[MemoryShare, ...]:
    split = sized.runtime_model.facet(SplitMemory)
    return split.memories(workload) if split else ()


def _image_advice(sized: SizedModel, workload: Workload) -> ImageAdvice | None:
    if not workload.images:
        return None
    # The rules of all image processors, which other prompts need not.
    from memfit.estimators.sizing.image_advice import image_advice

    return image_advice(sized, workload)


def _peak_range(
    sized: SizedModel, workload: Workload, figures: MemoryFigures, peak_bytes: int
) -> tuple[int, int]:
    if sized.runtime_model.basis("workspace", workload)[0] == "bound":
        return peak_bytes - figures.moment.workspace_bytes, peak_bytes
    lowest, moment = peak_bytes - workspace_error_of(sized, workload), figures.moment
    if moment.phase == "load":
        # With a fast device the arrays that others are made from are gone sooner.
        lowest = min(lowest, max(moment.prefill_bytes or 0, moment.decode_bytes or 0))
    return lowest, peak_bytes + error_bytes_of(sized, workload)


def with_plots(result: Estimate, sized: SizedModel) -> Estimate:
    """Add memory against context, and over the operations of the run where it is traced."""
    workload, runtime_model = result.workload, sized.runtime_model
    points, views = curve(sized, workload), runtime_model.facet(Views)
    is_computed = isinstance(runtime_model.source, Formula | Interpolated)
    is_by_formula = not is_computed and isinstance(runtime_model.subject.source, Formula)
    return replace(
        result,
        curve=points or UNSET,
        run=(views.run_calls(workload) if views else ()) or UNSET,
        curve_method="formula" if points and is_by_formula else UNSET,
    )


def curve(sized: SizedModel, workload: Workload) -> tuple[CurvePoint, ...]:
    """Return memory at doubling prompt lengths up to the longest that is searched.

    It ends before a length that the runtime cannot run.
    """
    return tuple(_points(sized.formula_view(), workload, longest_prompt(sized)))


def _points(sized: SizedModel, workload: Workload, most: int) -> Iterator[CurvePoint]:
    tokens = 0
    while tokens < most:
        tokens = min(2 * tokens or SHORTEST_PLOTTED, most)
        try:
            yield _point(sized, workload, tokens)
        except UnsupportedError:
            return


def _point(sized: SizedModel, workload: Workload, tokens: int) -> CurvePoint:
    prompt = replace(workload, prompt_tokens=tokens, max_tokens=0)
    figures = sized.figures_for(prompt)
    return CurvePoint(
        context_tokens=tokens,
        weights_bytes=sized.resident_bytes,
        cache_bytes=figures.kv.nbytes + figures.ssm_bytes,
        workspace_bytes=figures.moment.workspace_bytes,
        peak_bytes=sized.requirement(prompt).peak_bytes,
    )


def model_summary(sized: SizedModel) -> ModelSummary:
    """Return what a result says of the model."""
    model, footprint = sized.model, sized.footprint
    return ModelSummary(
        id=sized.checkpoint.id,
        source=sized.checkpoint.source,
        revision=sized.checkpoint.revision,
        model_type=model.model_type,
        parameters=footprint.parameters,
        bits_per_weight=round(8 * footprint.nbytes / footprint.parameters, 3),
        max_context=model.max_context,
        layers=model.layer_kinds(),
        assumed_from=sized.checkpoint.assumed_from or UNSET,
    )


def device_summary(device: Device) -> DeviceSummary:
    """Return what a result says of the device."""
    budgets = tuple(MacosWorkingSet(*each) for each in by_macos(device).items())
    return replace(convert(device, DeviceSummary, from_attributes=True), by_macos=budgets or UNSET)


def _components(sized: SizedModel, workload: Workload, figures: MemoryFigures) -> Components:
    footprint, kv, runtime_model = sized.footprint, figures.kv, sized.runtime_model
    drafted = draft_figures(sized, workload)
    weights, _ = runtime_model.basis("weights", workload)
    # What a runtime refuses to load is still counted in the files.
    if refusal_of(sized) and footprint.loaded_bytes + footprint.unloaded_bytes == footprint.nbytes:
        weights = "exact" if sized.checkpoint.tensors is not None else weights
    cached = _basis(sized, runtime_model.basis("cache", workload)[0])
    workspace, error_percent = sized.runtime_model.basis("workspace", workload)
    return Components(
        weights=Weights(
            bytes=footprint.nbytes,
            basis=weights if weights == "exact" else _basis(sized, weights),
            by_part=footprint.by_part,
            loaded_bytes=loaded_weights(runtime_model).loaded_bytes,
            resident_bytes=sized.resident_bytes,
            kept_by_part=dict(loaded_weights(runtime_model).by_part or ()) or UNSET,
        ),
        kv=KV(
            bytes=kv.nbytes,
            basis=cached,
            held_bytes=kv.held_bytes,
            bytes_per_token=kv.bytes_per_token,
            held_tokens=kv.held_tokens,
            allocated_tokens=kv.allocated_tokens,
        ),
        ssm=Component(figures.ssm_bytes, cached),
        workspace=Workspace(
            figures.moment.workspace_bytes, _basis(sized, workspace), error_percent
        ),
        margin=Component(sized.margin_bytes, "exact"),
        draft=Component(drafted.nbytes, drafted.basis) if drafted else None,
    )


def _files(sized: SizedModel, workload: Workload, need: Need) -> Iterator[FileChoice]:
    """The models of the repository; all but their weights is that of the one that was opened."""
    rest = need.peak_bytes - sized.resident_bytes
    is_divided = bool(_memories(sized, workload))
    for choice in sized.checkpoint.choices:
        is_this = choice.reference == sized.checkpoint.id
        needed = replace(need, peak_bytes=rest + choice.nbytes)
        chosen = need if is_this else needed
        known = is_this or not is_divided
        yield FileChoice(
            name=choice.reference,
            label=choice.label,
            weights_bytes=choice.nbytes,
            needed_bytes=chosen.peak_bytes if known else None,
            verdict=judge(chosen, sized.device)[0] if known else "unknown",
        )


def _basis(sized: SizedModel, basis: Basis) -> Basis:
    """What a figure rests on, where the model type may be assumed: headers are still exact."""
    return "assumed" if sized.checkpoint.assumed_from else basis


def _assumptions(sized: SizedModel, workload: Workload) -> Iterator[str]:
    figures = sized.figures_for(workload)
    yield from sized.runtime_model.statements(workload, figures).assumptions
    yield from _batch(sized, workload)
    if drafted := draft_figures(sized, workload):
        yield (
            f"the draft model proposes {sized.draft_tokens} tokens in each step"
            if drafted.basis != "bound"
            else "the draft model's own peak is added: how the runtime drafts is not described"
        )


def _batch(sized: SizedModel, workload: Workload) -> Iterator[str]:
    rows = decoding_rows(sized.runtime_model, workload)
    if is_grouped(sized.runtime_model, workload):
        yield (
            f"{workload.batch} sequences of equal length: {workload.prefill_batch} are prefilled"
            f" together, at most {rows} decode together"
        )
    elif workload.batch > 1:
        yield f"{workload.batch} sequences of equal length run together"


def _notes(sized: SizedModel, workload: Workload) -> Iterator[Note]:
    checkpoint, model = sized.checkpoint, sized.model
    yield from assumption_notes(sized)
    yield from sized.footprint.notes
    yield from sized.notes
    if checkpoint.meaning:
        yield Note("info", "name", checkpoint.meaning)
    for warning in checkpoint.warnings:
        yield Note("warning", "checkpoint", warning)
    for left in checkpoint.skipped_files:
        text = f"{left.name} ({open_size(left.nbytes)}) is not counted: {left.reason}"
        yield Note("info", "left-out", text)
    for text in model.notes:
        yield Note("info", "model", text)
    if loaded_weights(sized.runtime_model).unloaded_bytes:
        size = open_size(loaded_weights(sized.runtime_model).unloaded_bytes)
        text = f"{size} of the checkpoint are not loaded by {sized.runtime}"
        yield Note("info", "not-loaded", text)
    is_on_mlx = sized.runtime_model.facet(OnMlx) is not None
    if not sized.draft and is_on_mlx and predicts_more(checkpoint.config):
        is_able = sized.runtime_model.facet(HeadDrafting)
        drafts = f" without {setting('draft')}" if is_able else ""
        text = f"MTP layers, which the config declares, are not loaded by {sized.runtime}{drafts}"
        yield Note("info", "no-mtp", text)
    yield from workload_notes(sized, workload)
    if sized.draft and _pool(sized, workload):
        text = (
            f"what {sized.runtime} takes for a draft model besides its weights is not described:"
            " its pool is an upper bound"
        )
        yield Note("warning", "draft-pool", text)
    figures = sized.figures_for(workload)
    yield from sized.runtime_model.statements(workload, figures).notes
    yield from ending_notes(run_limits(sized, workload))
    yield from held_note(peak_of(sized, workload), held_of(sized, workload))
    if sized.device:
        yield from _device_notes(sized.device, figures)


def _device_notes(device: Device, figures: MemoryFigures) -> Iterator[Note]:
    largest, moment = device.max_buffer_bytes, figures.moment
    if largest is not None and moment.largest_buffer_bytes > largest:
        text = (
            f"one allocation, {moment.largest_buffer}, takes"
            f" {open_size(moment.largest_buffer_bytes)}, above"
            f" {open_limit(largest)}, the largest the device gives"
        )
        yield Note("warning", "max-buffer", text)
    if device.note:
        yield Note("info", "device", device.note)


def limit_notes(most: int | None, tokens: int) -> Iterator[Note]:
    """Yield a warning when a sequence is longer than the model's own limit."""
    if most and tokens > most:
        text = f"{tokens} tokens exceed the model's own limit {most}"
        yield Note("warning", "beyond-context", text)


ALONE = "a request alone: "


def notes_on_versions(sized: SizedModel, workload: Workload, *, of: str) -> tuple[Note, ...]:
    """Return where another version of MLX needs another amount, where rules are missing, and what
    may end the run.

    ``of`` says what the workload is of a plan.
    """
    every = sized.runtime_model.statements(workload, sized.figures_for(workload)).notes
    codes = ("mlx-version", "mlx-verdict", "newer-version")
    notes = (replace(note, message=of + note.message) for note in every if note.code in codes)
    ending = ending_notes(run_limits(sized, workload), of=of)
    return both_units((*notes, *ending))


def assumption_notes(sized: SizedModel) -> Iterator[Note]:
    """Yield that the architecture is assumed, where it is."""
    if sized.checkpoint.assumed_from:
        text = (
            f"{sized.checkpoint.assumed_from} is sized as {sized.model.model_type}: an assumption"
            " that nothing has checked"
        )
        yield Note("warning", "assumed-type", text)


def workload_notes(sized: SizedModel, workload: Workload) -> Iterator[Note]:
    """Yield what the reader must know of a model under this workload."""
    model = sized.model
    yield from limit_notes(model.max_context, workload.total_tokens)
    if workload.max_kv_size and model.makes_own_cache:
        text = f"mlx-lm ignores max_kv_size for {model.model_type}: the class makes its own cache"
        yield Note("warning", "max-kv-size", text)
    if workload.kv_bits and not runs_kv_bits(sized.runtime_model, workload):
        if workload.batch > 1:
            text = (
                f"{sized.runtime} quantises no cache of a batch: mlx_lm.server with --kv-bits"
                " answers one request at a time"
            )
            yield Note("warning", "kv-batch", text)
        else:
            text = f"{sized.runtime} quantises no cache of {model.model_type}: KV bits do nothing"
            yield Note("warning", "kv-bits", text)
    if workload.kv_bits and workload.total_tokens < workload.quantized_kv_start:
        text = (
            f"the cache stays unquantised: mlx-lm quantises it from"
            f" {workload.quantized_kv_start} tokens on"
        )
        yield Note("warning", "kv-start", text)
