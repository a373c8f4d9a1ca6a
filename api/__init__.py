"""Size a language model before it is loaded; everything here is imported when it is used.

>>> import memfit
>>> answer = memfit.estimate("qwen3-4b-4bit", device="m4-max-64", context="32k")
>>> answer.fits, answer.peak_bytes
(True, 7752890368)
"""

TYPE_CHECKING = False  # `typing` takes longer to import than everything here
if TYPE_CHECKING:
    from typing import Any

    from memfit.answers import compare, fits, guard, plan_server
    from memfit.estimators.base.errors import (
        CheckpointError,
        ConfigError,
        InputError,
        MachineError,
        MemfitError,
        UnreachableError,
        UnsupportedError,
    )
    from memfit.estimators.base.progress import Progress
    from memfit.estimators.base.units import Units
    from memfit.estimators.base.version import __version__
    from memfit.estimators.base.workload import Workload
    from memfit.estimators.machine.device import Device
    from memfit.estimators.results.estimate import Estimate
    from memfit.measuring import tune
    from memfit.model import OpenModel, estimate, open

_MODULES = {
    "answers": ("compare", "fits", "guard", "plan_server"),
    "estimators.base.errors": (
        *("CheckpointError", "ConfigError", "InputError", "MachineError", "MemfitError"),
        *("UnreachableError", "UnsupportedError"),
    ),
    "estimators.base.progress": ("Progress",),
    "estimators.base.units": ("Units",),
    "estimators.base.version": ("__version__",),
    "estimators.base.workload": ("Workload",),
    "estimators.machine.device": ("Device",),
    "estimators.results.estimate": ("Estimate",),
    "measuring": ("tune",),
    "model": ("OpenModel", "estimate", "open"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Device",
    "Estimate",
    "InputError",
    "MachineError",
    "MemfitError",
    "OpenModel",
    "Progress",
    "Units",
    "UnreachableError",
    "UnsupportedError",
    "Workload",
    "__version__",
    "compare",
    "estimate",
    "fits",
    "guard",
    "open",
    "plan_server",
    "tune",
]


def __getattr__(name: str) -> "Any":
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
