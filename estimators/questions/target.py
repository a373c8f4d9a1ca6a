"""What is to run, and on what: the model, its runtime, and one machine or several ranks."""

import os
import sys
from collections.abc import Iterable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from msgspec import Struct
from msgspec.structs import force_setattr

from memfit.estimators.base.dtypes import Quantization, converted, parse_format
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import short
from memfit.estimators.base.ranks import MAX_RANKS, Parallel
from memfit.estimators.base.reading.section import memory_value, number_or_text, one_of
from memfit.estimators.base.setting_names import setting
from memfit.estimators.base.units import parse_share, parse_size
from memfit.estimators.machine.device import (
    DEFAULT_REGIME,
    Device,
    OsRegime,
    as_it_is_now,
    with_reserve,
)
from memfit.estimators.mlx.versions import Version, parse_version
from memfit.estimators.questions.question import (
    Integer,
    PathSetting,
    Question,
    Text,
    each,
    flag,
    integer,
    read_setting,
    text,
)
from memfit.estimators.runtimes.registry import (
    DEFAULT_RUNTIME,
    as_installed,
    get_runtime,
    with_versions,
)
from memfit.estimators.runtimes.runtime import Runtime
from memfit.estimators.runtimes.source import MethodSetting

DRAFT_TOKENS = 3  # mlx_lm/generate.py and server.py, --num-draft-tokens
MOST_DRAFT_TOKENS = 64


class Draft(Struct, frozen=True):
    """A draft model for speculative decoding."""

    reference: str
    quantize: Quantization | None = None
    tokens: int | None = None
    """Tokens that it proposes in each step; None: as many as the program takes by default."""


def model_reference(model: str | os.PathLike[str]) -> str:
    """Return the text that names a model; a path is never a name on the Hub.

    Raises:
        InputError: when it is neither.
    """
    if not isinstance(model, str | bytes | os.PathLike):
        raise InputError(f"expected a name or a path, got {short(model)}")
    name = os.fsdecode(model)
    return name if isinstance(model, str) or os.path.isabs(name) else os.path.join(os.curdir, name)


Format = Annotated[
    tuple[int, str] | None, number_or_text(parse_format, lambda bits: (bits, "affine"))
]
"""Bits and mode."""


class ModelQuestion(Question, frozen=True, kw_only=True):
    """A model, its conversion, and what is loaded with it."""

    model: Annotated[str | None, model_reference] = None
    quantize: Format = None
    group_size: Integer = None
    quant_mode: Text = None
    adapter: PathSetting = None
    draft: Text = None
    draft_quantize: Format = None
    num_draft_tokens: Integer = None
    as_type: Text = None
    mmproj: PathSetting = None

    def reference(self) -> str:
        """Return what names the model.

        Raises:
            InputError: when it is not named.
        """
        if self.model is None:
            name = setting("model")
            raise InputError(f"{name} is missing; name a directory, a file, or org/name on the Hub")
        return self.model

    def quantization(self) -> Quantization | None:
        """Return the conversion, None for the model as it is.

        Raises:
            InputError: for a format that MLX does not have, or a group size or mode without bits.
        """
        quantize, quant_mode = setting("quantize"), setting("quant_mode")
        if self.quantize is None:
            if self.group_size is not None or self.quant_mode is not None:
                size = setting("group_size")
                raise InputError(f"{size} and {quant_mode} need {quantize} BITS")
            return None
        bits, mode = self.quantize
        if self.quant_mode not in (None, mode) and mode != "affine":
            raise InputError(f"{quantize} {mode} and {quant_mode} {self.quant_mode}: give one")
        return converted(bits, self.group_size, self.quant_mode or mode)

    def drafting(self) -> Draft | None:
        """Return the draft model with its settings, None without one.

        Raises:
            InputError: for bits that MLX does not have, bits without a draft model, or a number
                of tokens that is out of range.
        """
        tokens = self.num_draft_tokens
        if tokens is not None and not 1 <= tokens <= MOST_DRAFT_TOKENS:
            name = setting("num_draft_tokens")
            raise InputError(f"{name} {tokens}: give from 1 to {MOST_DRAFT_TOKENS}")
        if self.draft is None:
            if self.draft_quantize is not None:
                raise InputError(f"{setting('draft_quantize')} needs {setting('draft')} MODEL")
            return None
        bits, mode = self.draft_quantize or (None, "affine")
        quantize = None if bits is None else converted(bits, mode=mode)
        return Draft(self.draft, quantize, tokens)


