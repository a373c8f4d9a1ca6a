"""Attention of few queries in two passes, case by case as in MLX's Metal source."""

import pytest

from memfit.estimators.machine.devices import find_device
from memfit.estimators.mlx.kernels import VectorAttention, VectorCall, vector_attention
from memfit.estimators.mlx.versions import MlxVersions

CALL = VectorCall(rows=32, queries=1, keys=4096, group=4, value_dim=128, item_bytes=2)


def blocks(device: str, keys: int, group: int, queries: int = 1, mlx: str = "0.32.4") -> int:
    """Return how many blocks of keys a call has, 0 in one pass."""
    versions = MlxVersions(mlx=tuple(map(int, mlx.split("."))))
    call = CALL._replace(keys=keys, group=group, queries=queries)
    arrays = vector_attention(find_device(device), versions).partial_results(call)
    return arrays[-1][0] // call.rows if arrays else 0


# sdpa_vector_2pass and eval_gpu at 846d176: keys, heads that share keys, queries, blocks.
@pytest.mark.parametrize(
    ("device", "keys", "group", "queries", "expected"),
    [
        ("m4-max-64", 1023, 8, 1, 0),
        ("m4-max-64", 1024, 1, 1, 64),
        ("m4-max-64", 1024, 8, 1, 64),
        ("m4-max-64", 1025, 4, 1, 64),
        ("m4-max-64", 1025, 5, 1, 128),
        ("m4-max-64", 1025, 1, 5, 128),
        ("m4-max-64", 8193, 8, 1, 256),
        ("m4-max-64", 32769, 8, 1, 512),
        ("m4-max-64", 65537, 8, 1, 1024),
        ("m4-max-64", 65537, 4, 1, 64),
        ("m3-ultra-512", 1024, 1, 1, 128),
        ("m3-ultra-512", 8192, 2, 1, 128),
        ("m3-ultra-512", 8193, 2, 1, 256),
        ("m3-ultra-512", 8193, 3, 1, 128),
        ("m3-ultra-512", 65536, 5, 1, 128),
        ("m3-ultra-512", 16383, 6, 1, 128),
        ("m3-ultra-512", 16384, 6, 1, 512),
        ("m3-ultra-512", 65536, 6, 1, 1024),
        ("m4-16", 4095, 8, 1, 0),
        ("m4-16", 4096, 1, 1, 0),
        ("m4-16", 4096, 2, 1, 32),
        ("m4-16", 4096, 2, 2, 64),
        ("m4-16", 262144, 8, 1, 64),
        ("h100-80", 65536, 8, 1, 0),
    ],
)
def test_blocks_are_those_of_the_source(
    device: str, keys: int, group: int, queries: int, expected: int
) -> None:
    assert blocks(device, keys, group, queries) == expected


def test_until_0_30_4_there_are_32_blocks_in_float32_and_only_an_ultra_is_large() -> None:
    older = MlxVersions(mlx=(0, 30, 3))
    ultra = vector_attention(find_device("m3-ultra-512"), older)
    assert ultra.partial_results(CALL) == ((32 * 32 * 128, 4), (32 * 32, 4), (32 * 32, 4))
    assert blocks("m4-max-64", 2048, 8, mlx="0.30.3") == 0
    assert blocks("m4-max-64", 4096, 8, mlx="0.30.3") == 32
    assert blocks("m3-ultra-512", 1024, 1, mlx="0.30.3") == 32


def test_more_than_eight_queries_take_another_kernel() -> None:
    rules = VectorAttention("d")
    assert rules.partial_results(CALL._replace(queries=8))
    assert not rules.partial_results(CALL._replace(queries=9))
