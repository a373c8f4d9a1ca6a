"""What a notebook shows of a result: the document that its command writes, with its charts."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from memfit.cli.render.writers.html import to_fragment
from memfit.estimators.base.units import Units
from memfit.estimators.results.result import Result

_SIZES: dict[str, Any] = {"units": Units.GB}
_PLOT: dict[str, Any] = {**_SIZES, "plot": True}
VIEWS: dict[str, tuple[str, dict[str, Any]]] = {
    "CacheTuneResult": ("tune_cache.to_document", _SIZES),
    "Comparison": ("compare.ComparisonView", {**_PLOT, "by_runtime": False}),
    "ContextPlan": ("context.to_document", {**_SIZES, "curve": ()}),
    "Estimate": ("estimate.EstimateView", _SIZES),
    "ExpertsPlan": ("experts.to_document", _PLOT),
    "ExpertsTuneResult": ("tune_experts.to_document", _PLOT),
    "Fits": ("fits.FitsView", _PLOT),
    "FleetPlan": ("plan_ranks.fleet_document", _SIZES),
    "GateReport": ("gate.GateView", {"plot": True}),
    "GrowthPlan": ("growth.to_document", _PLOT),
    "OffloadPlan": ("offload.to_document", _PLOT),
    "RankTune": ("tune_ranks.to_document", _SIZES),
    "RanksPlan": ("plan_ranks.to_document", _SIZES),
    "RequestPlan": ("request.to_document", {}),
    "ServerPlan": ("server.to_document", _PLOT),
    "StaticPlan": ("static.to_document", _PLOT),
    "TrainPlan": ("train.to_document", _PLOT),
    "TrainTuneResult": ("tune_train.to_document", _SIZES),
    "TuneResult": ("tune.TuneView", _PLOT),
    "WiredPlan": ("wired.to_document", _PLOT),
}
"""Type of a result to its view with settings; the module is imported when one is shown."""


def as_html(result: Result) -> str | None:
    """Return a result as an element with its style sheet, None for what is no answer."""
    if type(result).__name__ not in VIEWS:
        return None
    name, settings = VIEWS[type(result).__name__]
    made = view(name)(result, **settings)
    return to_fragment(made.document() if name.endswith("View") else made)


def view(name: str) -> Callable[..., Any]:
    """Return a view, or a function that makes a document."""
    module, _, attribute = name.partition(".")
    found: Callable[..., Any] = getattr(
        import_module(f"memfit.cli.render.views.{module}"), attribute
    )
    return found