# Kept free above the peak unless another margin is given: for what a system allocates meanwhile.
MARGIN_BYTES = 64_000_000
OWN_SETTINGS = tuple(
    (
        "gpu_memory_utilization capacity cache_type cache_type_k cache_type_v flash_attn gpu_layers"
        " n_cpu_moe batch_size kv_unified swa_full all_logits host_memory host_bandwidth"
        " kv_cache_dtype max_requests mtp_tokens cpu_moe override_tensor kv_offload mmproj_offload"
    ).split()
)
"""Settings that one runtime has, which reads them itself."""
_ON_BY_DEFAULT = ("flash_attn", "kv_offload", "mmproj_offload")


def _version(value: Any) -> Version:
    return parse_version(text(value))


def _share(value: Any) -> Fraction:
    """The percent of a share, a number as it is written in decimals."""
    return parse_share(repr(value) if type(value) in (int, float) else text(value))


VersionSetting = Annotated[Version | None, _version]
OwnSetting = Annotated[str | int | None, number_or_text(str)]
"""A setting that one runtime has, which reads it."""


class RuntimeQuestion(Question, frozen=True, kw_only=True):
    """A runtime; without a name it is the native one of the checkpoint."""

    runtime: Text = None
    method: Annotated[MethodSetting, one_of(("auto", "formula", "trace"))] = "auto"
    margin: Annotated[int, number_or_text(parse_size)] = MARGIN_BYTES
    """Bytes to keep free above the peak."""
    mlx_version: VersionSetting = None
    mlx_lm_version: VersionSetting = None
    mlx_vlm_version: VersionSetting = None
    """It names the runtime mlx-vlm too."""
    gpu_memory_utilization: Annotated[Fraction | None, _share] = None
    """Percent of the GPU's memory."""
    capacity: OwnSetting = None
    cache_type: Text = None
    cache_type_k: Text = None
    cache_type_v: Text = None
    flash_attn: Annotated[bool, flag] = True
    kv_unified: Annotated[bool, flag] = False
    swa_full: Annotated[bool, flag] = False
    all_logits: Annotated[bool, flag] = False
    gpu_layers: OwnSetting = None
    n_cpu_moe: OwnSetting = None
    batch_size: OwnSetting = None
    host_memory: OwnSetting = None
    host_bandwidth: OwnSetting = None
    kv_cache_dtype: Text = None
    max_requests: Integer = None
    mtp_tokens: Integer = None
    cpu_moe: Annotated[bool, flag] = False
    override_tensor: Text = None
    kv_offload: Annotated[bool, flag] = True
    mmproj_offload: Annotated[bool, flag] = True

    def __post_init__(self) -> None:
        if self.mlx_vlm_version is not None and self.runtime is None:
            force_setattr(self, "runtime", "mlx-vlm")

    @property
    def names_versions(self) -> bool:
        """Whether a version is given."""
        return (self.mlx_version, self.mlx_lm_version, self.mlx_vlm_version) != (None, None, None)

    @property
    def is_stated(self) -> bool:
        """Whether a setting names the runtime or limits which it may be."""
        named = self.runtime is not None or self.gpu_memory_utilization is not None
        return named or self.names_versions

    def chosen(self) -> Runtime:
        """Return the named runtime with its settings, else mlx-lm.

        Raises:
            InputError: as `named_runtime`, or for a setting that is wrong or not the runtime's.
        """
        runtime = self.versioned(named_runtime(self.runtime or DEFAULT_RUNTIME))
        return self.with_settings(
            runtime, OWN_SETTINGS if self.runtime is not None else OWN_SETTINGS[:2]
        )

    def versioned(self, runtime: Runtime, *, strict: bool = True) -> Runtime:
        """Return a runtime on the given versions, else on those installed on a Mac.

        Versions of what it does not run on are refused, or without ``strict`` left out.

        Raises:
            InputError: when the runtime does not run on MLX.
        """
        if self.names_versions:
            return with_versions(
                runtime,
                mlx=self.mlx_version,
                mlx_lm=self.mlx_lm_version,
                mlx_vlm=self.mlx_vlm_version,
                strict=strict,
            )
        return as_installed(runtime) if sys.platform == "darwin" else runtime

    def with_settings(self, runtime: Runtime, names: Iterable[str] = OWN_SETTINGS) -> Runtime:
        """Return a runtime with the settings of its own that were given.

        Raises:
            InputError: when it has no such setting, or the value cannot be read.
        """
        for name in names:
            value = getattr(self, name)
            # A switch that is as without it says nothing of the runtime.
            if value is not None and value is not (name in _ON_BY_DEFAULT):
                runtime = read_setting(name, partial(runtime.with_setting, name), value)
        return runtime


