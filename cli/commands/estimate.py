"""``memfit estimate``: the memory that a model needs, and whether it fits."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memfit.cli.exits import Exit
from memfit.cli.option_values import (
    requested_device,
    requested_quantization,
    requested_runtime,
    requested_workload,
)
from memfit.cli.options import (
    DEFAULT_MARGIN,
    Batch,
    CacheType,
    ChosenRuntime,
    Context,
    DeviceName,
    Form,
    Format,
    GroupSize,
    Json,
    KVBits,
    KVGroupSize,
    Margin,
    MaxKVSize,
    MaxTokens,
    Memory,
    Method,
    Output,
    PrefillStep,
    PromptTokens,
    Quantize,
    QuantizedKVStart,
    QuantMode,
    Regime,
    ShownUnits,
    Verbose,
    WorkingSet,
    parsed,
)
from memfit.cli.progress import reporting
from memfit.cli.render.output import deliver
from memfit.estimators.base.units import Units, parse_size
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.working_set import DEFAULT_REGIME

if TYPE_CHECKING:
    from memfit.estimators.runtimes.llama_cpp.caches import CacheTypes
    from memfit.estimators.sizing.catalog import Catalog
    from memfit.estimators.sizing.sized_model import SizedModel

SAMPLE = "qwen3-4b-4bit.yaml"


def estimate(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A directory, a .safetensors or .gguf file, a config.json, a sample .yaml, or"
            " org/name on the Hub. Default: a built-in sample.",
            show_default=False,
        ),
    ] = None,
    context: Context = None,
    prompt_tokens: PromptTokens = None,
    max_tokens: MaxTokens = None,
    batch: Batch = 1,
    prefill_step: PrefillStep = None,
    kv_bits: KVBits = None,
    kv_group_size: KVGroupSize = None,
    quantized_kv_start: QuantizedKVStart = None,
    max_kv_size: MaxKVSize = None,
    cache_type: CacheType = None,
    quantize: Quantize = None,
    group_size: GroupSize = None,
    quant_mode: QuantMode = None,
    device: DeviceName = None,
    memory: Memory = None,
    working_set: WorkingSet = None,
    os_regime: Regime = DEFAULT_REGIME,
    runtime: ChosenRuntime = None,
    method: Annotated[Method, typer.Option(help="How to compute the figures.")] = Method.AUTO,
    margin: Margin = DEFAULT_MARGIN,
    adapter: Annotated[
        Path | None, typer.Option(help="Include the LoRA adapter in this directory.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Include this draft model.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show every formula with its numbers.")
    ] = False,
    plot: Annotated[
        bool,
        typer.Option("--plot", help="Draw memory against context; with a trace also over a run."),
    ] = False,
    format_: Form = Format.TABLE,
    json_: Json = False,
    output: Output = None,
    units: ShownUnits = Units.GB,
    verbose: Verbose = False,
) -> None:
    """Estimate how much memory a model needs, and whether it fits.

    If it does not fit, the result recommends settings that do.
    """
    # The library is imported here so that --help stays fast.
    from memfit.estimators.runtimes.registry import DEFAULT_RUNTIME
    from memfit.estimators.sizing.catalog import Catalog

    partial_workload = requested_workload(
        context=context,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        batch=batch,
        prefill_step=prefill_step,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
        quantized_kv_start=quantized_kv_start,
        max_kv_size=max_kv_size,
    )
    # Checked before anything is fetched, so that a bad option does not wait for it.
    rules = requested_runtime(runtime or DEFAULT_RUNTIME)
    partial_workload.under(rules)
    types = None if cache_type is None else _cache_types(cache_type)
    machine = requested_device(device, memory, working_set, os_regime)
    conversion = requested_quantization(quantize, group_size, quant_mode)
    margin_bytes = parsed("--margin", parse_size, margin) or 0
    with reporting(verbose=verbose, while_waiting=_load_library) as progress:
        catalog = Catalog(progress=progress)
        reference = _open_sample(catalog) if model is None else model
        catalog.checkpoint(reference)
        if draft is not None:
            catalog.checkpoint(draft)
    from memfit.cli.render.views.estimate import EstimateView
    from memfit.estimators.sizing.estimate import estimate as answer
    from memfit.estimators.sizing.estimate import plots

    if runtime is None:
        rules = catalog.native_runtime(reference)
    workload = partial_workload.under(rules)
    sized = catalog.sized(
        reference,
        quantize=conversion,
        device=machine,
        runtime=rules,
        method=method.value,
        adapter=adapter,
        draft=draft,
        cache_types=types,
        margin_bytes=margin_bytes,
    )
    if method is Method.AUTO and quantize is None and adapter is None:
        sized = _measured(sized, workload)
    result = answer(sized, workload, units=units)
    view = EstimateView(
        result,
        units,
        plots(sized, workload) if plot else None,
        _explained(sized, workload, units) if explain else (),
    )
    deliver(view, "json" if json_ else format_.value, output)
    raise typer.Exit(Exit.NO if result.verdict == "exceeds" else Exit.YES)


def _load_library() -> None:
    """Import the modules needed next, while the Hub answers."""
    import memfit.cli.render.views.estimate
    import memfit.estimators.sizing.estimate  # noqa: F401


def _cache_types(text: str) -> "CacheTypes | None":
    from memfit.estimators.runtimes.llama_cpp.runtime import parse_cache_types

    return parsed("--cache-type", parse_cache_types, text)


def _measured(sized: "SizedModel", workload: Workload) -> "SizedModel":
    host = sized.device
    if host is None or host.source != "detected":
        return sized
    from memfit.probes.measurement_lookup import with_measurement
    from memfit.probes.store import user_store

    return with_measurement(sized, workload, host, user_store())


def _explained(sized: "SizedModel", workload: Workload, units: Units) -> tuple[str, ...]:
    from memfit.estimators.sizing.explain import explain

    return explain(sized, workload, units)


def _open_sample(catalog: "Catalog") -> str:
    """Open the built-in sample while its file exists, and return the reference to it."""
    from importlib.resources import as_file, files

    with as_file(files("memfit.sample_configs") / SAMPLE) as path:
        catalog.checkpoint(str(path))
    return str(path)
