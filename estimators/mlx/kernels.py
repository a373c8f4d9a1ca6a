"""When MLX computes attention in one fused kernel, so that no scores are held in memory."""

from functools import cache
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import ceil_div
from memfit.estimators.machine.device import Backend, Device
from memfit.estimators.mlx.data.kernels import KERNELS
from memfit.estimators.mlx.versions import Version, format_version

# metal::is_nax_available in mlx/backend/metal/device.cpp; phones start one generation later.
_NAX_GENERATION = 17
_NAX_GENERATION_PHONE = 18
_TILE_QUERIES = 32

Mask = Literal["causal", "array", "none"]


def has_nax(device: Device) -> bool:
    """Whether the GPU has neural accelerators that MLX uses (M5 and later, from macOS 26.2 on)."""
    if device.backend != "metal" or device.generation is None:
        return False
    first = _NAX_GENERATION_PHONE if device.gpu_class == "p" else _NAX_GENERATION
    return device.generation >= first


class AttentionCall(Struct, frozen=True, kw_only=True):
    """The shapes of one call of scaled_dot_product_attention on a device."""

    backend: Backend
    nax: bool
    """Whether the GPU has neural accelerators."""
    query_tokens: int
    key_tokens: int
    key_dim: int
    value_dim: int
    heads: int
    kv_heads: int
    mask: Mask
    batch: int = 1
    compute_capability: int | None = None
    """Of a CUDA GPU, 80 for 8.0; unknown is taken as enough."""


class FusedRule(Struct, frozen=True, kw_only=True):
    """One kernel of MLX, and the calls that it takes; what is not set does not matter."""

    queries: tuple[int, int | None]
    """The fewest and the most."""
    widths: tuple[tuple[int, int], ...] = ()
    """Of keys and values."""
    width_step: int = 0
    """In place of ``widths``: any multiple of it up to ``width_limit``."""
    width_limit: int = 0
    nax: bool | None = None
    masks: tuple[Mask, ...] = ("causal", "array", "none")
    covered: bool = False
    """Whether there must be as many keys as queries or more; a causal mask needs them anyway."""
    same_keys: bool = False
    """Whether there must be as many keys as queries."""
    least_keys: int = 0
    group: int | None = None
    """Heads that share keys and values."""
    group_limit: int | None = None
    """The most queries times heads that share keys and values."""
    least_tiles: int = 0
    """Tiles of 32 queries of all heads."""
    capability: int = 0
    block: int = 0
    """Queries for which scores are held at once; 0: for none."""

    def takes(self, call: AttentionCall) -> bool:
        """Whether the kernel takes a call."""
        least, most = self.queries
        return (
            call.query_tokens >= least
            and (most is None or call.query_tokens <= most)
            and self.has_widths(call.key_dim, call.value_dim)
            and self.nax in (None, call.nax)
            and call.mask in self.masks
            and self._fits_keys(call)
            and self._fits_heads(call)
            and (call.compute_capability or self.capability) >= self.capability
        )

    def scratch_row(self, keys: int, width: int) -> int:
        """Return the elements it holds for each query of a block: scores, the query, its result.

        Source: libmlx.dylib of mlx-metal 0.32.4, sdpa_full_self_attention_blocked.
        """
        return keys + 2 * width if self.block else 0

    def has_widths(self, key_dim: int, value_dim: int) -> bool:
        """Whether it is made for these widths."""
        if not self.width_step:
            return (key_dim, value_dim) in self.widths
        return all(w <= self.width_limit and not w % self.width_step for w in (key_dim, value_dim))

    def _fits_keys(self, call: AttentionCall) -> bool:
        queries, keys = call.query_tokens, call.key_tokens
        if (self.covered or call.mask == "causal") and queries > keys:
            return False
        return keys >= self.least_keys and (not self.same_keys or queries == keys)

    def _fits_heads(self, call: AttentionCall) -> bool:
        group = call.heads // call.kv_heads
        tiles = call.batch * call.heads * ceil_div(call.query_tokens, _TILE_QUERIES)
        return (
            (self.group is None or group == self.group)
            and (self.group_limit is None or call.query_tokens * group <= self.group_limit)
            and tiles >= self.least_tiles
        )


def fused_kernel(call: AttentionCall, mlx: Version) -> FusedRule | None:
    """Return the fused kernel that a version of MLX takes, None where it holds all scores.

    Values are taken as 16-bit, which cuDNN needs. Source: mlx/data/kernels.py, each row with its
    file and version.

    Raises:
        UnsupportedError: when MLX is older than the oldest rules.
    """
    if call.backend == "cpu":
        return None
    return next((rule for rule in _rules(call.backend, mlx) if rule.takes(call)), None)


def fused_changes(widths: frozenset[tuple[int, int]], device: Device) -> tuple[Version, ...]:
    """Return the versions of MLX, oldest first, from which on other kernels take these widths."""
    versions: list[Version] = []
    before = None
    for row in reversed(KERNELS.get(device.backend, [])):
        found = _concerned(_made(device.backend, row["since"]), widths, has_nax(device))
        if found != before:
            versions.append(row["since"])
        before = found
    return tuple(versions)


def _concerned(
    rules: tuple[FusedRule, ...], widths: frozenset[tuple[int, int]], nax: bool
) -> frozenset[FusedRule]:
    """The rules for some of the widths on a GPU, without those for others."""
    found = (
        replace(rule, widths=tuple(pair for pair in rule.widths if pair in widths))
        for rule in rules
        if rule.nax in (None, nax)
    )
    return frozenset(rule for rule in found if rule.widths or rule.width_step)


def _rules(backend: Backend, mlx: Version) -> tuple[FusedRule, ...]:
    """Return those of the newest row that is not newer than the version."""
    rows: list[Any] = KERNELS[backend]
    for row in rows:
        if mlx >= row["since"]:
            return _made(backend, row["since"])
    raise UnsupportedError(
        f"MLX {format_version(mlx)}: its attention kernels on {backend} are described from"
        f" {format_version(rows[-1]['since'])} on"
    )


@cache
def _made(backend: Backend, since: Version) -> tuple[FusedRule, ...]:
    row = next(row for row in KERNELS[backend] if row["since"] == since)
    return tuple(FusedRule(**rule) for rule in row["rules"])
