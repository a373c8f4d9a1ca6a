"""A model of mlx-lm built from its config, as it would be loaded, without computing anything.

With headers, mlx-lm's own load_model builds it: it gets arrays of the headers' shapes in place of
files, so that ``sanitize``, quantisation and checks are mlx-lm's own.
"""

import copy
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from memfit.estimators.arch.registry import row_or_default
from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.errors import MemfitError, UnsupportedError
from memfit.estimators.base.files import printable
from memfit.estimators.base.ranks import Rank
from memfit.estimators.checkpoint.adapters import MLX_WEIGHTS, Adapter
from memfit.estimators.checkpoint.manifest import Tensor
from memfit.estimators.trace.declared_format import PACKS_ITSELF, quantize_as_declared
from memfit.estimators.trace.isolation import is_from_signal_handler
from memfit.estimators.trace.libraries import PrivateLibrary, changed, public_names
from memfit.estimators.trace.ranks import share
from memfit.estimators.weights.conversion import conversion_type
from memfit.estimators.weights.sanitize import ties_head

MAX_MODULES = 20_000

# The types of safetensors and what MLX loads them as. Source: mlx/io/safetensors.cpp.
_LOADED_AS = {
    "BOOL": "bool_",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "C64": "complex64",
    "F8_E4M3": "uint8",
    "F8_E8M0": "uint8",
    "F4": "uint8",
}


def build(
    library: PrivateLibrary,
    config: Mapping[str, Any],
    name: str,
    *,
    dtype: str,
    arrays: dict[str, Any] | None = None,
    quantize: Quantization | None = None,
    adapter: Adapter | None = None,
    rank: Rank | None = None,
) -> Any:
    """Return the model, loaded from ``arrays`` or, without them, cast to ``dtype``.

    ``quantize`` then converts it as mlx_lm.convert would, and ``adapter`` adds its layers.
    Of several ranks, one has its ``rank``'s part of it.
    ``name`` is the name of the config in messages. Call it inside `tracing`.

    Raises:
        UnsupportedError: when mlx-lm has no such class, or the class rejects config or tensors.
    """
    reject_own_code(config, name)
    if quantize and (kind := config.get("model_type")) in PACKS_ITSELF:
        raise UnsupportedError(f"{name}: {kind}: mlx_lm.convert cannot quantise packed weights")
    nn = library.load("mlx.nn")
    with class_errors(name, config), few_modules(nn, config, name):
        utils = library.load("mlx_lm.utils")
        settings = settings_of(utils, config)
        if arrays is not None:
            model = loaded(utils, settings, arrays)
        else:
            model = _made(utils, settings, dtype)
            quantize_as_declared(nn, model, settings)
        if quantize:
            if arrays is not None:
                cast_for_conversion(model, config)
            model, _ = utils.quantize_model(
                model, {}, quantize.group_size, quantize.bits, mode=quantize.mode
            )
        if quantize or arrays is None:  # else load_model has called it
            model.eval()
        share(model, rank)
    # mlx-lm itself does not load PEFT's layout: memfit counts its bytes alone.
    if adapter and adapter.weight_file == MLX_WEIGHTS:
        with class_errors(adapter.id, config):
            _attach(library.load("mlx_lm.tuner.utils"), model, adapter)
    return model


def reject_own_code(config: Mapping[str, Any], name: str) -> None:
    """Check that the config has a class of the library.

    Raises:
        UnsupportedError: when the config names a file with code.
    """
    if config.get("model_file") is not None:
        raise UnsupportedError(
            f"{name}: model_file: the model brings its own code, which memfit never runs"
        )


def _attach(tuner: Any, model: Any, adapter: Adapter) -> None:
    """Add an adapter as mlx-lm's tuner/utils.py, load_adapters, does from its files."""
    from mlx.utils import tree_flatten

    kind, settings = adapter.config.get("fine_tune_type", "lora"), adapter.config
    if kind != "full":
        tuner.linear_to_lora_layers(
            model, settings["num_layers"], settings["lora_parameters"], use_dora=kind == "dora"
        )
    flat: Any = tree_flatten(model.parameters())
    known = {path: array.shape for path, array in flat}
    for tensor in adapter.tensors:
        if known.get(tensor.name) != tensor.shape:
            raise UnsupportedError(
                f"{adapter.id}: {printable(tensor.name)}: the model has no such parameter, or one"
                " of another shape; is it the model that the adapter was trained on?"
            )
    model.load_weights(list(arrays_of(adapter.tensors).items()), strict=False)
    model.eval()


