"""llama.cpp with its settings."""

from msgspec.structs import replace

from memfit.estimators.arch.fields import MAX_LAYERS
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import parse_memory, parse_rate
from memfit.estimators.runtimes.llama_cpp.caches import CACHE_TYPES, CacheTypes
from memfit.estimators.runtimes.runtime import Runtime

_UNQUANTISED = CacheTypes("f16", "f16")


class LlamaCppRuntime(Runtime, frozen=True, kw_only=True):
    """llama.cpp with its settings."""

    types: CacheTypes | None = None
    """The types of the cache; None where the workload's KV bits decide."""
    flash: bool = True
    """Whether attention may be fused (``--flash-attn``)."""
    gpu_layers: int | None = None
    """Layers on the GPU, with the head; None for all."""
    automatic: bool = False
    """Whether the workload decides how many layers are on the GPU."""
    host_experts: int = 0
    """Layers with their experts on the host (``--n-cpu-moe``)."""
    host_memory_bytes: int | None = None
    """Memory of the host beside that of the GPU; None: what the device says."""
    host_bandwidth_bytes: int | None = None
    """Bytes a second that it is read at; None: those of a usual host."""

    def with_setting(self, option: str, text: str) -> Runtime:
        match option:
            case "--cache-type":
                return replace(self, types=parse_cache_types(text))
            case "--cache-type-k" | "--cache-type-v":
                (given, again), types = parse_cache_types(text), self.types or _UNQUANTISED
                if given != again:
                    raise InputError(f"{text[:60]!r}: give one type")
                one = {"keys": given} if option.endswith("k") else {"values": given}
                return replace(self, types=types._replace(**one))
            case "--no-flash-attn":
                return replace(self, flash=False)
            case "--gpu-layers" if text.strip().lower() == "auto":
                return replace(self, automatic=True)
            case "--gpu-layers":
                return replace(self, gpu_layers=None if _is_all(text) else _layers(text))
            case "--n-cpu-moe":
                return replace(self, host_experts=MAX_LAYERS if _is_all(text) else _layers(text))
            case "--host-memory":
                return replace(self, host_memory_bytes=_positive(parse_memory(text), text))
            case "--host-bandwidth":
                return replace(self, host_bandwidth_bytes=_positive(parse_rate(text), text))
            case _:
                return Runtime.with_setting(self, option, text)


def _is_all(text: str) -> bool:
    return text.strip().lower() == "all"


def _layers(text: str) -> int:
    if not text.isdecimal() or int(text) > MAX_LAYERS:
        raise InputError(
            f"{text[:60]!r}: expected a number of layers up to {MAX_LAYERS}, auto or all"
        )
    return int(text)


def _positive(value: int, text: str) -> int:
    if not value:
        raise InputError(f"{text[:60]!r}: a host has more than none")
    return value


def parse_cache_types(text: str) -> CacheTypes:
    """Return the types of a text such as ``q8_0`` or ``q8_0,f16``: of keys, and of values.

    Raises:
        InputError: when llama.cpp keeps no cache in such a type.
    """
    names = [name.strip().lower() for name in text.split(",")]
    if len(names) > 2 or not all(name in CACHE_TYPES for name in names):
        raise InputError(
            f"{text[:60]!r}: llama.cpp keeps a cache in {', '.join(CACHE_TYPES)}; give one, or one"
            " for keys and one for values"
        )
    return CacheTypes(names[0], names[-1])
