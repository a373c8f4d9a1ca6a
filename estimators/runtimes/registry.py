"""Runtimes and the constants their memory follows from."""

from typing import Any, Literal

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.records import record
from memfit.estimators.machine.device import Device
from memfit.estimators.runtimes.data import RUNTIMES

Growth = Literal["steps", "doubling", "contiguous", "paged"]
Charges = Literal["its own caches", "attention layers", "every layer"]
Limited = Literal["working_set", "working_set_for_cache", "memory", "cache"]


@record(frozen=True, slots=True)
class Budget:
    """What a runtime gives itself: ``share`` percent of a memory, or so many bytes of cache.

    ``of`` is the memory: the device's working set or all of it, for everything or for the cache.
    """

    of: Limited
    share: int = 100
    bytes: int | None = None

    def of_device(self, device: Device) -> int:
        """Return the budget in bytes."""
        if self.bytes is not None:
            return self.bytes
        whole = device.memory_bytes if self.of == "memory" else device.working_set_bytes
        return whole * self.share // 100

    @property
    def for_cache(self) -> bool:
        """Whether only the cache is held against it."""
        return self.of in ("cache", "working_set_for_cache")


@record(frozen=True, slots=True, kw_only=True)
class Runtime:
    """A runtime as it comes; all counts are tokens. Versions are those the rules were read in.

    ``prefill_step`` is what is computed at once: a chunk of mlx-lm, a micro-batch of llama.cpp,
    whose ``batch`` holds several. ``mlx_version`` is empty for one that does not stand on MLX.
    ``kv_initial`` is the first capacity where a cache doubles. ``context_step`` and
    ``floor_tokens`` are of the context the runtime chooses by itself. ``shares_prefix`` says that
    sessions that begin alike share the full pages of what they have in common; ``max_context``
    is a limit the runtime was set to.
    """

    name: str
    version: str
    prefill_step: int
    kv_step: int
    kv_group_size: int
    quantized_kv_start: int
    growth: Growth
    charges: Charges
    budget: Budget
    keeps: str
    allocates: str
    source: str
    mlx_version: tuple[int, ...] = ()
    rotating_keep: int = 0
    batch: int = 0
    kv_bits: int | None = None
    cache_dtype: str | None = None
    kv_initial: int = 0
    least_prefill_step: int = 0
    context_step: int = 1
    floor_tokens: int = 0
    shares_prefix: bool = False
    max_context: int | None = None
    faults: tuple[str, ...] = ()


MLX_LM, LLAMA_CPP, FOUNDRY, ZINC = "mlx-lm", "llama.cpp", "foundry", "zinc"
MLX_MOE, MLX_SWIFT_LM, AGENT_MEMORY, VLLM = "mlx-moe", "mlx-swift-lm", "agent-memory", "vllm"
ON_MLX = (MLX_LM, MLX_SWIFT_LM, MLX_MOE, AGENT_MEMORY)


def get_runtime(name: str) -> Runtime:
    """Return the runtime of that name.

    Raises:
        InputError: when it is not described.

    >>> get_runtime("mlx-lm").kv_step
    256
    """
    if name not in RUNTIMES:
        raise InputError(f"no runtime is called {name!r}; there is {', '.join(RUNTIMES)}")
    return _runtime(name, dict(RUNTIMES[name]))


def list_runtimes() -> tuple[Runtime, ...]:
    """Return every runtime that is described, in the order of the table."""
    return tuple(map(get_runtime, RUNTIMES))


def _runtime(name: str, row: dict[str, Any]) -> Runtime:
    row["mlx_version"] = tuple(row.get("mlx_version", ()))
    row["faults"] = tuple(row.get("faults", ()))
    row["budget"] = Budget(**row["budget"])
    return Runtime(name=name, **row)
