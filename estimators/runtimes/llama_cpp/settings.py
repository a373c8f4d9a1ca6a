"""llama.cpp with its settings."""

from collections.abc import Callable
from typing import Any, TypeVar

from msgspec.structs import replace

from memfit.estimators.arch.fields import MAX_LAYERS
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.reading.section import memory_value, number_or_text
from memfit.estimators.base.units import parse_count, parse_rate, round_up
from memfit.estimators.base.workload import MAX_TOKENS, Workload
from memfit.estimators.runtimes.llama_cpp.caches import CACHE_TYPES, CacheTypes, Cells
from memfit.estimators.runtimes.llama_cpp.overrides import Override, parse_overrides
from memfit.estimators.runtimes.runtime import Budget, Runtime

Layers = TypeVar("Layers", int, None)
_UNQUANTISED = CacheTypes("f16", "f16")
_MOST_DRAFTED = 64
_RATE = number_or_text(parse_rate)


class LlamaCppRuntime(Runtime, frozen=True, kw_only=True):
    """llama.cpp with its settings."""

    types: CacheTypes | None = None
    """The types of the cache; None where the workload's KV bits decide."""
    flash: bool = True
    """Whether attention may be fused (``--flash-attn``)."""
    unified: bool = False
    """Whether all sequences share the cells of one cache (``--kv-unified``)."""
    swa_full: bool = False
    """Whether a sliding cache has room for the whole context (``--swa-full``)."""
    all_logits: bool = False
    """Whether a context has logits of every token, as a library's has unless it is limited."""
    gpu_layers: int | None = None
    """Layers on the GPU, with the head; None for all."""
    automatic: bool = False
    """Whether the workload decides how many layers are on the GPU."""
    host_experts: int = 0
    """Layers with their experts on the host (``--n-cpu-moe``)."""
    overrides: tuple[Override, ...] = ()
    """Where tensors are whose names match (``--override-tensor``)."""
    kv_offload: bool = True
    """Whether caches and states are where their layers are (``--no-kv-offload``: on the host)."""
    projector_offload: bool = True
    """Whether a vision projector is on the GPU (``--no-mmproj-offload``)."""
    drafted: int = 0
    """Tokens that the file's own prediction layers draft (``--spec-draft-n-max``); 0: none."""
    host_memory_bytes: int | None = None
    """Memory of the host beside that of the GPU; None: what the device says."""
    host_bandwidth_bytes: int | None = None
    """Bytes a second that it is read at; None: those of a usual host."""

    @property
    def is_placed(self) -> bool:
        """Whether something is placed otherwise than its layer."""
        return bool(self.overrides) or not (self.kv_offload and self.projector_offload)

    def with_setting(self, name: str, value: Any) -> Runtime:
        match name:
            case "cache_type":
                return replace(self, types=parse_cache_types(value))
            case "cache_type_k" | "cache_type_v":
                (given, again), types = parse_cache_types(value), self.types or _UNQUANTISED
                if given != again:
                    raise InputError(f"{value[:60]!r}: give one type")
                one = {"keys": given} if name.endswith("k") else {"values": given}
                return replace(self, types=types._replace(**one))
            case "gpu_layers" if _word(value) == "auto":
                return replace(self, automatic=True)
            case "gpu_layers":
                return replace(self, gpu_layers=_layers(value, of_all=None))
            case "cpu_moe":
                return replace(self, host_experts=MAX_LAYERS if value else 0)
            case "n_cpu_moe":
                return replace(self, host_experts=_layers(value, of_all=MAX_LAYERS))
            case _ if name in _FIELDS:
                field, read = _FIELDS[name]
                return replace(self, **{field: read(value)})
            case _:
                return Runtime.with_setting(self, name, value)


# Commit 0c1e57098; its build b11549 allocates the same.
LLAMA_CPP = LlamaCppRuntime(
    name="llama.cpp",
    version="b11549",
    prefill_step=512,  # common/common.h, n_ubatch
    batch=2048,  # common/common.h, n_batch
    kv_step=256,  # src/llama-context.cpp, the padding of n_ctx; llama-kv-cache-iswa.cpp
    kv_group_size=32,  # ggml/src/ggml-common.h, QK8_0, QK5_0 and QK4_0
    quantized_kv_start=0,  # the types of the cache hold from its first token on
    cache_dtype="F16",
    growth="contiguous",
    charges="attention layers",
    budget=Budget("working_set", 100),
    keeps="everything where its layers are placed; here in one memory",
    allocates="the whole context before the first token, a window's with room for a micro-batch",
    source=("https://github.com/ggml-org/llama.cpp, src/llama-context.cpp and llama-kv-cache.cpp"),
)


def _word(value: str | int) -> str:
    return value.strip().lower() if isinstance(value, str) else ""


def _layers(value: str | int, *, of_all: Layers) -> int | Layers:
    if _word(value) == "all":
        return of_all
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, str) or value > MAX_LAYERS:
        raise InputError(
            f"{str(value)[:60]!r}: expected a number of layers up to {MAX_LAYERS}, auto or all"
        )
    return value


def _tokens(value: str | int) -> int:
    tokens = parse_count(value) if isinstance(value, str) else value
    if not 1 <= tokens <= MAX_TOKENS:
        raise InputError(f"{str(value)[:60]!r}: expected from 1 to {MAX_TOKENS} tokens")
    return tokens


def _drafted(value: int) -> int:
    if not 1 <= value <= _MOST_DRAFTED:
        raise InputError(f"{value}: give from 1 to {_MOST_DRAFTED}")
    return value


def _memory(value: str | int) -> int:
    return _positive(memory_value(value), value)


def _rate(value: str | int) -> int:
    return _positive(_RATE(value), value)


def _positive(nbytes: int, value: str | int) -> int:
    if not nbytes:
        raise InputError(f"{str(value)[:60]!r}: a host has more than none")
    return nbytes


_FIELDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "all_logits": ("all_logits", bool),
    "batch_size": ("batch", _tokens),
    "flash_attn": ("flash", bool),
    "kv_unified": ("unified", bool),
    "kv_offload": ("kv_offload", bool),
    "mmproj_offload": ("projector_offload", bool),
    "mtp_tokens": ("drafted", _drafted),
    "override_tensor": ("overrides", parse_overrides),
    "swa_full": ("swa_full", bool),
    "host_memory": ("host_memory_bytes", _memory),
    "host_bandwidth": ("host_bandwidth_bytes", _rate),
}
"""The field of a setting that is one value, and what reads it."""


def cells(workload: Workload, runtime: LlamaCppRuntime) -> Cells:
    """Return the cells of a context that has room for the workload.

    A context is padded to ``kv_step`` cells; the batch is at most the context,
    and the micro-batch at most the batch (llama-context.cpp).
    """
    sequences = workload.batch
    wanted = sequences * workload.total_tokens
    padded = round_up(wanted, runtime.kv_step)
    batch = min(wanted, runtime.batch)
    return Cells(
        full=padded if runtime.unified else round_up(padded // sequences, runtime.kv_step),
        microbatch=min(batch, workload.prefill_step),
        sequences=sequences,
        padding=runtime.kv_step,
        unified=runtime.unified,
        swa_full=runtime.swa_full,
    )


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
