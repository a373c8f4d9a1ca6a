"""A workload as it was asked for, before the runtime is known, and the margin of every answer."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.workload import Workload
from memfit.estimators.runtimes.runtime import Runtime

# Kept free above the peak unless another margin is given: for what a system allocates meanwhile.
MARGIN_BYTES = 64_000_000
DRAFT_TOKENS = 3  # mlx_lm/generate.py and server.py, --num-draft-tokens
RUNTIME_DEFAULTS = ("prefill_step", "kv_bits", "kv_group_size", "quantized_kv_start")


class PartialWorkload(Struct, frozen=True):
    """A workload with settings that depend on the runtime."""

    values: Workload
    """The workload, with mlx-lm's defaults where nothing was given."""

    given: frozenset[str]
    """The fields that were given: they are the same under every runtime."""

    def varied(self, fields: Mapping[str, Any]) -> "PartialWorkload":
        """Return the same with other values, which then count as given.

        Raises:
            InputError: when a value is out of range.
        """
        return PartialWorkload(replace(self.values, **fields), self.given.union(fields))

    def under(self, runtime: Runtime) -> Workload:
        """Return the workload with the runtime's own defaults where nothing was given."""
        own = {name: getattr(runtime, name) for name in RUNTIME_DEFAULTS if name not in self.given}
        return replace(self.values, **own)
