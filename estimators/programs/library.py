"""The classes that are recorded, one file of data each."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from msgspec.structs import replace

from memfit.estimators.arch.model import Model
from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.files import short
from memfit.estimators.machine.device import Backend
from memfit.estimators.programs.describing import described
from memfit.estimators.programs.dimensions import config_sizes
from memfit.estimators.programs.graph import RecordedClass, Variant, decoded
from memfit.estimators.programs.kinds import layer_kinds

_DATA = Path(__file__).parent / "data"
# Of the parameters that were recorded: a class may treat another type differently.
RECORDED_DTYPE = "BF16"


@lru_cache(maxsize=4)
def find(model_type: str) -> RecordedClass | None:
    """Return the data of a class, None where it is not recorded."""
    if not model_type.replace("-", "_").isidentifier():
        return None
    path = _DATA / f"{model_type}.json"
    return decoded(path.read_bytes()) if path.is_file() else None


class RecordedModel(NamedTuple):
    """A recorded class at the sizes of a config."""

    recorded: RecordedClass
    config: Mapping[str, Any]
    """With what the class takes for settings that are not in it."""
    sizes: Mapping[str, int]
    kinds: tuple[str, ...]

    def description(self) -> Model:
        """Return what formulas and plans need of the model."""
        description = self.recorded.description
        model = described(description, self.kinds, self.sizes)
        return replace(model, model_type=self.recorded.model_type)

    def variant(self, packing: Quantization | None, backend: Backend) -> Variant:
        """Return the graphs of the class on a backend, with its matrices packed or not.

        Raises:
            UnsupportedError: when none was recorded so.
        """
        if packing and packing.mode != "affine":
            raise self.unrecorded(f"quantisation mode {packing.mode}")
        facts = {"packed": packing is not None, "backend": backend}
        failed: list[str] = []
        for variant in self.recorded.variants:
            known = facts | {
                name: self.config.get(name) for name in variant.facts if name not in facts
            }
            wrong = [n for n, values in variant.facts.items() if _plain(known[n]) not in values]
            if not wrong:
                return variant
            failed += wrong
        name = failed[-1] if failed else "variant"
        raise self.unrecorded(f"{name} {short(facts.get(name, self.config.get(name)))}")

    def packed_sizes(self, packing: Quantization | None) -> dict[str, int]:
        """Return the sizes with those of the packing."""
        if packing is None:
            return dict(self.sizes)
        return {**self.sizes, "bits": packing.bits, "group_size": packing.group_size}

    def unrecorded(self, what: str) -> UnsupportedError:
        """Return the refusal of what no recording of the class has."""
        return UnsupportedError(f"the recorded graphs of {self.recorded.model_type} have no {what}")


def recorded_model(recorded: RecordedClass, config: Mapping[str, Any]) -> RecordedModel:
    """Return a class at the sizes of a config.

    Raises:
        UnsupportedError: when the config has a setting that no recording has, by its name.
    """
    settings = {**recorded.settings, **config}
    sizes = config_sizes(recorded.dims, settings)
    kinds = layer_kinds(recorded.kinds, recorded.layer_count, settings)
    model = RecordedModel(recorded, settings, sizes, kinds)
    # Some classes take sizes from it rather than from the root (muse_glimmer.py, from_dict).
    if "text_config" in config:
        raise model.unrecorded("text_config")
    for name, value in recorded.fixed.items():
        if not _is_same(value, settings.get(name)):
            raise model.unrecorded(f"{name} {short(settings.get(name))}, only {short(value)}")
    for name, known in recorded.ignored.items():
        value = settings.get(name)
        if value != known and not (_is_number(value) and value > 0):
            raise model.unrecorded(f"{name} {short(value)}")
    if not kinds or any(len(each) != len(kinds) for each in _lists(recorded, settings)):
        raise model.unrecorded(f"{len(kinds)} layers beside its lists of layers")
    missing = set(kinds) - set(recorded.description["layers"])
    if missing:
        raise model.unrecorded(f"layers of kind {short(min(missing))}")
    return model


def _lists(recorded: RecordedClass, settings: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Yield the settings that say something of each layer."""
    for kind in recorded.kinds:
        name, is_indexed, _ = kind.partition("[i]")
        if is_indexed and isinstance(settings.get(name), list):
            yield settings[name]


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _is_same(recorded: Any, value: Any) -> bool:
    """Whether a setting chooses the same branches: numbers inside of mappings choose none."""
    if isinstance(recorded, Mapping) and isinstance(value, Mapping):
        return recorded.keys() == value.keys() and all(
            (_is_number(recorded[key]) and _is_number(value[key]))
            or _is_same(recorded[key], value[key])
            for key in recorded
        )
    return type(recorded) is type(value) and bool(recorded == value)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