def settings_of(utils: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config as mlx-lm's load_config reads it; classes change it."""
    settings = copy.deepcopy(dict(config))
    # The first builds of mlx-lm 0.32 decode no tagged floats.
    decode: Callable[[dict[str, Any]], dict[str, Any]] | None
    decode = getattr(utils, "_decode_tagged_floats", None)
    return decode(settings) if decode else settings


@contextmanager
def class_errors(
    name: str, config: Mapping[str, Any], by: str = "mlx-lm", *, batch: int = 1
) -> Iterator[None]:
    """Turn any error of a model class inside the block into one line that names the class.

    What a signal handler raises passes as it is.
    ``batch`` is how many sequences it runs there.
    """
    try:
        yield
    except MemfitError:
        raise
    except (Exception, SystemExit) as error:
        if is_from_signal_handler(error):  # a time limit of the program that uses memfit
            raise
        where = _where(error, config, by)
        if batch > 1:
            name += f": {by}'s class fails on a batch of {batch} sequences"
        raise UnsupportedError(f"{name}: {where}: {_what(error, batch)}") from None


def _where(error: BaseException, config: Mapping[str, Any], by: str) -> str:
    place = f"{by}'s class for model_type {str(config.get('model_type'))[:40]!r}"
    traceback = error.__traceback__
    # The innermost frame of a class is the one that names the mistake best.
    while traceback:
        module = public_names(str(traceback.tb_frame.f_globals.get("__name__", "")))
        if module.startswith(("mlx_lm.models.", "mlx_vlm.models.")):
            names = traceback.tb_frame.f_locals
            owner = names.get("cls", type(names["self"]) if "self" in names else None)
            place = public_names(f"{owner.__module__}.{owner.__qualname__}") if owner else module
        traceback = traceback.tb_next
    return place


def _what(error: BaseException, batch: int) -> str:
    text = printable(textwrap.shorten(public_names(str(error)), 200, placeholder=" …"))
    if isinstance(error, AttributeError) and text.endswith("has no attribute 'Model'"):
        return "mlx-lm has no such class"
    # Of a recorded call, and of one that is not: its thread has no stream.
    if "Attempting to eval an array" in text or "There is no Stream" in text:
        # Caches of a batch have an array of offsets.
        return (
            "it takes one position for all sequences, as a number, and a batch has one for each"
            if batch > 1
            else "it computes with the values of arrays, which a trace does not have"
        )
    if isinstance(error, NotImplementedError) and "Quantization" in text:
        return f"--kv-bits: {text}; leave it out for this model"
    if isinstance(error, SystemExit):
        return "ends the program at import, as when a package it needs is not installed"
    if isinstance(error, KeyError):
        return f"needs the key {text}"
    if missing := re.search(r"missing \d+ required .*?: (.*)", text):
        return f"needs the keys {missing[1]}" if "," in missing[1] else f"needs {missing[1]}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _reject_many_layers(config: Mapping[str, Any], name: str) -> None:
    """Reject what `few_modules` would see too late: classes first list something per layer."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            _reject_many_layers(value, name)
        elif key.endswith(("layer", "layers")) and isinstance(value, int) and value > MAX_MODULES:
            raise _too_many_modules(name)


def _too_many_modules(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name}: num_hidden_layers and similar keys make more than {MAX_MODULES} modules;"
        " a trace builds no larger model"
    )


@contextmanager
def few_modules(nn: Any, config: Mapping[str, Any], name: str) -> Iterator[None]:
    """Stop a class that builds more than ``MAX_MODULES`` modules."""
    _reject_many_layers(config, name)
    # Every module calls it, whatever its class.
    original = nn.Module.__init__
    made = 0

    def counted(module: Any) -> None:
        nonlocal made
        made += 1
        if made > MAX_MODULES:
            raise _too_many_modules(name)
        original(module)

    with changed(nn, {"Module.__init__": counted}):
        yield


def arrays_of(tensors: Iterable[Tensor]) -> dict[str, Any]:
    """Return an array for each tensor of a header, which is not computed."""
    return {tensor.name: _array(tensor) for tensor in tensors}


def loaded(utils: Any, config: dict[str, Any], arrays: dict[str, Any]) -> Any:
    """Return what a library's load_model makes of ``arrays``, in place of those in files."""
    # load_model finds these names in its own module, so they can be replaced there.
    reads = "_load_safetensors" if hasattr(utils, "_load_safetensors") else "mx.load"
    given = {
        "load_config": lambda *_, **__: config,
        "glob": SimpleNamespace(glob=lambda _: ["the headers"]),
        reads: lambda _: arrays,
    }
    with changed(utils, given):
        # No file can exist at this path.
        # lazy: parameters are not evaluated, so the arrays never take memory.
        result = utils.load_model(Path(os.devnull), lazy=True)
    # mlx-lm returns the config too.
    return result[0] if isinstance(result, tuple) else result


def _array(tensor: Tensor) -> Any:
    import mlx.core as mx

    loaded_as = _LOADED_AS.get(tensor.dtype)
    if loaded_as is None:
        raise UnsupportedError(f"tensor {tensor.name[:80]}: MLX does not load {tensor.dtype}")
    # Not computed until it is evaluated, which a trace never does.
    return mx.zeros(tensor.shape, getattr(mx, loaded_as))


def _made(utils: Any, config: dict[str, Any], dtype: str) -> Any:
    model_class, args_class = utils._get_classes(config)
    model = model_class(args_class.from_dict(config))
    cast = cast_parameters(model, dtype)
    if row_or_default(config["model_type"]).own_head and ties_head(config):
        model.sanitize({path: array for path, array in cast if "lm_head" not in path})
    return model


def cast_for_conversion(model: Any, config: Mapping[str, Any]) -> None:
    """Cast a loaded model's parameters, as mlx_lm.convert and mlx_vlm.convert do first."""
    if dtype := conversion_type(config):
        cast_parameters(model, dtype)


def cast_parameters(model: Any, dtype: str) -> list[tuple[str, Any]]:
    """Convert a model's floating-point parameters to ``dtype``, and return these by path."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    wanted = getattr(mx, _LOADED_AS[dtype])
    # Some classes keep parameters in their own type (mlx-lm and mlx-vlm convert.py).
    is_cast = getattr(model, "cast_predicate", lambda _: True)
    flat: Any = tree_flatten(model.parameters())
    cast = [
        (path, array.astype(wanted))
        for path, array in flat
        if mx.issubdtype(array.dtype, mx.floating) and is_cast(path)
    ]
    # Not strict: integer parameters are not among them.
    model.load_weights(cast, strict=False)
    return cast
