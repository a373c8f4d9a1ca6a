"""The keyword arguments of the library: the options of ``memfit estimate``, under their names."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args, get_type_hints

from msgspec import ValidationError, convert
from msgspec.structs import fields, replace

from memfit.cli.options.estimate import EstimatedModel, EstimateRuntime
from memfit.cli.options.groups import OptionGroup
from memfit.cli.options.ranks import RankedMachine
from memfit.cli.options.workload import WorkloadOptions
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.sizing.workload import RUNTIME_DEFAULTS, PartialWorkload

if TYPE_CHECKING:
    from memfit.estimators.machine.working_set import OsRegime
    from memfit.estimators.sizing.ranks import Ranks

    Place = tuple[Device | None, Ranks | None]
    Prompted = str | PathLike[str] | Sequence[str | PathLike[str]] | None

GROUPS = (EstimatedModel, EstimateRuntime, RankedMachine, WorkloadOptions)
_OPTION = re.compile(r"--(?:no-)?([a-z][a-z-]*)")


class OpenSettings(TypedDict, total=False):
    """Settings of `memfit.open`; one that is None or not given is as on the command line."""

    quantize: int | str | None
    group_size: int | None
    quant_mode: str | None
    adapter: str | PathLike[str] | None
    draft: str | None
    draft_quantize: int | str | None
    num_draft_tokens: int | None
    as_type: str | None
    mmproj: str | PathLike[str] | None
    runtime: str | None
    method: Literal["auto", "formula", "trace"] | None
    margin: int | str | None
    mlx_version: str | None
    mlx_lm_version: str | None
    gpu_memory_utilization: float | str | None
    cache_type: str | None
    cache_type_k: str | None
    cache_type_v: str | None
    flash_attn: bool | None
    gpu_layers: int | str | None
    n_cpu_moe: int | str | None
    host_memory: int | str | None
    host_bandwidth: int | str | None
    capacity: int | str | None


class MachineSettings(TypedDict, total=False):
    """Settings of `OpenModel.on`."""

    memory: int | str | None
    working_set: int | str | None
    os_regime: "OsRegime | str | None"
    ranks: int | None
    parallel: Literal["tensor", "pipeline"] | None
    split: str | Sequence[int] | None
    hosts: str | PathLike[str] | None


class WorkloadSettings(TypedDict, total=False):
    """Settings of `OpenModel.at`."""

    prompt_tokens: int | str | None
    max_tokens: int | str | None
    batch: int | None
    prefill_batch: int | None
    decode_batch: int | None
    prefill_step: int | None
    kv_bits: int | None
    kv_group_size: int | None
    quantized_kv_start: int | None
    max_kv_size: int | None
    image: "Prompted"
    video: "Prompted"


class EstimateSettings(OpenSettings, MachineSettings, WorkloadSettings, total=False):
    """Settings of `memfit.estimate`: those of the other three."""


def opening(
    model: str | PathLike[str], settings: Mapping[str, Any]
) -> tuple[EstimatedModel, EstimateRuntime]:
    """Return a model and settings as the options that open it.

    Raises:
        InputError: when a setting has the wrong type.
    """
    options, runtime = _read(settings, EstimatedModel, EstimateRuntime)
    return replace(options, model=_reference(model)), runtime


def place(device: str | Device | None, settings: Mapping[str, Any]) -> "Place":
    """Return the machine and the ranks; without settings the machine is this one if it has a GPU.

    Raises:
        InputError: when it is unknown, or more than one is named.
    """
    if isinstance(device, Device):
        _require_none(settings, "device")
        return device, None
    (options,) = _read({"device": device, **settings}, RankedMachine)
    with keywords_in_errors():
        return options.chosen(), options.over()


def workload(context: str | int | Workload | None, settings: Mapping[str, Any]) -> PartialWorkload:
    """Return a prompt and settings, or a whole workload.

    Raises:
        InputError: when a value cannot be read or is out of range.
    """
    if isinstance(context, Workload):
        _require_none(settings, "workload")
        return PartialWorkload(context, frozenset(RUNTIME_DEFAULTS))
    (options,) = _read({"context": context, **settings}, WorkloadOptions)
    with keywords_in_errors():
        asked: PartialWorkload = options.partial()
    return asked


def parts(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the settings of `memfit.estimate` as those of `open`, `on` and `at`.

    One that is unknown is left to `open`, which rejects it.
    """
    others = (MachineSettings.__annotations__, WorkloadSettings.__annotations__)
    machine, workload = (
        {name: value for name, value in settings.items() if name in names} for names in others
    )
    rest = {name: settings[name] for name in settings.keys() - machine.keys() - workload.keys()}
    return rest, machine, workload


@contextmanager
def keywords_in_errors() -> Iterator[None]:
    """Name the keyword where an error names the option of the command line."""
    try:
        yield
    except InputError as error:
        if type(error) is not InputError:
            raise
        raise InputError(as_keywords(str(error))) from None


def as_keywords(text: str) -> str:
    """Return a text with the keywords in place of the options.

    >>> as_keywords("--kv-bits: expected a number")
    'kv_bits: expected a number'
    """
    return _OPTION.sub(lambda option: option[1].replace("-", "_"), text)


def _require_none(settings: Mapping[str, Any], kind: str) -> None:
    given = [name for name, value in settings.items() if value is not None]
    if given:
        raise InputError(f"a whole {kind} excludes {', '.join(given)}")


def _read(settings: Mapping[str, Any], *groups: type[OptionGroup]) -> Iterator[Any]:
    """Yield the settings as options, which have the defaults of the command line."""
    known = {f.name for group in groups for f in fields(group) if f.name not in group.pasted}
    for name in settings.keys() - known:
        nearest = get_close_matches(name, EstimateSettings.__annotations__, 1)
        raise TypeError(f"no setting {name!r}" + "".join(f", but {each!r}" for each in nearest))
    for group in groups:
        values = {
            name: _text(settings[name], hint)
            for name, hint in get_type_hints(group).items()
            if settings.get(name) is not None
        }
        try:
            yield convert(values, group, dec_hook=lambda kind, value: kind(value))
        except ValidationError as error:
            text, _, place = str(error).rstrip("`").partition(" - at `$.")
            raise InputError(f"{place}: {text}") from None


def _reference(model: str | PathLike[str]) -> str:
    """The text that names a model; a path is never a name on the Hub."""
    text = os.fsdecode(model)
    if isinstance(model, str) or os.path.isabs(text):
        return text
    return os.path.join(os.curdir, text)


def _text(value: Any, hint: Any) -> Any:
    """Numbers as text, for an option that reads counts such as 32k, or several of them.

    One value is enough for an option that can be repeated.
    """
    if list[str] in get_args(hint):
        several = value if isinstance(value, list | tuple) else [value]
        return [os.fsdecode(each) if isinstance(each, PathLike) else each for each in several]
    is_text = hint is str or str in get_args(hint)
    if not is_text or isinstance(value, bool):
        return value
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value) if isinstance(value, int | float) else value
