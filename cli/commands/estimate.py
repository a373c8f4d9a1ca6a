"""``memfit estimate``: the memory that a model needs, and whether it fits."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from msgspec.structs import replace

from memfit.cli.exits import Exit
from memfit.cli.options.groups import OptionGroup, grouped
from memfit.cli.options.machine import MachineOptions
from memfit.cli.options.model import ModelOptions
from memfit.cli.options.output import FORMAT, OutputOptions
from memfit.cli.options.runtime import ServedRuntime
from memfit.cli.options.workload import WorkloadOptions
from memfit.cli.progress import reporting
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.progress import Progress
from memfit.estimators.base.quantization import converted
from memfit.estimators.base.units import Units
from memfit.estimators.base.workload import Workload
from memfit.estimators.sizing.workload import DRAFT_TOKENS

if TYPE_CHECKING:
    from memfit.estimators.sizing.catalog import Catalog, Draft
    from memfit.estimators.sizing.sized_model import SizedModel

SAMPLE = "qwen3-4b-4bit.yaml"


class EstimatedModel(ModelOptions, frozen=True, kw_only=True):
    """The model, and what is loaded with it."""

    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A directory, a .safetensors or .gguf file, a config.json, a sample .yaml, or"
            " org/name on the Hub. Default: a built-in sample.",
            show_default=False,
        ),
    ] = None
    adapter: Annotated[
        Path | None, typer.Option(help="Include the LoRA adapter in this directory.")
    ] = None
    draft: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Include this draft model.")
    ] = None
    draft_quantize: Annotated[
        int | None,
        typer.Option(metavar="BITS", help="Size the draft model as mlx_lm.convert quantises it."),
    ] = None
    num_draft_tokens: Annotated[
        int, typer.Option(min=1, max=64, help="Tokens that the draft model proposes in a step.")
    ] = DRAFT_TOKENS

    mmproj: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Include this vision projector of a GGUF model."),
    ] = None

    def drafting(self) -> "Draft | None":
        """Return the draft model of --draft with its settings.

        Raises:
            InputError: for bits that MLX does not have, or bits without a draft model.
        """
        from memfit.estimators.sizing.catalog import Draft

        if self.draft is None:
            if self.draft_quantize is not None:
                raise InputError("--draft-quantize needs --draft MODEL")
            return None
        bits = self.draft_quantize
        return Draft(self.draft, converted(bits) if bits else None, self.num_draft_tokens)


class EstimateRuntime(ServedRuntime, frozen=True, kw_only=True):
    """The runtime, and how its figures are computed."""

    method: Annotated[
        Literal["auto", "formula", "trace"], typer.Option(help="How to compute the figures.")
    ] = "auto"


class EstimateReport(OptionGroup, frozen=True, kw_only=True):
    """What is shown in addition to the figures."""

    explain: Annotated[
        bool, typer.Option("--explain", help="Show every formula with its numbers.")
    ] = False
    breakdown: Annotated[
        bool,
        typer.Option("--breakdown", help="Show what the peak is made of, on a small screen too."),
    ] = False
    plot: Annotated[
        bool,
        typer.Option("--plot", help="Draw memory against context; with a trace also over a run."),
    ] = False


class EstimateOutput(OutputOptions, frozen=True, kw_only=True):
    """The output of an estimate, which can be YAML."""

    format_: Annotated[Literal["table", "json", "yaml", "markdown"], FORMAT] = "table"


@grouped
def estimate(
    model: EstimatedModel,
    workload: WorkloadOptions,
    machine: MachineOptions,
    runtime: EstimateRuntime,
    report: EstimateReport,
    output: EstimateOutput,
) -> None:
    """Estimate how much memory a model needs, and whether it fits.

    If it does not fit, the result recommends settings that do.
    """
    asked = workload.partial()
    rules = runtime.chosen()
    size = _sizing(model, machine, runtime)
    with reporting(verbose=output.verbose, while_waiting=_load_library) as progress:
        catalog, reference = _opened(model, runtime, progress)
    from memfit.cli.render.views.estimate import EstimateView
    from memfit.estimators.sizing.estimate import estimate as answer
    from memfit.estimators.sizing.estimate import with_plots

    if runtime.runtime is None:
        rules = runtime.with_settings(catalog.native_runtime(reference))
    sized = size(catalog, reference, runtime=rules)
    run = asked.under(sized.runtime_model.runtime)
    sized = sized.settled(run)
    is_measurable = model.quantize is None and model.adapter is None
    if runtime.method == "auto" and is_measurable and not runtime.names_versions:
        sized = _measured(sized, run)
    result = answer(sized, run, units=output.units)
    if report.plot:
        result = with_plots(result, sized)
    if report.explain:
        result = replace(result, explanation=_explained(sized, run, output.units))
    view = EstimateView(result, output.units, breakdown=report.breakdown, verbose=output.verbose)
    output.write(view)
    raise typer.Exit(Exit.NO if result.verdict == "exceeds" else Exit.YES)


def _sizing(
    model: EstimatedModel, machine: MachineOptions, runtime: EstimateRuntime
) -> "partial[SizedModel]":
    """Return `Catalog.sized` with the options, read before anything is fetched."""
    from memfit.estimators.sizing.catalog import Catalog

    return partial(
        Catalog.sized,
        device=machine.chosen(),
        quantize=model.quantization(),
        margin_bytes=runtime.margin_bytes(),
        method=runtime.method,
        adapter=model.adapter,
        draft=model.drafting(),
    )


def _opened(
    model: EstimatedModel, runtime: EstimateRuntime, progress: Progress
) -> "tuple[Catalog, str]":
    """Open the checkpoints; return them with the reference to the model."""
    from memfit.estimators.sizing.catalog import Catalog

    catalog = Catalog(progress=progress, versioned=runtime.versioned)
    reference = _open_sample(catalog) if model.model is None else model.model
    catalog.checkpoint(reference)
    if model.mmproj is not None:
        from memfit.estimators.checkpoint.gguf.files import with_projector

        reference = catalog.add(with_projector(catalog.checkpoint(reference), model.mmproj))
    if model.draft is not None:
        catalog.checkpoint(model.draft)
    return catalog, reference


def _load_library() -> None:
    """Import the modules needed next, while the Hub answers."""
    import memfit.cli.render.views.estimate
    import memfit.estimators.sizing.estimate  # noqa: F401


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
