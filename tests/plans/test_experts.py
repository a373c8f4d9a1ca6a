"""Experts partly in memory, compared with mlx-moe's figures for Qwen3-Coder-Next on 32 GB."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from memfit.cli.render.document import Verdict
from memfit.cli.render.views.plan_experts import to_document
from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.units import Units, format_bytes
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.machine.device import Device, OsRegime
from memfit.estimators.machine.devices import find_device, memory_device
from memfit.estimators.plans.experts.plan import (
    ExpertQuestion,
    measured_worth,
    plan_experts,
    universal_share,
)
from memfit.estimators.plans.experts.routing import RoutingProfile
from memfit.estimators.results.experts import ExpertsPlan, MeasuredCapacity
from memfit.estimators.runtimes.expert_capacity import capacity_of_inventory
from memfit.estimators.runtimes.registry import get_runtime
from memfit.estimators.sizing.expert_rules import worth
from memfit.estimators.sizing.opening import size
from memfit.estimators.sizing.partial_experts import RunMemory
from memfit.estimators.weights.expert_slots import Inventory, inventory, startup_bytes
from tests.models import QWEN3_NEXT_80B, quantised_tensors, write_checkpoint, write_config
from tests.selection import QUICK_SAMPLES, quick

SAMPLES = Path(__file__).parents[2] / "sample_configs"
NOTHING = RunMemory(context_tokens=1, kv_bytes=0, state_bytes=0, workspace_bytes=0)

# mlx-moe's models: hidden size, width of an expert, bytes of gate, up and down at 4 bits in
# groups of 64, scales and biases included.
SLOTS = [
    (2048, 512, 1_769_472),
    (2048, 768, 2_654_208),
    (2048, 1536, 5_308_416),
    (4096, 1536, 10_616_832),
    (7168, 2048, 24_772_608),
    (4096, 14336, 99_090_432),
]
# mlx-moe, Qwen3-Coder-Next-4bit on 32 GB: experts of a layer, GB of memory measured.
MEASURED = [(160, 14.98), (192, 17.70), (208, 19.06), (240, 21.77)]
PREDICTED = {160: "15.0 GB", 192: "17.7 GB", 208: "19.1 GB", 240: "21.8 GB"}


def experts_of(path: Path) -> Inventory:
    checkpoint = open_checkpoint(str(path))
    sized = size(checkpoint, device=None)
    return inventory(sized.model, checkpoint.tensors, sized.footprint)


@pytest.fixture(scope="module")
def next_80b() -> Inventory:
    return experts_of(SAMPLES / "qwen3-next-80b-a3b-4bit.yaml")


def planned(experts: Inventory, device: Device | None, **question: Any) -> ExpertsPlan:
    return plan_experts(
        experts,
        ExpertQuestion(question.pop("run", NOTHING), **question),
        model="Qwen3-Next",
        model_type="qwen3_next",
        runtime=get_runtime("mlx-lm"),
        device=device,
    )


def moe_config(hidden: int, width: int, **changes: Any) -> dict[str, Any]:
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": hidden,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "torch_dtype": "bfloat16",
        "quantization": {"group_size": 64, "bits": 4},
    }
    return {**config, **changes}


@pytest.mark.parametrize(("hidden", "width", "slot_bytes"), SLOTS)
def test_a_slot_includes_scales_and_biases(
    tmp_path: Path, hidden: int, width: int, slot_bytes: int
) -> None:
    path = write_config(tmp_path / "model", moe_config(hidden, width)) / "config.json"
    assert experts_of(path).slot_bytes == slot_bytes


def test_weights_split_as_published(next_80b: Inventory) -> None:
    assert (next_80b.expert_bytes, next_80b.non_expert_bytes) == (43_486_543_872, 1_357_516_288)
    assert next_80b.lookup_bytes == 196_608


@pytest.mark.parametrize(("capacity", "measured"), MEASURED)
def test_memory_equals_the_measurement(next_80b: Inventory, capacity: int, measured: float) -> None:
    row = planned(next_80b, None, capacities=(capacity,)).rows[0]
    assert format_bytes(row.weight_bytes, Units.GB) == PREDICTED[capacity]
    assert row.weight_bytes / 1e9 == pytest.approx(measured, rel=0.003)


def test_start_up_peak_and_steady_memory_equal_the_measurement(next_80b: Inventory) -> None:
    # mlx-moe: 23.05 GB while 208 experts are read through mx.load, 19.10 GB after it.
    run = RunMemory(context_tokens=1, kv_bytes=0, state_bytes=77_266_944, workspace_bytes=0)
    row = planned(next_80b, None, capacities=(208,), run=run).rows[0]
    assert round(row.startup_bytes / 1e9, 2) == 23.05
    assert round(row.running_bytes / 1e9, 2) == 19.10


def test_with_every_expert_in_memory_start_up_reads_nothing_twice(next_80b: Inventory) -> None:
    assert startup_bytes(next_80b, [512] * 48) == 44_844_060_160


def test_capacity_follows_the_working_set_of_each_macos_version(next_80b: Inventory) -> None:
    plan = planned(next_80b, find_device("m2-max-32"))
    assert {r.os_regime: r.capacity for r in plan.regimes} == {"macos-15": 168, "macos-26": 208}
    assert plan.capacity == 208


def test_a_chip_newer_than_macos_15_has_one_regime(next_80b: Inventory) -> None:
    plan = planned(next_80b, find_device("m5-32"))
    assert [regime.os_regime for regime in plan.regimes] == ["macos-26"]


def test_more_memory_never_means_fewer_experts(next_80b: Inventory) -> None:
    found = [capacity_of_inventory(next_80b, gigabytes * 10**9) for gigabytes in range(80)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (0, 512)
    assert all(capacity % 8 == 0 for capacity in found if capacity >= 16)


def test_the_capacity_that_fits_includes_start_up(next_80b: Inventory) -> None:
    device = memory_device(32 * 10**9)
    plan = planned(next_80b, device)
    fitting, running = plan.fitting_capacity, plan.fitting_run_capacity
    assert fitting is not None
    assert running is not None
    assert 16 <= fitting < running
    most = device.working_set_bytes * 9 // 10
    assert startup_bytes(next_80b, [fitting] * 48) <= most
    assert startup_bytes(next_80b, [fitting + 8] * 48) > most


@pytest.mark.parametrize(
    ("capacity", "gigabytes", "codes"),
    [
        (184, 32, {"quality"}),
        (192, 32, set()),
        (208, 32, set()),
        (224, 32, {"published-pressure"}),
        (240, 32, {"published-pressure", "pressure"}),
        (224, 64, set()),
    ],
)
def test_published_limits_give_a_warning(
    next_80b: Inventory, capacity: int, gigabytes: int, codes: set[str]
) -> None:
    # mlx-moe: garbled below 192; on 32 GB slower from 224 on; a warning above 95 % of the
    # working set, which the start-up of 240 reaches.
    plan = planned(next_80b, memory_device(gigabytes * 10**9), capacities=(capacity,))
    row = next(row for row in plan.rows if row.capacity == capacity)
    assert set(row.warnings) == codes
    assert codes <= {note.code for note in plan.notes}


def test_pressure_starts_above_95_percent_not_at_it(next_80b: Inventory) -> None:
    need = startup_bytes(next_80b, [208] * 48)
    at = Device("mac", "metal", need, -(-need * 100 // 95), None, "flag")
    below = Device("mac", "metal", need, need * 100 // 95 - 1, None, "flag")
    codes = [planned(next_80b, each, capacities=(208,)).rows for each in (at, below)]
    found = [next(r for r in rows if r.capacity == 208).warnings for rows in codes]
    assert found == [(), ("pressure",)]


def test_the_wired_limit_covers_the_run_but_never_exceeds_the_working_set(
    next_80b: Inventory,
) -> None:
    device = memory_device(32 * 10**9)
    plan = planned(next_80b, device)
    assert plan.chosen is not None
    assert plan.wired_limit_bytes == plan.chosen.running_bytes < device.working_set_bytes
    large = RunMemory(context_tokens=1, kv_bytes=10**11, state_bytes=0, workspace_bytes=0)
    assert planned(next_80b, device, run=large).wired_limit_bytes == device.working_set_bytes


def test_a_machine_too_small_for_one_token_has_no_capacity(next_80b: Inventory) -> None:
    device = Device("small", "metal", 3 * 10**9, 2 * 10**9, None, "flag")
    plan = planned(next_80b, device)
    assert (plan.capacity, plan.fitting_capacity, plan.chosen) == (None, None, None)
    assert "too-few" in {note.code for note in plan.notes}


@pytest.mark.parametrize("capacity", [9, 513])
def test_a_capacity_above_the_experts_of_the_model_is_rejected(
    next_80b: Inventory, capacity: int
) -> None:
    with pytest.raises(InputError, match=f"capacity {capacity}"):
        planned(next_80b, None, capacities=(capacity,))


def test_without_a_profile_misses_are_by_chance(next_80b: Inventory) -> None:
    row = planned(next_80b, None, capacities=(256,), bytes_per_second=3_500_000_000).rows[0]
    # Half of 10 experts in each of 48 layers.
    assert (row.misses.misses_per_token, row.misses.coverage_percent) == (240.0, 50.0)
    assert row.misses.disk_bytes_per_token == 240 * 1_769_472
    assert row.misses.disk_microseconds_per_token == 121_336
    assert row.misses.basis == "bound"


def test_every_slot_is_pinned_or_cached_or_filled(next_80b: Inventory) -> None:
    counts = tuple(20 if e < 30 else 3 if e < 100 else 0 for e in range(512))
    profile = RoutingProfile((counts,) * 48, prompts=40)
    rows = planned(next_80b, None, capacities=(16, 64, 208), profile=profile).rows
    slots = [(r.pinned_slots, r.found_slots, r.filler_slots) for r in rows]
    assert slots == [(16 * 48, 0, 0), (30 * 48, 34 * 48, 0), (30 * 48, 70 * 48, 108 * 48)]


def test_capacities_by_layer_never_miss_more_than_equal_ones(next_80b: Inventory) -> None:
    even, steep = tuple(range(1, 513)), (1000,) * 20 + (1,) * 492
    profile = RoutingProfile((even, steep) * 24)
    plan = planned(next_80b, memory_device(32 * 10**9), profile=profile)
    assert plan.adaptive is not None
    assert plan.chosen is not None
    assert plan.adaptive.expert_bytes <= plan.chosen.expert_bytes
    assert plan.adaptive.misses.misses_per_token < plan.chosen.misses.misses_per_token
    assert plan.adaptive.capacities[0] > 208 > plan.adaptive.capacities[1]


# mlx-moe README, "Which Models Benefit?"
@pytest.mark.parametrize(
    ("sample", "universal", "pays"),
    [
        ("qwen3-next-80b-a3b-4bit", 15, True),
        ("qwen3-next-80b-a3b-4bit", 95, False),
        ("qwen3-next-80b-a3b-4bit", None, None),
        ("qwen3-30b-a3b-4bit", 14, False),
        ("gpt-oss-20b", 15, False),
    ],
)
def test_offloading_needs_many_experts_a_shared_one_and_concentrated_routing(
    sample: str, universal: int | None, pays: bool | None
) -> None:
    experts = experts_of(SAMPLES / f"{sample}.yaml")
    profile = None
    if universal is not None:
        often = experts.experts * universal // 100
        counts = (10,) * often + (1,) * (experts.experts - often)
        profile = RoutingProfile((counts,) * len(experts.layers), prompts=20)
    assert worth(experts, universal_share(profile), experts.top_k).pays is pays


def test_a_model_that_fits_whole_has_nothing_to_offload(next_80b: Inventory) -> None:
    plan = planned(next_80b, find_device("m4-max-128"))
    assert (plan.capacity, plan.worth.pays) == (512, False)


def test_all_experts_are_kept_where_start_up_and_run_fit_with_them(next_80b: Inventory) -> None:
    """mlx-moe's own rule keeps 448 of 512 on 64 GB, which leaves out what fits."""
    plan = planned(next_80b, find_device("m4-max-64"))
    assert (plan.capacity, plan.fitting_capacity, plan.worth.pays) == (512, 512, False)
    assert {each.os_regime: each.capacity for each in plan.regimes}["macos-26"] == 448
    [headline] = [
        part.text for part in to_document(plan, Units.GB, plot=False) if isinstance(part, Verdict)
    ]
    assert headline.startswith("All 512 experts fit")