def named_runtime(name: str) -> Runtime:
    """Return the runtime of a name, with the settings it takes from the environment.

    Raises:
        InputError: when there is no such runtime, or it cannot read a variable.
    """
    return get_runtime(name, os.environ)


class Ranks(Struct, frozen=True):
    """How many processes run a model together, how, and where."""

    size: int
    parallel: Parallel | None = None
    """None: as mlx-lm's sharded_load chooses."""
    split: tuple[int, ...] | None = None
    """Layers of each rank; None: as mlx-lm's programs split them."""
    devices: tuple[Device | None, ...] = ()
    """One for each rank; empty: all on the model's."""

    def __post_init__(self) -> None:
        name = setting("ranks")
        if not 1 <= self.size <= MAX_RANKS:
            raise InputError(f"{name} {self.size}: give from 1 to {MAX_RANKS}")
        if self.devices and len(self.devices) != self.size:
            raise InputError(f"{name} {self.size}: {len(self.devices)} devices are named")

    def device(self, index: int, default: Device | None) -> Device | None:
        return self.devices[index] if self.devices else default


def _layers(written: Any) -> tuple[int, ...]:
    if isinstance(written, list | tuple) and written:
        return tuple(map(integer, written))
    try:
        return tuple(int(part) for part in text(written).split(","))
    except ValueError:
        raise InputError(
            f"{written[:40]!r}: write the layers of each rank, such as 20,12"
        ) from None


def _regime(value: Any) -> OsRegime:
    return OsRegime(one_of(tuple(OsRegime))(value))


# What says more of a machine, and what names it.
_OF_A_MACHINE = {"reserve": ("device", "memory"), "gpu_cores": ("device",)}


