"""What is known of a runtime: its defaults, its budget and where its rules were read."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.quantities import Count, NonEmpty, Positive, Tokens
from memfit.estimators.base.setting_names import setting
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.versions import MLX_LM_VERSION, MLX_VERSION, MlxVersions
from memfit.estimators.results.growth import Growth
from memfit.estimators.results.result import Result

Charges = Literal["its own caches", "attention layers", "every layer"]
Limited = Literal["working_set", "working_set_for_cache", "memory", "cache"]


# The runtimes of settings that are not llama.cpp's.
_OWNERS = {"kv_cache_dtype": "vllm", "gpu_memory_utilization": "vllm", "capacity": "mlx-moe"}


class Budget(Struct, frozen=True):
    """The memory that a runtime gives itself."""

    of: Limited
    """The memory the share is of, and whether it is for everything or for the cache alone."""
    share: Count = 100
    """Percent of that memory."""
    bytes: Positive | None = None
    """A fixed size, in place of a share."""

    def of_device(self, device: Device) -> int:
        """Return the budget in bytes."""
        if self.bytes is not None:
            return self.bytes
        whole = device.memory_bytes if self.of == "memory" else device.working_set_bytes
        return whole * self.share // 100

    @property
    def is_taken(self) -> bool:
        """Whether the runtime takes it in any case, and leaves the rest free."""
        return self.of == "memory"

    @property
    def for_cache(self) -> bool:
        """Whether it limits the cache alone."""
        return self.of in ("cache", "working_set_for_cache")

    @property
    def is_limit(self) -> bool:
        """Whether nothing runs above it.

        A share of the working set ends no run: mlx-lm warns above its own, mlx-moe chooses experts
        by it and zinc a context. All of them run up to the whole.
        """
        return self.of != "working_set"


class MemoryShare(Budget, frozen=True):
    """A share of the memory that need not be a whole number of percent."""

    percent: Fraction = Fraction(100)

    def of_device(self, device: Device) -> int:
        return int(device.memory_bytes * self.percent // 100)


class Runtime(Struct, frozen=True, kw_only=True):
    """A runtime with its settings; all counts are tokens."""

    name: str
    version: str
    """The version or commit its rules were read in."""
    prefill_step: Positive
    """Tokens computed at once: a chunk of mlx-lm, a micro-batch of llama.cpp."""
    kv_step: Count
    """What the capacity of a cache is a multiple of."""
    kv_group_size: Count
    quantized_kv_start: Tokens
    growth: Growth
    """How a cache gets room for more tokens (runtimes/growth.py)."""
    charges: Charges
    """The layers that it keeps a cache for."""
    budget: Budget
    keeps: str
    """What it keeps in which memory, in words."""
    allocates: str
    """How it allocates its cache, in words."""
    source: str
    mlx_version: tuple[Count, ...] = ()
    """Empty for a runtime without MLX, and where it is not known."""
    mlx_lm_version: tuple[Count, ...] = ()
    """Of the classes that it runs; empty where it is not known."""
    batch: Count = 0
    """Tokens of a batch, which has several micro-batches; 0 where there is no such thing."""
    kv_bits: Positive | None = None
    """The bits of its cache unless others are set."""
    cache_dtype: Literal["F16", "F32"] | None = None
    """The element type of its cache; None for that of the activations."""
    kv_initial: Count = 0
    """The first capacity of a cache that doubles."""
    least_prefill_step: Count = 0
    context_step: Count = 1
    """What the context that it chooses by itself is a multiple of."""
    shares_prefix: bool = False
    """Whether sessions with the same beginning share its full pages."""
    max_context: Positive | None = None
    """A limit that the runtime was set to."""
    faults: tuple[str, ...] = ()
    """What is wrong in its own answers; memfit shows its answer and the right one."""

    def configured(self, environ: Mapping[str, str]) -> "Runtime":
        """Return the runtime with the settings it takes from an environment.

        Raises:
            InputError: when it cannot read a variable.
        """
        return self

    def on(self, device: Device | None) -> "Runtime":
        """Return the runtime with the defaults that it has on a device."""
        return self

    def with_setting(self, name: str, value: Any) -> "Runtime":
        """Return the runtime with a setting of its own, from a value or a text.

        Raises:
            InputError: when it has no such setting, or the value cannot be read.
        """
        if name == "gpu_memory_utilization" and self.budget.of == "memory":
            return replace(self, budget=MemoryShare("memory", int(value), None, value))
        if name == "batch_size":
            raise InputError(
                f"sequences at once are {setting('batch')}, tokens computed at once"
                f" {setting('prefill_step')}"
            )
        runtime, owner = setting("runtime"), _OWNERS.get(name, "llama.cpp")
        other = f", or {setting('kv_bits')} 8" if name == "kv_cache_dtype" else ""
        raise InputError(
            f"{self.name} has no such setting; give {runtime} {owner}, which has it{other}"
        )

    @property
    def versions(self) -> MlxVersions:
        """The versions of MLX and mlx-lm with the rules that it follows."""
        return MlxVersions(self.mlx_version or MLX_VERSION, self.mlx_lm_version or MLX_LM_VERSION)


class RuntimeTable(Result, frozen=True, kw_only=True, tag="memfit.runtimes/2"):
    """The answer of ``memfit runtimes``."""

    runtimes: NonEmpty[Runtime]