@pytest.mark.parametrize(
    ("gigabytes", "top_k", "caveat"),
    [(24, 10, "writes garbled text"), (48, 10, None), (24, 70, "nearly every token reads others")],
)
def test_the_headline_has_the_caveats_of_the_capacity_that_it_advises(
    next_80b: Inventory, gigabytes: int, top_k: int, caveat: str | None
) -> None:
    layers = tuple(replace(layer, top_k=top_k) for layer in next_80b.layers)
    plan = planned(replace(next_80b, layers=layers), memory_device(gigabytes * 10**9))
    [headline] = [
        part.text for part in to_document(plan, Units.GB, plot=False) if isinstance(part, Verdict)
    ]
    assert (caveat or "; fits.") in headline
    assert ("; but " in headline) == (caveat is not None)


def test_what_was_measured_here_outranks_what_was_published(next_80b: Inventory) -> None:
    often = (10,) * 490 + (1,) * 22
    profile = RoutingProfile((often,) * 48, prompts=20)
    measured = MeasuredCapacity(
        capacity=136,
        policy="load",
        prompt_tokens=64,
        startup_bytes=1,
        peak_bytes=1,
        decode_tokens_per_second=9.5,
        misses_per_token=1.0,
        measurement_id="a",
    )
    small = planned(next_80b, memory_device(24 * 10**9), profile=profile)
    assert small.worth.pays is False
    worth_it = measured_worth(replace(small, measured=(measured,)))
    assert worth_it.pays is True
    assert worth_it.reasons[0].startswith("measured here: 136 of 512 experts decode 9.5 tokens/s")
    whole = planned(next_80b, find_device("m4-max-64"), profile=profile)
    assert measured_worth(replace(whole, measured=(measured,))).pays is None
    assert measured_worth(small) == small.worth


