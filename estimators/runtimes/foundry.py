"""Foundry's settings, which it takes from METALLIC_* variables of the environment."""

import re
from collections.abc import Mapping
from dataclasses import replace

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.records import record
from memfit.estimators.runtimes.registry import Budget, Runtime

_MEBIBYTE = 2**20
_NUMBER = re.compile(r"[0-9]{1,12}")
_DECODE_BATCH = 64
_PREFILL_CHUNKS = (1, 512)


@record(frozen=True, slots=True, kw_only=True)
class FoundrySettings:
    """What the variables set; tokens, and whether buffers are visible to the host."""

    max_context: int | None = None
    kv_budget_bytes: int | None = None
    prefill_chunk: int = 32
    decode_batch: int = _DECODE_BATCH
    kv_cache_shared: bool = False
    intermediates_shared: bool = False

    def applied(self, runtime: Runtime) -> Runtime:
        """Return the runtime with these settings."""
        budget = runtime.budget
        if self.kv_budget_bytes is not None:
            budget = Budget("cache", bytes=self.kv_budget_bytes)
        return replace(
            runtime, prefill_step=self.prefill_chunk, budget=budget, max_context=self.max_context
        )


def foundry_settings(environ: Mapping[str, str]) -> FoundrySettings:
    """Return Foundry's settings in an environment.

    Chunks are brought into the range Foundry allows. Where Foundry would pass over a value it
    cannot read, memfit refuses it.

    Raises:
        InputError: when a variable is no whole number, or no switch.

    >>> foundry_settings({"METALLIC_KV_MEMORY_BUDGET_MB": "512"}).kv_budget_bytes
    536870912
    """
    budget = _number(environ, "METALLIC_KV_MEMORY_BUDGET_MB")
    chunk = _number(environ, "METALLIC_PREFILL_CHUNK_SIZE")
    batch = _number(environ, "METALLIC_FOUNDRY_DECODE_BATCH_SIZE")
    least, most = _PREFILL_CHUNKS
    return FoundrySettings(
        max_context=_number(environ, "METALLIC_MAX_CONTEXT_LEN") or None,
        kv_budget_bytes=None if budget is None else budget * _MEBIBYTE,
        prefill_chunk=32 if chunk is None else max(least, min(chunk, most)),
        decode_batch=_DECODE_BATCH if batch is None else max(1, batch),
        kv_cache_shared=_switch(environ, "METALLIC_KV_CACHE_SHARED"),
        intermediates_shared=_switch(environ, "METALLIC_INTERMEDIATES_SHARED"),
    )


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not _NUMBER.fullmatch(text):
        raise InputError(f"{name}: {text[:40]!r} is no whole number")
    return int(text)


def _switch(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name, "0").strip()
    if text not in ("", "0", "1"):
        raise InputError(f"{name}: {text[:40]!r} is no switch; write 0 or 1")
    return text == "1"
