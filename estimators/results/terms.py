"""Closed sets of names in results."""

from typing import Annotated, Literal

from memfit.estimators.base.units import Count, one_of

Basis = Literal["exact", "traced", "derived", "measured", "bound", "assumed"]
Verdict = Literal["fits", "tight", "exceeds", "does_not_load", "unknown"]
Phase = Literal["load", "vision", "prefill", "decode"]
Level = Literal["info", "warning"]
State = Literal["change", "keep", "impossible", "not_applicable"]
Cost = Literal["none", "speed", "quality", "hardware"]
Source = Literal["local", "hub", "config", "sample", "gguf"]
Method = Literal["formula", "trace", "measure"]
LimitName = Literal[
    "working_set",
    "memory",
    "max_buffer",
    "runtime_budget",
    "cache_budget",
    "context",
    "host_memory",
]
PartName = Annotated[
    str,
    one_of(*"embedding attention mlp experts shared_experts router norm head vision other".split()),
]
SettingName = Annotated[
    str,
    one_of(*"prefill_step kv_bits weight_bits memory_bytes gpu_layers host_experts".split()),
]
Settings = dict[SettingName, Count]
"""``host_experts`` are the layers, from the first, with their experts on the host."""
