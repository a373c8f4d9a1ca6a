"""mlx-lm's model classes as on a machine of another backend, imported a second time.

``import mlx_lm`` imports transformers, which takes longer than a whole trace. Its modules also keep
what MLX answered when they were imported (is there a Metal GPU?). So a trace has a copy of the
Python modules of MLX and mlx-lm, with an ``mlx.core`` of its own. The modules that the process
has imported, and ``mlx.core`` itself, stay as they are: other threads may use them meanwhile.
"""

import builtins
import importlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec, resolve_name
from operator import attrgetter
from types import ModuleType, SimpleNamespace
from typing import Any

from memfit.estimators.base.errors import MachineError
from memfit.estimators.base.images import ImageSize
from memfit.estimators.images.families.fitting import best_resolution

_COPIED = ("mlx", "mlx_lm", "mlx_vlm")
_PREFIX = "_memfit_"
_UNUSED = (
    *("mlx_vlm.tokenizer_utils", "mlx_vlm.trainer.peft.utils", "mlx_vlm.apc"),
    *("mlx_vlm.speculative.utils", "mlx_vlm._stream_cleanup"),
)
# Packages of mlx_vlm with an __init__ that imports servers, audio and the making of images.
_BARE = ("mlx_vlm.generate", "mlx_vlm.speculative")
# What mlx-vlm uses apart from Python's own modules; for the rest it gets `Absent`: processors,
# tokenizers and downloads, which a trace has none of.
_USED = frozenset({"numpy", "tqdm"})


def versions() -> dict[str, str]:
    """Return the versions of MLX and mlx-lm that are installed.

    Raises:
        MachineError: when one of them is not.
    """
    # mlx-vlm is copied where it is installed; only prompts with images need it.
    if find_spec("mlx") is None or find_spec("mlx_lm") is None:
        raise MachineError(
            "a trace needs MLX and mlx-lm, which are not installed here; install memfit[mlx]"
        )
    core = importlib.import_module("mlx.core")
    # importlib.metadata would read it too, and imports the parser of e-mails for it.
    own_version = PrivateLibrary("versions").load("mlx_lm._version").__version__
    return {"mlx": core.__version__, "mlx-lm": str(own_version)}


def vision_versions() -> dict[str, str]:
    """Return the versions of MLX, mlx-lm and mlx-vlm that are installed.

    Raises:
        MachineError: when one of them is not.
    """
    if find_spec("mlx_vlm") is None:
        raise MachineError(
            "a trace of a prompt with images needs mlx-vlm, which is not installed here; install"
            " memfit[vlm]"
        )
    own_version = PrivateLibrary("versions").load("mlx_vlm.version").__version__
    return {**versions(), "mlx-vlm": str(own_version)}


@cache
def only_mlx_vlm_has(model_type: str) -> bool:
    """Whether mlx-vlm, as it is installed, has a class for a type of model and mlx-lm has none."""
    return _has_class("mlx_vlm", model_type) and not _has_class("mlx_lm", model_type)


def _has_class(package: str, model_type: str) -> bool:
    result = find_spec(package)
    if result is None or not result.submodule_search_locations or find_spec("mlx") is None:
        return False
    aliases = PrivateLibrary("types").load(f"{package}.utils").MODEL_REMAPPING
    folders = [f"{folder}/models" for folder in result.submodule_search_locations]
    return PathFinder.find_spec(aliases.get(model_type, model_type), folders) is not None


def public_names(text: str) -> str:
    """Return a text with the modules of a `PrivateLibrary` under their usual names.

    >>> public_names("_memfit_metal.mlx_lm.models.llama.ModelArgs")
    'mlx_lm.models.llama.ModelArgs'
    """
    return re.sub(rf"\b{_PREFIX}\w+\.", "", text)


