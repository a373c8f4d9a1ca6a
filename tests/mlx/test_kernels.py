"""Fused or not: the routing of MLX's attention, case by case as in its source."""

from typing import Any

import pytest

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.machine.devices import find_device
from memfit.estimators.mlx.kernels import (
    AttentionCall,
    FusedRule,
    fused_changes,
    fused_kernel,
    has_nax,
)

PREFILL: dict[str, Any] = {
    "backend": "metal",
    "nax": False,
    "query_tokens": 2048,
    "key_tokens": 4096,
    "key_dim": 128,
    "value_dim": 128,
    "heads": 32,
    "kv_heads": 8,
    "mask": "causal",
}


def fused(mlx: tuple[int, ...] = (0, 32, 2), **changes: Any) -> bool:
    """Return the answer for a Qwen3-4B prefill chunk on Metal with these changes."""
    return kernel(mlx, **changes) is not None


def kernel(mlx: tuple[int, ...], **changes: Any) -> FusedRule | None:
    """Return the kernel that takes the chunk with these changes."""
    if "width" in changes:
        changes["key_dim"] = changes["value_dim"] = changes.pop("width")
    return fused_kernel(AttentionCall(**{**PREFILL, **changes}), mlx)


# mlx/backend/metal/scaled_dot_product_attention.cpp at v0.29.0 ... v0.32.1 and 846d176.
@pytest.mark.parametrize(
    ("mlx_version", "widths"),
    [
        ((0, 29, 0), {64, 80, 128}),
        ((0, 31, 2), {64, 80, 128}),
        ((0, 32, 0), {64, 80, 128}),
        ((0, 32, 1), {64, 72, 80, 96, 128}),
        ((0, 32, 3), {64, 72, 80, 96, 128}),
        ((0, 32, 4), {64, 72, 80, 96, 128, 512}),
        ((1, 0, 0), {64, 72, 80, 96, 128, 512}),
    ],
)
def test_metal_prefill_fuses_these_widths(mlx_version: tuple[int, ...], widths: set[int]) -> None:
    tried = (32, 48, 64, 72, 80, 96, 112, 128, 192, 256, 512)
    assert {width for width in tried if fused(mlx_version, width=width)} == widths


def test_keys_and_values_of_different_widths_fuse_only_at_decode() -> None:
    assert not fused(key_dim=192, value_dim=128)
    assert fused(key_dim=192, value_dim=128, query_tokens=1)
    assert not fused(key_dim=192, value_dim=128, query_tokens=1, mlx=(0, 31, 2))


def test_width_256_fuses_on_neural_accelerators_for_long_causal_chunks() -> None:
    assert fused(width=256, nax=True, query_tokens=1024)
    assert not fused(width=256, nax=True, query_tokens=1023)
    assert not fused(width=256, nax=True, mask="none")
    assert not fused(width=256, nax=True, mask="array")
    assert not fused(width=256, nax=True, mlx=(0, 32, 1))
    assert not fused(width=256, nax=False)
    assert not fused(width=192, nax=True)


def test_an_array_mask_does_not_prevent_fusion_in_metal_prefill() -> None:
    assert fused(mask="array")


def test_metal_uses_its_vector_kernel_up_to_eight_queries() -> None:
    assert fused(width=72, query_tokens=9)
    assert not fused(width=72, query_tokens=8)
    assert fused(width=256, query_tokens=8)
    assert not fused(width=192, query_tokens=1)


def test_wide_groups_do_not_fuse_many_queries_at_decode() -> None:
    assert fused(query_tokens=8, heads=32, kv_heads=8)
    assert not fused(query_tokens=8, heads=40, kv_heads=8)
    assert fused(query_tokens=8, heads=40, kv_heads=8, mlx=(0, 30, 3))
    assert not fused(query_tokens=1, heads=64, kv_heads=1)


def test_fewer_keys_than_queries_do_not_fuse_under_a_causal_mask() -> None:
    assert not fused(query_tokens=2048, key_tokens=1024)
    assert fused(query_tokens=2048, key_tokens=1024, mask="none")
    assert not fused(query_tokens=8, key_tokens=4, mask="none")


def test_the_cpu_never_fuses() -> None:
    assert not fused(backend="cpu")
    assert not fused(backend="cpu", query_tokens=1)


