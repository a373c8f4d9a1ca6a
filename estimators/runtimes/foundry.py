"""Foundry: a cache that doubles, within a budget of its own; settings from METALLIC_* variables."""

import re
from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import round_down
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.results.context import AutoContext
from memfit.estimators.results.estimate import Note
from memfit.estimators.runtimes.auto_context import RuntimeMemoryProfile, within
from memfit.estimators.runtimes.facets import ContextLimit
from memfit.estimators.runtimes.growth import align_capacity
from memfit.estimators.runtimes.interface import MemoryFigures
from memfit.estimators.runtimes.runtime import Budget, Runtime
from memfit.estimators.runtimes.token_cache import TokenCacheModel

_MEBIBYTE = 2**20
_NUMBER = re.compile(r"[0-9]{1,12}")
_PREFILL_CHUNKS = (1, 512)  # prefill_config: clamp(1, 512)
_DECODE_BATCHES = (1, 256)  # model/executor, decode_batch_size: clamp(1, 256)
_DECODE_BATCH, _DECODE_BATCH_F16 = 64, 16  # the same: 16 where output_weight is F16
_HEADS = ("output.weight", "token_embd.weight")  # a tied model has only the second
# Buffers that a variable makes visible to the host.
SHARED_BY = {
    "intermediates": "METALLIC_INTERMEDIATES_SHARED",
    "kv_cache": "METALLIC_KV_CACHE_SHARED",
    "rope_tables": "METALLIC_ROPE_SHARED",
}


class FoundryRuntime(Runtime, frozen=True, kw_only=True):
    """Foundry with the settings of an environment."""

    decode_batch: int | None = None
    """Tokens decoded together, METALLIC_FOUNDRY_DECODE_BATCH_SIZE; None: by the output matrix."""
    shared: frozenset[str] = frozenset()
    """The buffers, keys of `SHARED_BY`, that are visible to the host."""

    def configured(self, environ: Mapping[str, str]) -> "FoundryRuntime":
        """Return Foundry with the settings of its variables.

        Chunks and batches are clamped to the range that Foundry allows. Where Foundry would ignore
        a value that it cannot read, memfit rejects it.

        Raises:
            InputError: when a variable is not a whole number.

        >>> FOUNDRY.configured({"METALLIC_KV_MEMORY_BUDGET_MB": "512"}).budget.bytes
        536870912
        """
        budget = _number(environ, "METALLIC_KV_MEMORY_BUDGET_MB")
        chunk = _number(environ, "METALLIC_PREFILL_CHUNK_SIZE")
        batch = _number(environ, "METALLIC_FOUNDRY_DECODE_BATCH_SIZE")
        return replace(
            self,
            max_context=_number(environ, "METALLIC_MAX_CONTEXT_LEN") or None,
            budget=self.budget if budget is None else Budget("cache", bytes=budget * _MEBIBYTE),
            prefill_step=self.prefill_step if chunk is None else _clamped(chunk, _PREFILL_CHUNKS),
            decode_batch=None if batch is None else _clamped(batch, _DECODE_BATCHES),
            shared=shared_buffers(environ),
        )


FOUNDRY = FoundryRuntime(
    name="foundry",
    version="as documented",
    prefill_step=32,  # METALLIC_PREFILL_CHUNK_SIZE
    kv_step=128,  # ContextConfig::align_capacity
    kv_initial=2048,  # GrowthStrategy::default
    kv_group_size=64,
    quantized_kv_start=0,
    cache_dtype="F16",
    growth="doubling",
    charges="attention layers",
    budget=Budget("working_set_for_cache", 50),  # MemoryBudget::Auto
    keeps="weights, cache and intermediates private to the GPU; inputs and outputs shared",
    allocates=(
        "2048 tokens at first, then twice as many, aligned up to 128; old and new live together"
    ),
    source="metallic, src/model/context.rs and docs of its memory management",
    faults=("it aligns the context up after dividing the budget, and so exceeds the budget",),
)


