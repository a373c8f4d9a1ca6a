"""Invented measurements for tests."""

from typing import Any

from msgspec.structs import replace

from memfit.estimators.base.version import __version__
from memfit.estimators.base.workload import Workload
from memfit.estimators.runtimes.measurement import Loaded, Measurement, Run
from memfit.probes.measurement_json import measurement_id

LOADED = Loaded(
    weights_bytes=700_000,
    active_bytes=720_000,
    peak_bytes=800_000,
    process_bytes=90_000_000,
    load_ns=12_345_678,
)
RUN = Run(
    prefill_kv_bytes=65_536,
    prefill_kv_held_bytes=30_000,
    prefill_ssm_bytes=0,
    kv_bytes=65_536,
    kv_held_bytes=32_768,
    ssm_bytes=0,
    prefill_peak_bytes=1_500_000,
    decode_peak_bytes=900_000,
    first_token_ns=2_000_000,
    decode_ns=8_000_000,
    process_bytes=None,
)


def measurement(**changes: Any) -> Measurement:
    """Return a complete measurement, with changed fields and the resulting id."""
    values: dict[str, Any] = {
        "measured_at": "2026-11-21T07:30:00+00:00",
        "memfit_version": __version__,
        "mlx_version": "0.32.4",
        "mlx_lm_version": "0.32.2",
        "model": "models/qwen",
        "fingerprint": "0123456789abcdef" * 4,
        "device": "x86_64 CPU",
        "backend": "cpu",
        "workload": Workload(prompt_tokens=64, max_tokens=8),
        "wired_limit_bytes": None,
        "loaded": LOADED,
        "runs": (RUN, replace(RUN, prefill_peak_bytes=1_600_000), RUN),
        "swift_workspace_bytes": 640_000,
        **changes,
    }
    key = ("fingerprint", "device", "mlx_version", "mlx_lm_version", "workload")
    caches = values.get("caches", ())
    id = measurement_id({k: values[k] for k in (*key, "wired_limit_bytes")} | {"caches": caches})
    return Measurement(id=id, **values)
