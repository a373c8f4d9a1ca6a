"""Which settings of a config a class reads, and which of them change no graph."""

import random
from collections.abc import Hashable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from memfit.estimators.base.errors import MemfitError
from memfit.estimators.base.workload import Workload
from memfit.estimators.recording.classes import ClassPlan
from memfit.estimators.recording.draws import signature
from memfit.estimators.trace.isolation import tracing
from memfit.estimators.trace.kernel_stubs import TraceTarget, library_for
from memfit.estimators.trace.traced_model import TracedModel

# The packing is known from the weights.
_OF_FORMAT = frozenset({"model_type", "quantization", "quantization_config"})
_WORKLOAD = Workload(prompt_tokens=600, max_tokens=3, prefill_step=256)
# A class can have a branch for each of these.
_TRIED = (0.5, 1, 2, 1000)


def class_settings(plan: ClassPlan) -> dict[str, Any]:
    """Return the settings that a class reads, each with what it takes where a config has none."""
    name = str(plan.base["model_type"])
    with tracing():
        module = library_for("metal").load(f"mlx_lm.models.{plan.module or name}")
    return {
        field.name: None if field.default is MISSING else field.default
        for field in fields(module.ModelArgs)
        if field.name not in _OF_FORMAT
    }


def ignored_settings(plan: ClassPlan, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the numbers among the settings that no graph depends on, where they are positive."""
    config = plan.draw(random.Random(1), packed=False).config
    sized = plan.names()
    known = _graphs(config)
    return tuple(
        name
        for name, value in config.items()
        if name in settings
        and name not in sized
        and type(value) in (int, float)
        and all(_is_same(config, name, type(value)(each), known) for each in _TRIED)
    )


def _is_same(config: Mapping[str, Any], name: str, value: Any, known: Hashable) -> bool:
    try:
        return _graphs({**config, name: value}) == known
    except MemfitError:
        return False


def _graphs(config: Mapping[str, Any]) -> Hashable:
    trace, _ = TracedModel(config, "metal").record(_WORKLOAD, TraceTarget())
    shapes = tuple(tuple(array.shape for array in call.arrays) for call in trace.calls)
    return tuple(map(signature, trace.calls)), shapes, tuple(sorted(trace.weights.items()))