class Foundry(TokenCacheModel, ContextLimit, frozen=True):
    """Foundry; a window's layer keeps every token all the same."""

    runtime: FoundryRuntime

    defaults = FOUNDRY

    def logit_rows(self, workload: Workload, rows: int) -> int:
        """Return the tokens that it keeps logits of: a chunk's or those decoded together."""
        return max(rows, self.decode_batch)

    @property
    def decode_batch(self) -> int:
        """The tokens decoded together; without the tensors of a GGUF file the larger default."""
        if self.runtime.decode_batch is not None:
            return self.runtime.decode_batch
        checkpoint = self.subject.checkpoint
        tensors = (checkpoint.tensors or ()) if checkpoint.source == "gguf" else ()
        types = {tensor.name: tensor.dtype for tensor in tensors if tensor.name in _HEADS}
        head = next((types[name] for name in _HEADS if name in types), None)
        return _DECODE_BATCH_F16 if head == "F16" else _DECODE_BATCH

    def context_limit(self) -> int | None:
        """Return the model's limit or the lower one that was set, beyond which Foundry fails.

        Source: Foundry, ContextConfig::from_architecture; its policy NoEviction is an error.
        """
        limits = (self.subject.model.max_context, self.runtime.max_context)
        return min(filter(None, limits), default=None)

    def figures(self, workload: Workload) -> MemoryFigures:
        figures = super().figures(workload)
        # Of the tokens alone: a capacity that doubles ends at the budget.
        return replace(figures, cache_budget_bytes=figures.kv.held_bytes)

    def memory_profile(self, workload: Workload, figures: MemoryFigures) -> RuntimeMemoryProfile:
        """Return the profile with shared buffers in host memory."""
        plain, shared = super().memory_profile(workload, figures), self.runtime.shared
        if "intermediates" in shared:
            work = plain.fixed_device_local_bytes - plain.gpu_ssm_bytes
            plain = replace(
                plain, fixed_device_local_bytes=plain.gpu_ssm_bytes, fixed_host_visible_bytes=work
            )
        if "kv_cache" in shared:
            token = plain.device_local_bytes_per_token
            plain = replace(
                plain, device_local_bytes_per_token=0, host_visible_bytes_per_token=token
            )
        return plain

    def automatic_context(
        self, device: Device, workload: Workload, *, most: int, longest: int
    ) -> AutoContext:
        """Return what its budget for the cache holds."""
        token = self.figures(workload).kv.bytes_per_token
        return within(foundry_context(self.runtime.budget.of_device(device), token, most), longest)

    def _notes(self, workload: Workload, figures: MemoryFigures) -> Iterator[Note]:
        """Yield that the workload is beyond the limit that was set, and what others yield."""
        yield from super()._notes(workload, figures)
        most = self.runtime.max_context
        if most is not None and workload.total_tokens > most:
            text = f"METALLIC_MAX_CONTEXT_LEN: Foundry stops at {most} tokens"
            yield Note("warning", "beyond-context", text)


def shared_buffers(environ: Mapping[str, str]) -> frozenset[str]:
    """Return the buffers that an environment makes visible to the host.

    A variable counts when it is set, to any value: 0 shares too. Source: Foundry's executor,
    storage_mode_for, which asks only whether the variable exists.

    >>> sorted(shared_buffers({"METALLIC_KV_CACHE_SHARED": "0"}))
    ['kv_cache']
    """
    return frozenset(name for name, variable in SHARED_BY.items() if variable in environ)


def foundry_context(budget_bytes: int, bytes_per_token: int, ceiling: int) -> AutoContext:
    """Return Foundry's context for a budget of its cache alone.

    It divides and then aligns up to 128, at least one token; memfit aligns down.
    Source: Foundry, ContextConfig::apply_memory_budget.

    >>> foundry_context(200 * 1024, 1024, 4096).tokens
    256
    """
    if not bytes_per_token:
        return AutoContext(budget_bytes, ceiling, ceiling)
    paid = budget_bytes // bytes_per_token
    its_own = min(align_capacity(paid), ceiling) if paid else 1
    right = min(round_down(paid, FOUNDRY.kv_step), ceiling)
    if its_own <= paid:
        return AutoContext(budget_bytes, its_own, its_own)
    excess = align_capacity(its_own) * bytes_per_token - budget_bytes
    return AutoContext(
        budget_bytes,
        its_own,
        right,
        f"Foundry aligns up after dividing: {excess} bytes above its budget of {budget_bytes}",
    )


def _clamped(value: int, ends: tuple[int, int]) -> int:
    least, most = ends
    return max(least, min(value, most))


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not _NUMBER.fullmatch(text):
        raise InputError(f"{name}: {text[:40]!r} is not a whole number")
    return int(text)
