"""Options of the runtime, and of the memory that it keeps free."""

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

from memfit.cli.options.completion import complete_runtime
from memfit.cli.options.groups import Option, OptionGroup, parsed
from memfit.estimators.base.units import parse_share, parse_size
from memfit.estimators.sizing.workload import MARGIN_BYTES

if TYPE_CHECKING:
    from memfit.estimators.runtimes.runtime import Runtime


class VersionOptions(OptionGroup, frozen=True, kw_only=True):
    """The versions of what runs a model."""

    panel = "Runtime options"
    mlx_version: Annotated[
        str | None,
        Option(
            metavar="VERSION",
            help="MLX that runs it, such as 0.32.0. Default: on a Mac the installed one, else the"
            " newest that is described.",
        ),
    ] = None
    mlx_lm_version: Annotated[
        str | None, Option(metavar="VERSION", help="The same for mlx-lm.")
    ] = None

    @property
    def names_versions(self) -> bool:
        """Whether an option names a version."""
        return self.mlx_version is not None or self.mlx_lm_version is not None

    def require_versions(self) -> None:
        """Check the versions before a model is known.

        Raises:
            InputError: when a value is no version.
        """
        from memfit.estimators.runtimes.registry import DEFAULT_RUNTIME, get_runtime

        self.versioned(get_runtime(DEFAULT_RUNTIME, {}))

    def versioned(self, runtime: "Runtime", *, strict: bool = True) -> "Runtime":
        """Return a runtime on the versions of the options, else on those installed on a Mac.

        Versions of what it does not run on are refused, or without ``strict`` left out.

        Raises:
            InputError: when a value is no version, or the runtime does not run on MLX.
        """
        from memfit.estimators.mlx.versions import parse_version
        from memfit.estimators.runtimes.registry import as_installed, with_versions

        if self.names_versions:
            mlx = parsed("--mlx-version", parse_version, self.mlx_version)
            mlx_lm = parsed("--mlx-lm-version", parse_version, self.mlx_lm_version)
            return with_versions(runtime, mlx=mlx, mlx_lm=mlx_lm, strict=strict)
        return as_installed(runtime) if sys.platform == "darwin" else runtime


