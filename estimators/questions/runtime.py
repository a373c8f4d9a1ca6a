"""The runtime that runs a model, its versions and settings, and how figures are computed."""

import os
import sys
from collections.abc import Iterable
from fractions import Fraction
from functools import partial
from typing import Annotated, Any

from memfit.estimators.base.reading.values import number_or_text, one_of
from memfit.estimators.base.units import parse_share, parse_size
from memfit.estimators.mlx.versions import Version, parse_version
from memfit.estimators.questions.question import Question, Text, flag, read_setting, text
from memfit.estimators.runtimes.registry import (
    DEFAULT_RUNTIME,
    as_installed,
    get_runtime,
    with_versions,
)
from memfit.estimators.runtimes.runtime import Runtime
from memfit.estimators.runtimes.source import MethodSetting

# Kept free above the peak unless another margin is given: for what a system allocates meanwhile.
MARGIN_BYTES = 64_000_000
_OWN = (
    "gpu_memory_utilization capacity cache_type cache_type_k cache_type_v flash_attn gpu_layers"
    " n_cpu_moe batch_size kv_unified swa_full all_logits host_memory host_bandwidth kv_cache_dtype"
).split()
"""Settings that one runtime has, which reads them itself."""


def _version(value: Any) -> Version:
    return parse_version(text(value))


def _share(value: Any) -> Fraction:
    """The percent of a share, a float as it is written in decimals."""
    return parse_share(repr(value) if isinstance(value, float) else text(value))


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

    @property
    def names_versions(self) -> bool:
        """Whether a version is given."""
        return self.mlx_version is not None or self.mlx_lm_version is not None

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
        return self.with_settings(runtime, _OWN if self.runtime is not None else _OWN[:2])

    def versioned(self, runtime: Runtime, *, strict: bool = True) -> Runtime:
        """Return a runtime on the given versions, else on those installed on a Mac.

        Versions of what it does not run on are refused, or without ``strict`` left out.

        Raises:
            InputError: when the runtime does not run on MLX.
        """
        if self.names_versions:
            return with_versions(
                runtime, mlx=self.mlx_version, mlx_lm=self.mlx_lm_version, strict=strict
            )
        return as_installed(runtime) if sys.platform == "darwin" else runtime

    def with_settings(self, runtime: Runtime, names: Iterable[str] = _OWN) -> Runtime:
        """Return a runtime with the settings of its own that were given.

        Raises:
            InputError: when it has no such setting, or the value cannot be read.
        """
        for name in names:
            value = getattr(self, name)
            # A switch that is as without it says nothing of the runtime.
            if value is not None and value is not (name == "flash_attn"):
                runtime = read_setting(name, partial(runtime.with_setting, name), value)
        return runtime


def named_runtime(name: str) -> Runtime:
    """Return the runtime of a name, with the settings it takes from the environment.

    Raises:
        InputError: when there is no such runtime, or it cannot read a variable.
    """
    return get_runtime(name, os.environ)
