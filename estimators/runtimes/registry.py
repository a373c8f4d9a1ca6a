"""Runtimes by name; a runtime's module is imported when it is needed."""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from msgspec.structs import replace

from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.nearest import nearest
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.mlx.versions import (
    OLDEST_MLX_VLM,
    Version,
    format_version,
    installed_version,
)
from memfit.estimators.results.estimate import RuntimeSummary
from memfit.estimators.runtimes.facets import BoundByTrace, Images, MlxLmPrograms, OnMlx
from memfit.estimators.runtimes.runtime import Runtime

# The command line imports what sizes a model while the Hub answers.
if TYPE_CHECKING:
    from memfit.estimators.runtimes.interface import RuntimeModel, Subject

_CLASSES: dict[str, tuple[str, str]] = {
    "mlx-lm": ("mlx_lm", "MlxLm"),
    "mlx-swift-lm": ("mlx_swift_lm", "MlxSwiftLm"),
    "mlx-vlm": ("mlx_vlm", "MlxVlm"),
    "lm-studio": ("lm_studio", "LmStudio"),
    "mlx-moe": ("mlx_moe", "MlxMoe"),
    "agent-memory": ("agent_memory", "AgentMemory"),
    "zinc": ("zinc.runtime", "Zinc"),
    "foundry": ("foundry", "Foundry"),
    "llama.cpp": ("llama_cpp.runtime", "LlamaCpp"),
    "ollama": ("ollama", "Ollama"),
    "vllm": ("vllm.runtime", "Vllm"),
}
# Those that describe a model by its own class.
_BY_CLASS = {
    "mlx-lm": ("mlx_lm_trace", "MlxLmTrace"),
    "mlx-vlm": ("mlx_vlm_trace", "MlxVlmTrace"),
}
DEFAULT_RUNTIME = "mlx-lm"
# Where a checkpoint is sized for no other runtime: the first that loads it.
_NATIVE = (DEFAULT_RUNTIME, "mlx-vlm", "llama.cpp")
_FOR_IMAGES = "mlx-vlm"


def runtime_names() -> tuple[str, ...]:
    """Return the names of all runtimes in their order."""
    return tuple(_CLASSES)


def get_runtime(name: str, environ: Mapping[str, str] | None = None) -> Runtime:
    """Return the runtime of that name, with the settings it takes from an environment.

    Raises:
        InputError: when there is none of that name, or it cannot read a variable.

    >>> get_runtime("mlx-lm").kv_step
    256
    """
    if name not in _CLASSES:
        near = nearest(name, _CLASSES)
        known = f"nearest: {near}" if near else f"there is {', '.join(_CLASSES)}"
        raise InputError(f"no runtime is called {name[:60]!r}; {known} (memfit runtimes)")
    return _class(name).defaults.configured(environ or {})


def list_runtimes() -> tuple[Runtime, ...]:
    """Return every runtime in their order."""
    return tuple(map(get_runtime, _CLASSES))


def native_runtime(checkpoint: Checkpoint) -> Runtime:
    """Return the runtime that a checkpoint is for as it is."""
    *others, last = _NATIVE
    for name in others:
        try:
            _class(name).loads(checkpoint)
        except UnsupportedError:
            continue
        return get_runtime(name)
    return get_runtime(last)


def runtime_for_images(native: Runtime) -> Runtime:
    """Return the runtime that a prompt with images is sized for where none is named.

    It is on the same MLX; a runtime that does not run on MLX stays.
    """
    if offers(native, Images) or not offers(native, OnMlx):
        return native
    return with_versions(get_runtime(_FOR_IMAGES), mlx=native.versions.mlx)


def runtime_summary(runtime: Runtime) -> RuntimeSummary:
    """Return what a result says of a runtime."""
    mlx = format_version(runtime.versions.mlx) if offers(runtime, OnMlx) else UNSET
    return RuntimeSummary(runtime.name, runtime.version, mlx)


def with_versions(
    runtime: Runtime,
    *,
    mlx: Version | None = None,
    mlx_lm: Version | None = None,
    mlx_vlm: Version | None = None,
    strict: bool = True,
) -> Runtime:
    """Return a runtime on other versions of MLX, mlx-lm and mlx-vlm; None leaves one as it is.

    Without ``strict`` a version of what it does not run on is left out.

    Raises:
        InputError: when there is such a version.
        UnsupportedError: for mlx-vlm older than the oldest whose rules are described.
    """
    on_mlx, by_mlx_lm = offers(runtime, OnMlx), offers(runtime, MlxLmPrograms)
    by_mlx_vlm = bool(runtime.mlx_vlm_version)
    for name, version, runs in (
        ("MLX", mlx, on_mlx),
        ("mlx-lm", mlx_lm, by_mlx_lm),
        ("mlx-vlm", mlx_vlm, by_mlx_vlm),
    ):
        if strict and version and not runs:
            raise InputError(f"{runtime.name} is not run by {name}: it has no version of it")
    if mlx and on_mlx:
        runtime = replace(runtime, mlx_version=mlx)
    if mlx_lm and by_mlx_lm:
        runtime = replace(runtime, version=format_version(mlx_lm), mlx_lm_version=mlx_lm)
    if mlx_vlm and by_mlx_vlm:
        if mlx_vlm < OLDEST_MLX_VLM:
            oldest = format_version(OLDEST_MLX_VLM)
            text = f"mlx-vlm {format_version(mlx_vlm)}: its rules are described from {oldest} on"
            raise UnsupportedError(text)
        runtime = replace(runtime, version=format_version(mlx_vlm), mlx_vlm_version=mlx_vlm)
    return runtime


def as_installed(runtime: Runtime) -> Runtime:
    """Return a runtime on the versions of MLX and mlx-lm that are installed here."""
    mlx, mlx_lm = installed_version("mlx"), installed_version("mlx-lm")
    return with_versions(runtime, mlx=mlx, mlx_lm=mlx_lm, strict=False)


def bind(runtime: Runtime, subject: "Subject") -> "RuntimeModel":
    """Return a model under a runtime with its settings.

    Raises:
        UnsupportedError: when the runtime cannot load or run it.
    """
    kind = _class(runtime.name)
    if issubclass(kind, BoundByTrace) and kind.needs_trace(subject):
        by_class: RuntimeModel = class_of(runtime).by_trace(runtime, subject)
        return by_class
    return kind.bound(runtime, subject)


def class_of(runtime: Runtime) -> type[Any]:
    """Return what describes a model by its own class for a runtime."""
    kind: type[Any] = _imported(*_BY_CLASS[runtime.name])
    return kind


def offers(runtime: Runtime, facet: type) -> bool:
    """Whether a runtime has a facet, for any model."""
    return issubclass(_class(runtime.name), facet)


def _class(name: str) -> "type[RuntimeModel]":
    kind: type[RuntimeModel] = _imported(*_CLASSES[name])
    return kind


def _imported(module: str, name: str) -> Any:
    return getattr(import_module(f"memfit.estimators.runtimes.{module}"), name)
