"""What a real run took, on one machine with one version of MLX: integers are bytes or nanoseconds.

Bytes are as MLX counts them, weights included in every peak.
"""

from msgspec import Struct

from memfit.estimators.base.quantities import Bytes, Count
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Backend

SCHEMA = "memfit.measurement/1"


class Loaded(Struct, frozen=True, kw_only=True):
    """A model once loaded.

    ``weights_bytes`` is the sum of its arrays' nbytes, ``active_bytes`` what MLX's allocator holds
    for them, ``process_bytes`` the process's resident size as the system counts it.
    """

    weights_bytes: Bytes
    active_bytes: Bytes
    peak_bytes: Bytes
    process_bytes: Bytes | None
    load_ns: Count


class Run(Struct, frozen=True, kw_only=True):
    """One generation by mlx-lm's own loop.

    ``prefill_*`` are of the moment when every chunk of the prompt is done, its last token not yet;
    the others of the moment the workload ends. Held is what tokens need, the rest is allocated.
    """

    prefill_kv_bytes: Bytes
    prefill_kv_held_bytes: Bytes
    prefill_ssm_bytes: Bytes
    kv_bytes: Bytes
    kv_held_bytes: Bytes
    ssm_bytes: Bytes
    prefill_peak_bytes: Bytes
    decode_peak_bytes: Bytes
    first_token_ns: Count
    decode_ns: Count  # of the tokens after the first
    process_bytes: Bytes | None

    @property
    def peak_bytes(self) -> int:
        """The larger of both phases."""
        return max(self.prefill_peak_bytes, self.decode_peak_bytes)


class Measurement(Struct, frozen=True, kw_only=True):
    """Repeated runs of one workload, with all that has to be equal for them to hold again."""

    id: str
    measured_at: str  # UTC, ISO 8601
    memfit_version: str
    mlx_version: str
    mlx_lm_version: str
    model: str
    fingerprint: str  # of the checkpoint's config and headers
    device: str
    backend: Backend
    workload: Workload
    wired_limit_bytes: Bytes | None  # None: not set
    loaded: Loaded
    runs: tuple[Run, ...]  # at least one
    swift_workspace_bytes: Bytes | None  # by the rule of mlx-swift-lm's tune
    schema: str = SCHEMA