# mlx/backend/cuda/scaled_dot_product_attention.cpp, supports_sdpa_cudnn; .cu, supports_sdpa_vector.
def test_cuda_prefill_fuses_multiples_of_eight_up_to_128() -> None:
    tried = (8, 60, 64, 72, 100, 112, 128, 136, 192, 256)
    fusing = {width for width in tried if fused(backend="cuda", width=width)}
    assert fusing == {8, 64, 72, 112, 128}
    assert fused(backend="cuda", key_dim=96, value_dim=64, mask="array")


def test_cuda_decode_fuses_three_widths_without_array_mask() -> None:
    one: dict[str, Any] = {"backend": "cuda", "query_tokens": 1}
    assert {width for width in (64, 80, 96, 128, 256) if fused(width=width, **one)} == {64, 96, 128}
    assert not fused(mask="array", **one)


# libmlx.dylib of mlx-metal 0.32.3 and 0.32.4, use_fallback and use_blocked_d512.
def test_width_256_fuses_without_neural_accelerators_in_a_first_chunk_alone() -> None:
    first = {"width": 256, "key_tokens": 2048}
    assert fused((0, 32, 3), **first)
    assert not fused((0, 32, 2), **first)
    assert not fused((0, 32, 3), **{**first, "key_tokens": 2049})
    assert not fused((0, 32, 3), **{**first, "query_tokens": 2047, "key_tokens": 2047})
    assert fused((0, 32, 3), width=256, nax=True, mask="array")


def test_width_512_needs_enough_tiles_on_neural_accelerators() -> None:
    long = {"width": 512, "nax": True, "query_tokens": 2048}
    assert fused((0, 32, 3), **long, heads=16)
    assert not fused((0, 32, 3), **long, heads=8)
    assert fused((0, 32, 3), **long, heads=8, batch=2)
    assert not fused((0, 32, 2), **long)
    assert not fused((0, 32, 3), **long, mask="array")


def test_width_512_is_taken_in_blocks_of_queries_on_older_gpus() -> None:
    blocked = kernel((0, 32, 4), width=512)
    assert blocked is not None
    assert (blocked.block, blocked.scratch_row(4096, 512)) == (256, 5120)
    assert not fused((0, 32, 4), width=512, query_tokens=1023)
    assert not fused((0, 32, 3), width=512)


def test_width_512_fuses_at_decode_for_eight_heads_a_key() -> None:
    one = {"width": 512, "query_tokens": 1, "mask": "none", "heads": 32, "kv_heads": 4}
    assert fused((0, 32, 3), **one)
    assert not fused((0, 32, 3), **{**one, "kv_heads": 8})
    assert not fused((0, 32, 3), **{**one, "key_tokens": 1023})


def test_a_version_matters_only_to_the_widths_it_fuses() -> None:
    m5, m4 = find_device("m5-max-128"), find_device("m4-max-64")
    wide, usual = frozenset({(256, 256)}), frozenset({(128, 128)})
    assert fused_changes(wide, m5)[-2:] == ((0, 32, 2), (0, 32, 3))
    assert fused_changes(wide, m4)[-1] == (0, 32, 3)
    assert fused_changes(usual, m5)[-1] == (0, 30, 4)
    assert fused_changes(usual, find_device("rtx-5090")) == ((0, 31, 0),)


def test_a_gpu_before_ampere_fuses_only_decode() -> None:
    old: dict[str, Any] = {"backend": "cuda", "compute_capability": 75}
    assert not fused(**old)
    assert fused(query_tokens=3, **old)


@pytest.mark.parametrize(("backend", "version"), [("metal", (0, 28, 9)), ("cuda", (0, 30, 6))])
def test_an_mlx_older_than_the_rules_is_not_guessed(backend: str, version: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedError, match=r"are described from 0\.[0-9]+\.0 on"):
        fused(backend=backend, mlx=version)


@pytest.mark.parametrize(
    ("name", "nax"),
    [("m5-16", True), ("m5-max-128", True), ("m4-max-64", False), ("rtx-5090", False)],
)
def test_m5_has_neural_accelerators(name: str, nax: bool) -> None:
    assert has_nax(find_device(name)) is nax