class MachineQuestion(Question, frozen=True, kw_only=True):
    """A machine, or one for each rank; ``device`` and ``memory`` have several for ranks."""

    device: Annotated[tuple[str, ...], each(text, ",")] = ()
    memory: Annotated[tuple[int, ...], each(memory_value, ",")] = ()
    """Bytes."""
    working_set: Annotated[int | None, number_or_text(parse_size)] = None
    """Bytes."""
    reserve: Annotated[int | None, number_or_text(parse_size)] = None
    """Bytes of the memory that the system and other programs need; None: the working set leaves
    enough."""
    os_regime: Annotated[OsRegime, _regime] = DEFAULT_REGIME
    ranks: Integer = None
    parallel: Annotated[Parallel | None, one_of(("tensor", "pipeline"))] = None
    split: Annotated[tuple[int, ...] | None, _layers] = None
    hosts: PathSetting = None
    gpu_cores: Integer = None

    @property
    def is_named(self) -> bool:
        """Whether a setting names a machine."""
        return bool(self.device or self.memory or self.working_set is not None)

    def machine(self) -> Device | None:
        """Return the machine; where none is named this one, if it has a GPU.

        Raises:
            InputError: when the machine is unknown, or more than one is named.
        """
        device = self._machine()
        if device is None:
            for name, needed in _OF_A_MACHINE.items():
                if getattr(self, name) is not None:
                    raise InputError(f"{setting(name)} needs {' or '.join(map(setting, needed))}")
        return device

    def _machine(self) -> Device | None:
        from memfit.estimators.machine.devices import working_set_device

        self._require_one_name()
        if len(self.device) > 1 or len(self.memory) > 1:
            name = setting("device" if self.device else "memory")
            raise InputError(f"{name}: give one machine, several are for ranks only")
        if self.memory:
            return self._with_memory(self.memory[0])
        if self.working_set is not None:
            if self.reserve is not None:
                raise InputError(f"{setting('reserve')} is of a machine's memory: give that")
            return self._adjusted(working_set_device(self.working_set))
        if self.device:
            return self.named(self.device[0])
        from memfit.estimators.machine.host import detect_host

        host = detect_host()
        return self._adjusted(host) if host and host.backend != "cpu" else None

    def first_machine(self) -> Device | None:
        """Return the machine, of several ranks that of the first.

        Raises:
            InputError: when a machine is unknown, or settings contradict each other.
        """
        devices = self.machines()
        return devices[0] if devices else self.machine()

    def machines(self) -> tuple[Device | None, ...]:
        """Return a machine for each rank, nothing where at most one is named.

        Raises:
            InputError: as `first_machine`.
        """
        if self.hosts is not None:
            return self._of_hosts(self.hosts)
        if len(self.device) > 1 or len(self.memory) > 1:
            self._require_one_name()
            return (*map(self.named, self.device), *map(self._with_memory, self.memory))
        return ()

    def over(self) -> Ranks | None:
        """Return the ranks, None where no setting names any.

        Raises:
            InputError: as `first_machine`, or for ranks that are out of range.
        """
        devices = self.machines()
        size = len(devices or self.split or ()) if self.ranks is None else self.ranks
        if self.ranks is None and not size:
            if self.parallel:
                raise InputError(f"{setting('parallel')} needs {setting('ranks')} N")
            return None
        return Ranks(size, self.parallel, self.split, devices)

    def named(self, name: str) -> Device:
        """Return the machine with a name; ``host`` is this machine with what is free of it now.

        Raises:
            InputError: when no machine has that name, or this one's memory cannot be read.
        """
        return self._adjusted(self._found(name))

    def _found(self, name: str) -> Device:
        from memfit.estimators.machine.devices import find_device

        if name != "host":
            return find_device(name, os_regime=self.os_regime)
        from memfit.estimators.machine.host import detect_host

        host = detect_host()
        if host is None:
            raise InputError(
                "host: this machine's memory could not be read; name a device or a memory size"
            )
        return as_it_is_now(host)

    def _adjusted(self, device: Device) -> Device:
        """A machine without its reserve, with the cores of its GPU."""
        if self.reserve is not None:
            device = with_reserve(device, self.reserve)
        if self.gpu_cores is None:
            return device
        from memfit.estimators.machine.chips import with_gpu_cores

        return with_gpu_cores(device, self.gpu_cores)

    def _require_one_name(self) -> None:
        if bool(self.device) + bool(self.memory) + (self.working_set is not None) > 1:
            *names, last = map(setting, ("device", "memory", "working_set"))
            raise InputError(f"{', '.join(names)} and {last} each name a device: give only one")

    def _with_memory(self, memory_bytes: int) -> Device:
        from memfit.estimators.machine.devices import memory_device

        return self._adjusted(memory_device(memory_bytes, os_regime=self.os_regime))

    def _of_hosts(self, path: Path) -> tuple[Device | None, ...]:
        from memfit.estimators.machine.hosts import read_hosts

        hosts = read_hosts(path, find_device=self._found, os_regime=self.os_regime)
        default = self.machine() if self.is_named else None
        if default is None and (bare := next((h for h in hosts if h.device is None), None)):
            raise InputError(
                f"{path}: host {bare.name[:60]!r} has no device and no memory; add"
                f' "memory": "128GB", or give {setting("device")} for all'
            )
        return tuple(self._adjusted(host.device) if host.device else default for host in hosts)
