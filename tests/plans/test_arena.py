"""Intermediates in one arena: their offsets, and a static engine's other allocations."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.estimators.arch.registry import build_model
from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.plans.static import arena as module
from memfit.estimators.plans.static.arena import (
    ALIGNMENT,
    POOL_CHUNK_BYTES,
    Lifetime,
    arena,
    by_mlx,
    needs,
    pool,
)
from memfit.estimators.plans.static.plan import kv_capacity_bytes, plan_static, rope_table_bytes
from memfit.estimators.results.static import StaticPlan
from memfit.estimators.trace.graph_format import Array, Call, Node, Trace, from_json

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
LIFETIMES = st.lists(
    st.builds(
        lambda size, first, span: Lifetime("x", size, first, first + span),
        st.integers(1, 5000),
        st.integers(0, 20),
        st.integers(0, 10),
    ),
    max_size=30,
)


@given(LIFETIMES)
def test_buffers_alive_at_the_same_time_never_overlap(buffers: list[Lifetime]) -> None:
    result = arena(buffers)
    assert len(result.placed) == len(buffers)
    for index, one in enumerate(result.placed):
        assert one.offset % ALIGNMENT == 0
        assert one.offset + one.nbytes <= result.nbytes
        for other in result.placed[:index]:
            lives = one.buffer.first <= other.buffer.last and other.buffer.first <= one.buffer.last
            apart = (
                one.offset + one.nbytes <= other.offset or other.offset + other.nbytes <= one.offset
            )
            assert apart or not lives


@given(LIFETIMES)
def test_the_arena_is_between_its_bounds(buffers: list[Lifetime]) -> None:
    result = arena(buffers)
    assert result.largest_bytes <= result.lower_bound_bytes <= result.nbytes
    assert result.nbytes <= result.separate_bytes


def test_a_chain_needs_room_for_two_buffers() -> None:
    chain = [Lifetime("x", 1000, step, step + 1) for step in range(50)]
    result = arena(chain)
    assert (result.nbytes, result.lower_bound_bytes) == (2048, 2048)
    assert result.separate_bytes == 50 * 1024


def test_a_gap_is_filled_by_the_largest_buffer_that_fits() -> None:
    around = [
        Lifetime("low", 512, 0, 9),
        Lifetime("middle", 1024, 0, 4),
        Lifetime("high", 256, 0, 9),
    ]
    later = [Lifetime("into the gap", 1024, 5, 9)]
    assert arena(around + later).nbytes == arena(around).nbytes == 1792


def test_too_many_buffers_to_place_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BUFFERS", 2)
    with pytest.raises(UnsupportedError, match="prefill step"):
        arena([Lifetime("x", 1, 0, 1)] * 3)


def call(phase: str = "first_chunk", **ends: tuple[int, ...]) -> Call:
    """A weight times the tokens, reshaped, added to itself and written into a cache."""
    arrays = (
        Array((4,), "BF16", "weight", "w"),
        Array((1, 4), "I32", "tokens"),
        Array((8,), "BF16", "cache", "0.keys"),
        Array((100,), "BF16"),  # 3: product
        Array((10, 10), "BF16"),  # 4: the same, in another shape
        Array((10, 10), "BF16"),  # 5: sum
        Array((8,), "BF16"),  # 6: the cache, written
        Array((), "F32", "constant"),
    )
    nodes = (
        Node("Multiply", (0, 1), (3,)),
        Node("Reshape", (3,), (4,)),
        Node("Add", (4, 7), (5,)),
        Node("SliceUpdate", (2, 5), (6,)),
    )
    ends = {"evaluated": (6,), "held": (6,), **ends}
    return Call(phase, 4, 0, arrays, nodes, ends["evaluated"], ends["held"])  # type: ignore[arg-type]


def test_views_share_their_input_and_writes_share_their_cache() -> None:
    need = needs(call())
    assert need.intermediates == (Lifetime("Multiply", 200, 0, 2), Lifetime("Add", 200, 2, 3))
    assert (need.input_bytes, need.constant_bytes, need.output_bytes) == (16, 4, 0)


def test_the_sampled_token_is_an_output() -> None:
    need = needs(call("decode", evaluated=(5,), held=(5, 6)))
    assert [buffer.operation for buffer in need.intermediates] == ["Multiply"]
    assert need.output_bytes == 200


def recorded() -> Trace:
    path = EXAMPLES / "tiny-qwen3.trace.json"
    return from_json(path.read_bytes(), path)


CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def planned(tokens: int = 2000, **environment: str) -> StaticPlan:
    model = build_model(CONFIG, "config.json")
    return plan_static(recorded(), model, name="m", context_tokens=tokens, environment=environment)


def test_kv_bytes_equal_foundrys_count() -> None:
    # Foundry's test: d 512, 8 heads, 2 of keys and values, 4 layers, 2048 tokens.
    assert kv_capacity_bytes(build_model(CONFIG, "config.json"), 2048) == 4_194_304


def test_cosine_and_sine_tables_are_half_a_head_wide() -> None:
    # Foundry: [capacity, head_dim / 2] of F16, twice.
    assert rope_table_bytes(build_model(CONFIG, "config.json"), 2048) == 2 * 2048 * 32 * 2


@pytest.mark.parametrize(("tokens", "capacity"), [(1, 128), (128, 128), (129, 256), (2000, 2048)])
def test_capacity_is_a_multiple_of_128(tokens: int, capacity: int) -> None:
    # Foundry's tests: 127 and 128 make 128, 129 and 200 make 256.
    assert planned(tokens).capacity_tokens == capacity


def test_any_value_of_the_variable_enables_sharing() -> None:
    # Foundry only checks whether METALLIC_KV_CACHE_SHARED is set.
    plain, shared = planned(), planned(METALLIC_KV_CACHE_SHARED="0")
    modes = {each.name: each.mode for each in plain.provisions}
    assert {name for name, mode in modes.items() if mode == "shared"} == {
        "inputs",
        "outputs",
        "staging",
    }
    assert shared.shared_bytes - plain.shared_bytes == 4_194_304
    assert plain.private_bytes - shared.private_bytes == 4_194_304


def test_permanent_parts_add_up_and_staging_is_released() -> None:
    plan = planned()
    lasting = [each.nbytes for each in plan.provisions if each.lasting]
    assert plan.private_bytes + plan.shared_bytes == sum(lasting)
    staging = next(each for each in plan.provisions if each.name == "staging")
    weights = recorded().weights
    assert staging.nbytes == max(weights.values())
    assert plan.loading_bytes == sum(weights.values()) + staging.nbytes


def test_the_arena_of_a_recorded_chunk_is_its_peak_moment() -> None:
    # SwiGLU of 32 tokens: gate, up and their product of 768, and the residual.
    plan = planned()
    first = plan.calls[0]
    assert (first.phase, first.tokens) == ("first_chunk", 32)
    assert plan.arena_bytes == first.arena_bytes >= 3 * 32 * 768 * 2
    assert first.arena_bytes == first.lower_bound_bytes
    assert sum(place.last >= place.first for place in plan.placements) == first.buffers


def test_a_decode_step_needs_less_than_a_chunk() -> None:
    calls = {call.phase: call for call in planned().calls}
    assert calls["decode"].arena_bytes < calls["first_chunk"].arena_bytes // 10


def test_a_trace_of_another_model_is_rejected() -> None:
    model = build_model({**CONFIG, "model_type": "qwen2", "head_dim": None}, "config.json")
    with pytest.raises(InputError, match="the trace is of qwen3"):
        plan_static(recorded(), model, name="m", context_tokens=1, environment={})


def test_a_trace_without_a_call_is_rejected() -> None:
    trace = Trace("qwen3", "metal", {}, {}, ())
    with pytest.raises(InputError, match="no call"):
        plan_static(
            trace, build_model(CONFIG, "config.json"), name="m", context_tokens=1, environment={}
        )


def test_recurrent_states_are_allocated_in_addition_to_keys_and_values() -> None:
    sample = Path(__file__).parents[2] / "sample_configs" / "qwen3-next-80b-a3b-4bit.yaml"
    model = build_model(open_checkpoint(str(sample)).config, "config.json")
    trace = Trace("qwen3_next", "metal", {}, {"w": 8}, (call(),))
    plan = plan_static(trace, model, name="m", context_tokens=128, environment={})
    sizes = {each.name: each.nbytes for each in plan.provisions}
    assert sizes["states"] == 77_266_944
    assert sizes["kv_cache"] == 128 * 24_576


MIB = 2**20


@pytest.mark.parametrize(
    ("sizes", "nbytes", "wasted"),
    [
        ([], 0, 0),
        ([1], 256, 255),
        ([100, 100], 256, 56),
        ([200, 100], 512, 212),
        ([300], 300, 0),
        ([200, 300, 50], 256 + 300 + 256, 262),
    ],
)
def test_a_pool_fills_chunks_of_256_mib_and_frees_nothing(
    sizes: list[int], nbytes: int, wasted: int
) -> None:
    unit = MIB if sizes != [1] else 1
    buffers = [Lifetime("x", size * unit, step, step) for step, size in enumerate(sizes)]
    found = pool(buffers)
    if unit == 1:
        assert found == (POOL_CHUNK_BYTES, POOL_CHUNK_BYTES - 1)
    else:
        assert found == (nbytes * MIB, wasted * MIB)


@given(LIFETIMES)
def test_a_pool_and_mlx_take_at_least_what_is_alive_at_once(buffers: list[Lifetime]) -> None:
    alive = max(
        (
            sum(each.nbytes for each in buffers if each.first <= step <= each.last)
            for step in range(32)
        ),
        default=0,
    )
    assert pool(buffers).nbytes >= sum(each.nbytes for each in buffers)
    for backend in ("metal", "cpu"):
        taken = by_mlx(buffers, backend)
        # A reused buffer wastes less than two pages, and less than itself.
        assert alive <= taken <= sum(each.nbytes for each in buffers) + 3 * 16384 * len(buffers)


def test_mlx_reuses_a_freed_buffer_of_nearly_the_same_size() -> None:
    chain = [Lifetime("x", MIB, step, step) for step in range(5)]
    assert by_mlx(chain, "metal") == MIB
    assert by_mlx([Lifetime("x", 100_000, 0, 1), Lifetime("y", 100_000, 1, 1)], "metal") == 229_376
