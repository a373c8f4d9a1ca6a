"""What a real run took, on one machine with one version of MLX: integers are bytes or nanoseconds.

Bytes are as MLX counts them, weights included in every peak.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from memfit.estimators.base.units import Bytes, Count, Line, NonEmpty, Positive, Sha256
from memfit.estimators.base.workload import Recipe, Workload
from memfit.estimators.machine.device import Backend
from memfit.estimators.results.result import Result

SCHEMA = "memfit.measurement/1"
# UTC, ISO 8601.
_TIME = r"^[0-9]{4}(-[0-9]{2}){2}T[0-9]{2}(:[0-9]{2}){2}(\.[0-9]{1,6})?(Z|\+00:00)$"


class Loaded(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model once loaded."""

    weights_bytes: Bytes
    """The sum of its arrays' nbytes."""
    active_bytes: Bytes
    """What MLX's allocator holds for them."""
    peak_bytes: Bytes
    process_bytes: Bytes | None
    """The process's resident size as the system counts it."""
    load_ns: Count


class Run(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
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
    decode_ns: Count
    """Of the tokens after the first."""
    process_bytes: Bytes | None
    more: tuple[tuple[str, Bytes], ...] = ()
    """Further figures with their names; a measurement from before a figure lacks it."""

    def value(self, name: str) -> int | None:
        """Return one of the figures, None where it was not measured."""
        value: int | None = getattr(self, name, dict(self.more).get(name))
        return value

    @property
    def peak_bytes(self) -> int:
        """The larger of both phases."""
        return max(self.prefill_peak_bytes, self.decode_peak_bytes)


class MeasuredExperts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The experts that a run had in memory."""

    capacity: Positive
    """Of each layer."""
    policy: Literal["load", "skip", "swap", "fail"]
    """What was done about the others."""
    profile_sha256: Sha256
    """Of the counts by which the experts were chosen."""


Way = Literal["as-stored", "bulk", "freeing", "lazy"]


class MeasuredRestore(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to restore a stored cache, in a process of its own."""

    way: Way
    peak_bytes: Bytes
    """Of the restore, without the weights."""
    restore_ns: Positive
    from_disk: bool
    """Whether the system forgot the file before."""


class MeasuredCache(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file of a run's cache."""

    bits: Positive
    group_size: Positive | None
    """Of the quantised layers; None: no layer is quantised, or not all in the same groups."""
    file_bytes: Positive
    write_ns: Positive | None
    """Of quantising, and until file and checksum are on the disk; None: it was there before."""
    restores: tuple[MeasuredRestore, ...]


class MeasuredTraining(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A few steps of mlx-lm's trainer, on sequences of the recipe's longest length."""

    recipe: Recipe
    validation_bytes: Bytes
    first_step_bytes: Bytes
    """Until the first update of the optimizer."""
    later_steps_bytes: Bytes
    steps: Count

    @property
    def peak_bytes(self) -> int:
        return max(self.validation_bytes, self.first_step_bytes, self.later_steps_bytes)


class Measurement(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="schema",
    tag=SCHEMA,
):
    """Repeated runs of one workload, with all that has to be equal for them to hold again."""

    id: Annotated[str, Meta(pattern="^[0-9a-f]{8}-[0-9a-f]{8}$", max_length=17)]
    measured_at: Annotated[str, Meta(pattern=_TIME, max_length=40)]
    memfit_version: Line
    mlx_version: Line
    mlx_lm_version: Line
    model: Line
    fingerprint: Sha256
    """Of the checkpoint's config and headers."""
    device: Line
    backend: Backend
    workload: Workload
    wired_limit_bytes: Bytes | None
    """None: not set."""
    loaded: Loaded
    runs: NonEmpty[Run]
    warm_up: Run | None = None
    """The run before these: its times do not count, its peak does where it is higher."""
    swift_workspace_bytes: Bytes | None
    """By the rule of mlx-swift-lm's tune."""
    swift_kv_bytes: Bytes | None = None
    """Caches and states by that rule; None in measurements of an older memfit."""
    experts: MeasuredExperts | None = None
    """Of `memfit tune experts`; None: all experts, as mlx-lm loads them."""
    caches: tuple[MeasuredCache, ...] = ()
    """Of `memfit tune cache`, which computes the whole prompt before the first token."""
    training: MeasuredTraining | None = None
    """Of `memfit tune train`, which generates nothing."""
    mlx_vlm_version: Line | None = None
    """Of a prompt with images, which mlx-vlm runs in place of mlx-lm."""

    @property
    def all_runs(self) -> tuple[Run, ...]:
        """The runs, and the one before them."""
        return (self.warm_up, *self.runs) if self.warm_up else self.runs

    @property
    def is_usual(self) -> bool:
        """Whether it is of mlx-lm's or mlx-vlm's own loop with all experts."""
        return self.experts is None and self.training is None and not self.caches


class Measurements(Result, frozen=True, kw_only=True, tag="memfit.measurements/1"):
    """A collection of measurements, which `memfit measurements import` reads."""

    measurements: tuple[Measurement, ...]
