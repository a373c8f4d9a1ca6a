"""mlx-lm's load_model, with each of its failures as an error of one line."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memfit.estimators.base.errors import CheckpointError, MachineError, UnsupportedError
from memfit.estimators.base.files import printable
from memfit.estimators.checkpoint.config import CONFIG, read_model_config
from memfit.estimators.trace.model_builder import class_errors

# MLX's messages for a failed allocation: backend/{metal,cuda}/allocator.cpp, and Metal itself.
_NO_MEMORY = ("[metal::malloc]", "[malloc]", "Unable to allocate", "Insufficient Memory")
# Functions of mlx-lm and MLX that handle a checkpoint's tensors. Errors raised elsewhere are about
# its config.
_OF_WEIGHTS = {"sanitize", "load_weights", "infer_quant_config", "_quantize"}
_READING = ("[load", "[safetensor")
_UNEXPECTED = re.compile(r"Received (\d+) parameters not in model: \s*([^,\s]+?)[,.]?(?:\s|$)")
_MISSING = re.compile(r"Missing (\d+) parameters: \s*([^,\s]+?)[,.]?(?:\s|$)")
_SHAPE = re.compile(r"Expected shape (\(.*?\)) but received shape (\(.*?\)) for parameter (\S+)")


def load_model(path: Path, *, lazy: bool = False) -> tuple[Any, dict[str, Any]]:
    """Return the model and its config; code of a model repository is never run.

    With ``lazy`` a weight is read when it is first used.

    Raises:
        CheckpointError: when there are no weights, or they do not match the config.
        UnsupportedError: when mlx-lm has no class for the model, or it brings its own code.
        MachineError: when there is not enough memory.
    """
    name = printable(path / CONFIG)
    config = codeless_config(path)
    from mlx_lm.utils import load_model as load

    with class_errors(name, config), weight_errors(path), memory_errors():
        _require_class(name, config)
        model, config = load(path, lazy=lazy, strict=True, trust_remote_code=False)
    return model, config


def _require_class(name: str, config: dict[str, Any]) -> None:
    from mlx_lm.utils import _get_classes

    try:
        _get_classes(config)
    except ValueError:
        kind = printable(config.get("model_type"))
        raise UnsupportedError(f"{name}: model_type {kind}: mlx-lm has no class for it") from None


def codeless_config(path: Path) -> dict[str, Any]:
    """Return the config of a model that does not bring its own code.

    Raises:
        UnsupportedError: when it does.
    """
    config = read_model_config(path / CONFIG)
    if config.get("model_file") is not None:
        raise UnsupportedError(
            f"{printable(path / CONFIG)}: model_file: the model brings its own code, which memfit"
            " never runs"
        )
    return config


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn MLX's exceptions for a failed allocation into a MachineError."""
    try:
        yield
    except MemoryError as error:
        raise MachineError(f"out of memory: {one_line(error) or 'an allocation failed'}") from None
    except (RuntimeError, ValueError) as error:
        if not any(mark in str(error) for mark in _NO_MEMORY):
            raise
        raise MachineError(f"out of memory: {one_line(error)}") from None


@contextmanager
def weight_errors(path: Path) -> Iterator[None]:
    """Turn a loader's exception about weights that do not match into a CheckpointError."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{printable(path)}: {one_line(error)}") from None
    except Exception as error:
        if not _is_about_weights(error):
            raise
        raise CheckpointError(f"{printable(path)}: {_mismatch(error)}") from None


def _is_about_weights(error: Exception) -> bool:
    traceback = error.__traceback__
    while traceback:
        if traceback.tb_frame.f_code.co_name in _OF_WEIGHTS:
            return True
        traceback = traceback.tb_next
    return str(error).startswith(_READING)


def _mismatch(error: Exception) -> str:
    text = str(error)
    if text.startswith(_READING):
        return f"the weights cannot be read: {one_line(error)}"
    if found := _SHAPE.search(text):
        wanted, got, name = found.groups()
        wrong = f"tensor {printable(name)} has shape {got}, the config expects {wanted}"
    elif found := _UNEXPECTED.search(text):
        wrong = f"the config has no tensor {printable(found[2])}{_others(found[1])}"
    elif found := _MISSING.search(text):
        wrong = f"tensor {printable(found[2])} is missing{_others(found[1])}"
    elif isinstance(error, KeyError):
        wrong = f"tensor {printable(next(iter(error.args), '?'))} is missing"
    else:
        wrong = f"{type(error).__name__}: {one_line(error)}"
    return f"{wrong}; config and weights do not match"


def _others(count: str) -> str:
    return f" (and {int(count) - 1} more)" if count != "1" else ""


def one_line(error: BaseException, view: Path | None = None, path: Path | None = None) -> str:
    """Return an exception's message as one printable line, with ``path`` in place of ``view``."""
    text = str(error).replace(str(view), str(path)) if view else str(error)
    return printable(" ".join(text.split()))