class PrivateLibrary:
    """A copy of the Python modules of MLX and mlx-lm, imported when they are needed.

    The modules import each other and `core`, in place of what the process has imported. What they
    print is not shown. They are registered in ``sys.modules`` below ``prefix``: dataclasses look
    the module of a class up there.
    """

    core: ModuleType
    """Their ``mlx.core``: the same functions and classes, until `changed` replaces some."""

    def __init__(self, prefix: str) -> None:
        import mlx.core

        self.core = _copy(mlx.core)
        self._prefix = f"{_PREFIX}{prefix}."
        # import and print of the copied modules, without a change for any other module.
        self._builtins = {
            **vars(builtins),
            "__import__": self._import,
            "print": lambda *_, **__: None,
        }
        self._modules: dict[str, Any] = {name: _bare_package(name) for name in _COPIED}
        for name in _BARE:
            self._modules[name] = _inner_package(self._modules, name)
        # mlx_lm/utils.py needs the first two for downloads and tokenizers, which a trace has none
        # of; it lowers the process's limit of open files at import; it imports classes by name.
        self._modules |= {
            "huggingface_hub": SimpleNamespace(snapshot_download=None),
            "mlx_lm.tokenizer_utils": SimpleNamespace(
                TokenizerWrapper=None, load=None, load_tokenizer=None
            ),
            "resource": SimpleNamespace(setrlimit=lambda *_: None, RLIMIT_NOFILE=None),
            "importlib": SimpleNamespace(import_module=self._public),
            "importlib.util": SimpleNamespace(),
            "mlx.core": self.core,
            # What the trainer imports for its output, and the classes of its data.
            "mlx_lm.cli_ui": SimpleNamespace(TrainUI=Silent, rprint=lambda *_, **__: None),
            "mlx_lm.tuner.callbacks": SimpleNamespace(TrainingCallback=object),
            "mlx_lm.tuner.datasets": SimpleNamespace(CacheDataset=list),
            # What mlx-vlm imports to load a tokenizer and an adapter, and to draft tokens.
            **dict.fromkeys(_UNUSED, Absent),
            # Its warnings are about files, which a trace has none of.
            "logging": Absent,
            "transformers.image_processing_utils": _ImageProcessing,
        }
        self._modules["mlx"].core = self.core

    def load(self, name: str) -> Any:
        """Return the copy of a module of MLX or mlx-lm, by its public name.

        Raises:
            ModuleNotFoundError: when there is no such module.
        """
        if name not in self._modules:
            parent, _, last = name.rpartition(".")
            package = self.load(parent)
            if name not in self._modules:  # the package has not imported it
                setattr(package, last, self._run(name, getattr(package, "__path__", ())))
        return self._modules[name]

    @contextmanager
    def builtin(self, name: str, value: Any) -> Iterator[None]:
        """Give the modules another function of Python's own inside the block."""
        before = self._builtins[name]
        self._builtins[name] = value
        try:
            yield
        finally:
            self._builtins[name] = before

    def _public(self, name: str) -> Any:
        """Load a module by its public name, or by the one that it is registered under."""
        return self.load(name.removeprefix(self._prefix))

    def _run(self, name: str, folders: Sequence[str]) -> Any:
        # PathFinder looks in the given folders alone; sys.modules and other finders play no part.
        spec = PathFinder.find_spec(self._prefix + name, list(folders))
        if spec is None or spec.loader is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        module = module_from_spec(spec)
        # A module's own builtins are what its import statements and print() look up.
        vars(module)["__builtins__"] = self._builtins
        # Registered before it runs, as Python does: modules may import each other in a circle.
        self._modules[name] = sys.modules[spec.name] = module
        try:
            spec.loader.exec_module(module)
        # A half-made module would be returned by the next import.
        except BaseException:
            del self._modules[name], sys.modules[spec.name]
            raise
        return module

    def _import(
        self,
        name: str,
        importer: Mapping[str, Any] | None = None,
        _: Any = None,
        wanted: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        """Stand for ``__import__`` in the copied modules; the arguments are those of Python's."""
        if level and importer:
            # The spec has the prefixed name, so a relative import starts from it.
            package = importer["__package__"].removeprefix(self._prefix)
            name = resolve_name("." * level + name, package)
        top = name.partition(".")[0]
        if name not in self._modules and self._is_absent(top, importer):
            return Absent
        if name not in self._modules and top not in _COPIED:
            # Everything else is the process's own: numpy, json, and what the stubs do not replace.
            return __import__(name, importer, None, wanted or (), 0)
        module = self.load(name)
        if not wanted:
            # "import a.b" binds the name a.
            return self.load(name.partition(".")[0])
        # "from package import module" also imports the module.
        if hasattr(module, "__path__"):
            for item in wanted:
                if item != "*" and not hasattr(module, item):
                    # A stand-in is not yet an attribute of its package.
                    setattr(module, item, self.load(f"{name}.{item}"))
        return module

    def _is_absent(self, top: str, importer: Mapping[str, Any] | None) -> bool:
        """Whether a package that a module imports is none that it runs with."""
        by = str(importer["__name__"]) if importer else ""
        is_known = top in _COPIED or top in _USED or top in sys.stdlib_module_names
        return by.startswith(f"{self._prefix}mlx_vlm.") and not is_known


class _Anything(type):
    """A class that has every attribute, and every one of them is itself."""

    def __new__(cls, name: str, bases: Any, body: Any, **_: Any) -> "_Anything":
        return super().__new__(cls, name, bases, body)

    def __init__(cls, name: str, bases: Any, body: Any, **_: Any) -> None:
        super().__init__(name, bases, body)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent

    def __getitem__(cls, _: Any) -> Any:
        return Absent

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class Absent(metaclass=_Anything):
    """In place of a package and of anything in it: it is a base class, an enum or a function."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return Absent


class _ImageProcessing(Absent):
    """The one function of transformers that classes call: on the sizes of images, not on them."""

    @staticmethod
    def select_best_resolution(
        size: tuple[int, int], points: Sequence[tuple[int, int]]
    ) -> tuple[int, int]:
        """Return the height and width, of a list, that an image is resized to."""
        height, width = size
        return best_resolution(ImageSize(width, height), points)


class Silent:
    """In place of what shows a run: it can be entered, and every method does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: None


@contextmanager
def changed(owner: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Give attributes of ``owner``, by dotted name, other values inside the block."""
    # All are read before any is replaced, so that an error on the way restores every one.
    before = {name: attrgetter(name)(owner) for name in attributes}
    try:
        set_attributes(owner, attributes)
        yield
    finally:
        set_attributes(owner, before)


def set_attributes(owner: Any, attributes: Mapping[str, Any]) -> None:
    """Give attributes of ``owner``, by dotted name, other values."""
    for name, value in attributes.items():
        parent, _, last = name.rpartition(".")
        setattr(attrgetter(parent)(owner) if parent else owner, last, value)


def _copy(module: ModuleType) -> ModuleType:
    """Return a module with the same attributes; its submodules are copied too."""
    # A compiled module is loaded once in a process; another object can refer to its functions.
    copied = ModuleType(module.__name__)
    for name, value in vars(module).items():
        vars(copied)[name] = _copy(value) if isinstance(value, ModuleType) else value
    return copied


def _inner_package(modules: dict[str, Any], name: str) -> ModuleType:
    """Return a package inside another one, without what its ``__init__`` imports."""
    parent, _, last = name.rpartition(".")
    package = ModuleType(name)
    package.__path__ = [f"{folder}/{last}" for folder in modules[parent].__path__]
    setattr(modules[parent], last, package)
    return package


def _bare_package(name: str) -> ModuleType:
    """Return a package without what its ``__init__`` imports."""
    spec = find_spec(name)
    package = ModuleType(name)
    # mlx_lm/__init__.py imports generate and convert, and with them transformers.
    package.__path__ = list(spec.submodule_search_locations or ()) if spec else []
    return package