class RuntimeOptions(VersionOptions, frozen=True, kw_only=True):
    """The runtime that runs a model."""

    runtime: Annotated[
        str | None,
        Option(
            help="Runtime to estimate for (see memfit runtimes). Default: mlx-lm, for GGUF"
            " llama.cpp.",
            show_default=False,
            autocompletion=complete_runtime,
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        str | None,
        Option(metavar="SHARE", help="Share of the GPU's memory that vllm takes. Default: 0.92."),
    ] = None
    capacity: Annotated[
        str | None, Option(metavar="N", help="Experts of each layer that mlx-moe keeps in memory.")
    ] = None
    margin: Annotated[str, Option(help="Memory to keep free above the peak.")] = (
        f"{MARGIN_BYTES // 10**6}MB"
    )

    @property
    def is_stated(self) -> bool:
        """Whether an option names the runtime or limits which it may be."""
        named = self.runtime is not None or self.gpu_memory_utilization is not None
        return named or self.names_versions

    def chosen(self) -> "Runtime":
        """Return the runtime of --runtime, else mlx-lm.

        Raises:
            InputError: as `named_runtime` and `versioned`, or for another setting that is wrong or
                not the runtime's.
        """
        from memfit.estimators.runtimes.registry import DEFAULT_RUNTIME

        runtime = self.versioned(named_runtime(self.runtime or DEFAULT_RUNTIME))
        return self.with_capacity(self.with_share(runtime))

    def with_capacity(self, runtime: "Runtime") -> "Runtime":
        """Return a runtime with the experts of --capacity, if they are given.

        Raises:
            InputError: when it is no count, or the runtime has no such setting.
        """
        setting = partial(runtime.with_setting, "--capacity")
        return parsed("--capacity", setting, self.capacity) or runtime

    def with_share(self, runtime: "Runtime") -> "Runtime":
        """Return a runtime with the share of --gpu-memory-utilization, if it is given.

        Raises:
            InputError: when it is no share, or the runtime has no such setting.
        """
        return (
            parsed(
                "--gpu-memory-utilization",
                lambda text: runtime.with_memory_share(parse_share(text)),
                self.gpu_memory_utilization,
            )
            or runtime
        )

    def margin_bytes(self) -> int:
        """Return the bytes to keep free.

        Raises:
            InputError: when the text is no size.
        """
        return parsed("--margin", parse_size, self.margin) or 0


class ServedRuntime(RuntimeOptions, frozen=True, kw_only=True):
    """The runtime with settings of its own."""

    pasted: ClassVar[tuple[str, ...]] = ("kv_cache_dtype",)
    cache_type: Annotated[
        str | None,
        Option(metavar="KEYS[,VALUES]", help="Types of llama.cpp's KV cache, such as q8_0."),
    ] = None
    cache_type_k: Annotated[
        str | None,
        Option(
            "--cache-type-k", "-ctk", metavar="TYPE", help="Type of the keys in llama.cpp's cache."
        ),
    ] = None
    cache_type_v: Annotated[
        str | None,
        Option("--cache-type-v", "-ctv", metavar="TYPE", help="Type of the values in its cache."),
    ] = None
    flash_attn: Annotated[
        bool, Option("--flash-attn/--no-flash-attn", help="Whether llama.cpp uses flash attention.")
    ] = True
    gpu_layers: Annotated[
        str | None,
        Option(
            "--gpu-layers",
            "-ngl",
            "--n-gpu-layers",
            metavar="N|auto|all",
            help="Layers that llama.cpp has on the GPU, with the head; auto: the most that fit.",
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str | None,
        Option(metavar="auto|fp8", help="Type of vllm's KV cache; for mlx-lm see --kv-bits."),
    ] = None
    n_cpu_moe: Annotated[
        str | None,
        Option(
            "--n-cpu-moe",
            "-ncmoe",
            metavar="N|all",
            help="Layers, from the first, with their experts on llama.cpp's host; or all.",
        ),
    ] = None
    host_memory: Annotated[
        str | None,
        Option(
            metavar="SIZE",
            help="Memory of the host of an NVIDIA card, such as 64GB, for what llama.cpp keeps"
            " there. Default with --device host: what there is.",
        ),
    ] = None
    host_bandwidth: Annotated[
        str | None,
        Option(
            metavar="RATE",
            help="How fast that memory is read. Default: 89.6GB/s, two channels of DDR5-5600.",
        ),
    ] = None

    def chosen(self) -> "Runtime":
        """Return the runtime of --runtime with its settings, else mlx-lm.

        Raises:
            InputError: as `named_runtime` and `with_settings`.
        """
        runtime = RuntimeOptions.chosen(self)
        return self.with_settings(runtime) if self.runtime else runtime

    def _settings(self) -> dict[str, str | None]:
        """The options that are a runtime's own, with their texts."""
        return {
            "--cache-type": self.cache_type,
            "--cache-type-k": self.cache_type_k,
            "--cache-type-v": self.cache_type_v,
            "--no-flash-attn": None if self.flash_attn else "off",
            "--gpu-layers": self.gpu_layers,
            "--n-cpu-moe": self.n_cpu_moe,
            "--host-memory": self.host_memory,
            "--host-bandwidth": self.host_bandwidth,
            "--kv-cache-dtype": self.kv_cache_dtype,
        }

    def with_settings(self, runtime: "Runtime") -> "Runtime":
        """Return a runtime with the settings that were given.

        Raises:
            InputError: when it has no such setting, or its text cannot be read.
        """
        runtime = self.with_capacity(runtime)
        for option, text in self._settings().items():
            runtime = parsed(option, partial(runtime.with_setting, option), text) or runtime
        return runtime


def named_runtime(name: str) -> "Runtime":
    """Return the runtime of a name, with the settings it takes from the environment.

    Raises:
        InputError: when there is no such runtime, or it cannot read a variable.
    """
    import os

    from memfit.estimators.runtimes.registry import get_runtime

    return get_runtime(name, os.environ)
