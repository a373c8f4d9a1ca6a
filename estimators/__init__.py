"""The public names of the estimators; each is imported when it is first used (PEP 562).

>>> from memfit.estimators import Workload
>>> Workload(prompt_tokens=32768).total_tokens
32768
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memfit.estimators.base.errors import (
        CheckpointError,
        ConfigError,
        InputError,
        MachineError,
        MemfitError,
        PolicyError,
        UnreachableError,
        UnsupportedError,
    )
    from memfit.estimators.base.quantization import Quantization
    from memfit.estimators.base.units import Units
    from memfit.estimators.base.workload import Workload
    from memfit.estimators.checkpoint.manifest import Checkpoint
    from memfit.estimators.checkpoint.opening import open_checkpoint
    from memfit.estimators.machine.device import Device
    from memfit.estimators.machine.devices import find_device, memory_device
    from memfit.estimators.machine.host import detect_host
    from memfit.estimators.results.estimate import Estimate
    from memfit.estimators.runtimes.registry import get_runtime
    from memfit.estimators.runtimes.runtime import Runtime
    from memfit.estimators.sizing.catalog import Catalog
    from memfit.estimators.sizing.estimate import estimate
    from memfit.estimators.sizing.opening import size
    from memfit.estimators.sizing.sized_model import SizedModel

_MODULES = {
    "base.errors": (
        *("CheckpointError", "ConfigError", "InputError", "MachineError", "MemfitError"),
        *("PolicyError", "UnreachableError", "UnsupportedError"),
    ),
    "base.quantization": ("Quantization",),
    "base.units": ("Units",),
    "base.workload": ("Workload",),
    "checkpoint.manifest": ("Checkpoint",),
    "checkpoint.opening": ("open_checkpoint",),
    "machine.device": ("Device",),
    "machine.devices": ("find_device", "memory_device"),
    "machine.host": ("detect_host",),
    "results.estimate": ("Estimate",),
    "runtimes.registry": ("get_runtime",),
    "runtimes.runtime": ("Runtime",),
    "sizing.catalog": ("Catalog",),
    "sizing.estimate": ("estimate",),
    "sizing.opening": ("size",),
    "sizing.sized_model": ("SizedModel",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Catalog",
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "Device",
    "Estimate",
    "InputError",
    "MachineError",
    "MemfitError",
    "PolicyError",
    "Quantization",
    "Runtime",
    "SizedModel",
    "Units",
    "UnreachableError",
    "UnsupportedError",
    "Workload",
    "detect_host",
    "estimate",
    "find_device",
    "get_runtime",
    "memory_device",
    "open_checkpoint",
    "size",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