def test_headers_and_config_give_the_same_experts(tmp_path: Path, next_80b: Inventory) -> None:
    pytest.importorskip("mlx_lm", reason="the tensors are those mlx-lm saves")
    config = {**QWEN3_NEXT_80B, "num_hidden_layers": 4, "num_experts": 32}
    config["quantization"] = {"group_size": 64, "bits": 4}
    directory = write_checkpoint(tmp_path / "m", config, quantised_tensors(config, 4), shards=3)
    from_headers = experts_of(directory)
    assert from_headers.basis == "exact"
    assert {layer.slot_bytes for layer in from_headers.layers} == {next_80b.slot_bytes}
    assert [layer.index for layer in from_headers.layers] == [0, 1, 2, 3]
    assert all(piece.stack is None for piece in from_headers.pieces)


def test_experts_in_a_hub_layout_are_read_one_by_one(tmp_path: Path) -> None:
    config = moe_config(64, 64, quantization=None, tie_word_embeddings=False)
    del config["quantization"]
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.embed_tokens.weight": ("BF16", (128, 64))
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        for name in ("q", "k", "v"):
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = ("BF16", (256, 64))
        tensors[f"{prefix}.self_attn.o_proj.weight"] = ("BF16", (64, 256))
        for name in ("q_norm", "k_norm"):
            tensors[f"{prefix}.self_attn.{name}.weight"] = ("BF16", (64,))
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = ("BF16", (64,))
        tensors[f"{prefix}.mlp.gate.weight"] = ("BF16", (8, 64))
        for expert in range(8):
            for name in ("gate", "up", "down"):
                tensors[f"{prefix}.mlp.experts.{expert}.{name}_proj.weight"] = ("BF16", (64, 64))
    tensors["model.norm.weight"] = ("BF16", (64,))
    tensors["lm_head.weight"] = ("BF16", (128, 64))
    experts = experts_of(write_checkpoint(tmp_path / "m", config, tensors))
    assert experts.slot_bytes == 3 * 64 * 64 * 2
    # Experts are read singly, never the whole tensor.
    weights = experts.non_expert_bytes + experts.held_bytes([2, 2])
    assert startup_bytes(experts, [2, 2]) == weights


@pytest.mark.parametrize("name", ["qwen3-4b-4bit", "llama-3.1-8b"])
def test_a_model_without_experts_is_rejected(name: str) -> None:
    with pytest.raises(UnsupportedError, match="routed experts"):
        experts_of(SAMPLES / f"{name}.yaml")


@pytest.mark.parametrize(
    "path", quick(sorted(SAMPLES.glob("*.yaml")), QUICK_SAMPLES), ids=lambda path: path.stem
)
def test_every_sample_with_experts_adds_up(path: Path) -> None:
    try:
        experts = experts_of(path)
    except UnsupportedError:
        return
    sized = size(open_checkpoint(str(path)), device=None)
    assert experts.expert_bytes + experts.non_expert_bytes == sized.footprint.loaded_bytes
    for regime in OsRegime:
        plan = planned(experts, memory_device(64 * 10**9, os_regime=regime))
        running = [row.running_bytes for row in plan.rows]
        assert running == sorted(running)
        assert all(row.filler_slots >= 0 for row in plan.rows)
        assert json.dumps(plan.notes[0].message)
