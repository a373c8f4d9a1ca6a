"""One trace of one workload, by a model that is built for it alone."""

from collections.abc import Mapping
from typing import Any

from memfit.estimators.base.workload import Workload
from memfit.estimators.trace.graph_format import Trace
from memfit.estimators.trace.kernel_stubs import TraceTarget
from memfit.estimators.trace.traced_model import TracedModel, TracedShapes


def trace_shapes(config: Mapping[str, Any], workload: Workload, **options: Any) -> TracedShapes:
    """Return the bytes of weights, caches and states at the end of the workload."""
    return TracedModel(config, "metal", **options).shapes(workload)


def record(
    config: Mapping[str, Any], workload: Workload, *, target: TraceTarget, **options: Any
) -> Trace:
    """Return the graphs of a workload's calls as ``target`` would build them."""
    return TracedModel(config, target.backend, **options).record(workload, target)[0]
