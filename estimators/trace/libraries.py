"""mlx-lm's model classes without mlx-lm's package: a private copy, imported lightly.

``import mlx_lm`` imports transformers, which takes longer than a whole trace. Here the package is
a bare name with a path, so that its modules import each other and nothing runs its __init__.
The copy is private because it is made with other answers from MLX (is there a Metal GPU?) than
the process has: what others import of mlx_lm and mlx.nn is not touched.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any

from memfit.estimators.base.errors import MachineError
from memfit.estimators.machine.device import Backend

# Modules that hold on to what they asked of MLX when they were imported.
_PRIVATE = ("mlx.nn", "mlx_lm")
_COPIES: dict[Backend, dict[str, ModuleType]] = {}


def versions() -> dict[str, str]:
    """Return the versions of MLX and mlx-lm that are installed.

    Raises:
        MachineError: when one of them is not.
    """
    missing = [name for name in ("mlx", "mlx_lm") if importlib.util.find_spec(name) is None]
    if missing:
        raise MachineError(
            "a trace needs MLX and mlx-lm, which are not installed here;"
            " install memfit[mlx] or use --method formula"
        )
    core = importlib.import_module("mlx.core")
    return {"mlx": core.__version__, "mlx-lm": _mlx_lm_version()}


def _mlx_lm_version() -> str:
    # importlib.metadata would read it too, and imports the parser of e-mails for it.
    spec = PathFinder.find_spec("mlx_lm._version", _bare_package().__path__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.__version__)


@contextmanager
def mlx_lm_for(backend: Backend, changes: Mapping[str, Any]) -> Iterator[None]:
    """Make ``mlx_lm`` importable as it would be on a machine of ``backend``, inside the block.

    ``changes`` are attributes of mlx.core, as `changed` takes them, in force inside the block.
    """
    kept = {name: module for name, module in sys.modules.items() if _is_private(name)}
    import mlx.core

    library = mlx
    public_nn = library.__dict__.get("nn")
    copies = _COPIES.setdefault(backend, {})
    _replace_modules(kept, copies or {"mlx_lm": _bare_package()})
    if "mlx.nn" in copies:
        library.__dict__["nn"] = copies["mlx.nn"]
    try:
        with changed(changes):
            yield
    finally:
        copies.update({n: module for n, module in sys.modules.items() if _is_private(n)})
        _replace_modules(copies, kept)
        if public_nn is None:
            library.__dict__.pop("nn", None)
        else:
            library.__dict__["nn"] = public_nn


@contextmanager
def changed(attributes: Mapping[str, Any]) -> Iterator[None]:
    """Give attributes of mlx.core, by dotted name, other values inside the block."""
    import mlx.core as mx

    owners = {name: _owner(mx, name) for name in attributes}
    before = {name: getattr(owner, name.rpartition(".")[2]) for name, owner in owners.items()}
    try:
        for name, value in attributes.items():
            setattr(owners[name], name.rpartition(".")[2], value)
        yield
    finally:
        for name, value in before.items():
            setattr(owners[name], name.rpartition(".")[2], value)


def load_utils() -> Any:
    """Return mlx_lm.utils, without the modules that it needs for downloads and tokenizers."""
    # utils.py lowers the process's own limit of open files at import.
    stubs: dict[str, Any] = {
        "huggingface_hub": SimpleNamespace(snapshot_download=None),
        "mlx_lm.tokenizer_utils": SimpleNamespace(TokenizerWrapper=None, load=None),
        "resource": SimpleNamespace(setrlimit=lambda *_: None, RLIMIT_NOFILE=None),
    }
    if "mlx_lm.utils" not in sys.modules:
        kept = {name: sys.modules[name] for name in stubs if name in sys.modules}
        sys.modules.update(stubs)
        try:
            importlib.import_module("mlx_lm.utils")
        finally:
            _replace_modules(stubs, kept)
    return sys.modules["mlx_lm.utils"]


def _is_private(name: str) -> bool:
    return name in _PRIVATE or name.startswith(tuple(f"{package}." for package in _PRIVATE))


def _bare_package() -> ModuleType:
    spec = importlib.util.find_spec("mlx_lm")
    package = ModuleType("mlx_lm")
    package.__path__ = list(spec.submodule_search_locations or ()) if spec else []
    return package


def _replace_modules(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    for name in old:
        sys.modules.pop(name, None)
    sys.modules.update(new)


def _owner(module: Any, name: str) -> Any:
    for part in name.split(".")[:-1]:
        module = getattr(module, part)
    return module
