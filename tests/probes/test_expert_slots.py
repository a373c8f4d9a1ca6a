"""Real models of mlx-lm with a part of their experts in memory, in this process."""

import json
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import convert, to_builtins

from memfit.estimators.base.errors import (
    CheckpointError,
    InputError,
    MachineError,
    UnsupportedError,
)
from memfit.estimators.base.units import Units
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import fingerprint_of
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.machine.device import Device
from memfit.probes.agreement import Agreement
from memfit.probes.experts import prepacked
from memfit.probes.experts.answer import chosen_point, start_up_warnings
from memfit.probes.experts.planned import difference_report, plan_of
from memfit.probes.experts.result import ExpertsPoint, PlannedFigure
from memfit.probes.experts.runner import ExpertRunner, ExpertSetup
from memfit.probes.experts.skipped import outputs_class
from memfit.probes.experts.slots import Policy
from memfit.probes.process import ModelProcess
from tests.checkpoints import CASES, UNDESCRIBED, Checkpoints, Recipe, config_of, save_checkpoint
from tests.fuzz.readers import READERS
from tests.selection import quick

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm", reason="the models that run are mlx-lm's")

# Token ids in place of texts: no tokenizer has to be trained.
PROMPTS = [[*range(3, 43)], [5, 7, 11] * 4]
STEP, TOKENS = 16, 4
RUN = Workload(prompt_tokens=40, max_tokens=TOKENS, prefill_step=STEP)
HOST = Device("this host", "cpu", 2**40, 2**40, None, "flag")
FIGURES = ("weights", "startup", "prefill_peak", "decode_peak")
EMPTY: dict[str, Any] = {
    **dict.fromkeys(("reason", "load_ns", "speed", "prefill", "decode", "agreement")),
    **dict.fromkeys(("pinned_slots", "profiled_slots", "filler_slots", "coverage_percent"), 0),
    **{"capacity": 2, "status": "measured", "measurement_id": None},
}
# An array takes whole pages or cache lines, and tables of slots have some bytes for an expert.
ROUNDING = 4096


# DBRX has no stacked experts, muse_spark has kernels in Metal, and bailing_moe_linear is slow.
NOT_HERE = {"dbrx", "muse_spark", "bailing_moe_linear"}


def with_experts() -> Iterator[str]:
    """Every class of mlx-lm with experts, described by memfit or not."""
    described = sorted(path.stem for path in CASES.glob("*.json"))
    for name in dict.fromkeys([*described, *UNDESCRIBED]):
        text = json.dumps(config_of(name))
        is_sparse = re.search(r'"\w*experts"|"moe_num_experts', text) and "dense" not in name
        if is_sparse and name not in NOT_HERE:
            yield name


def runner(path: Path, **setup: Any) -> ExpertRunner:
    found = ExpertRunner(path, None, lambda figures: None, ExpertSetup(**setup))
    found._prompts = PROMPTS
    found.choose(0)
    return found


def slots_of(path: Path, capacity: int, policy: Policy, layers: int, **more: Any) -> ExpertRunner:
    """A loaded model with the first experts of each layer."""
    kept = (tuple(range(capacity)),) * layers
    found = runner(path, mode="slots", kept=kept, pinned=((),) * layers, policy=policy, **more)
    found.load()
    return found


class Full:
    """The full model's routing and logits."""

    def __init__(self, path: Path, reference: Path) -> None:
        self.path, self.reference = path, reference
        whole = runner(path, mode="full")
        self.loaded = whole.load()
        self.layers = whole.layers()[0]
        self.routing = whole.routing((0, 1), STEP)
        whole.choose(0)
        whole.save_reference(reference, TOKENS, STEP)

    def agreement(self, other: ExpertRunner) -> Agreement:
        other.choose(0)
        return other.agreement(self.reference, TOKENS, STEP)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[tuple[str, int | None, bool], Full] = {}

    def of(name: str, bits: int | None = 4, *, plants_routers: bool = False) -> Full:
        key = (name, bits, plants_routers)
        if key not in made:
            path = tmp_path_factory.mktemp(name)
            recipe = Recipe(name, bits, has_tokenizer=False, plants_routers=plants_routers)
            save_checkpoint(path, recipe)
            made[key] = Full(path, path / "reference.safetensors")
        return made[key]

    return of


@pytest.mark.parametrize("name", quick(list(with_experts()), ["qwen3_moe"]))
def test_any_capacity_that_reads_what_is_missing_has_the_full_models_logits(
    case: Any, name: str
) -> None:
    full = case(name)
    count, top_k = full.layers[0].experts, full.routing[0].top_k
    for capacity in {top_k} if name in UNDESCRIBED else {top_k, count}:
        found = slots_of(full.path, capacity, "load", len(full.layers))
        assert full.agreement(found).identical


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", quick(list(with_experts()), ["gpt_oss", "bailing_moe", "gemma4_text_experts"])
)
def test_what_is_left_gets_the_weight_of_skipped_experts(case: Any, name: str) -> None:
    full = case(name)
    top_k = full.routing[0].top_k
    found = slots_of(full.path, top_k, "skip", len(full.layers))
    assert full.agreement(found).tokens == TOKENS


def test_scores_of_what_is_left_are_in_their_ratio_and_have_the_same_sum() -> None:
    outputs = mx.array([[[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]]])
    absent, scores = mx.array([[False, True, False]]), mx.array([[0.2, 0.5, 0.3]])
    # 0.2 : 0.3 of 1.0 are 0.4 and 0.6.
    expected = mx.array([[0.4 * 1 + 0.6 * 4, 0.4 * 10 + 0.6 * 40]])
    calls: list[None] = []
    left = outputs_class()(outputs, absent, partial(calls.append, None))
    assert mx.allclose((left * scores[..., None]).sum(axis=-2), expected)
    assert mx.allclose((scores[..., None] * left.astype(mx.float32)).sum(-2), expected)
    assert len(calls) == 2


def test_a_token_without_any_of_its_experts_gets_nothing() -> None:
    outputs, absent = mx.ones((1, 2, 3)), mx.array([[True, True]])
    weighted = outputs_class()(outputs, absent, list) * mx.array([[[0.5], [0.5]]])
    assert mx.array_equal(weighted, mx.zeros((1, 2, 3)))


def test_routers_choose_without_reading_an_expert(case: Any) -> None:
    full = case("qwen3_moe")
    with ModelProcess(
        full.path, experts=ExpertSetup(mode="routers"), timeout_seconds=60
    ) as process:
        loaded = process.load()
    experts = sum(layer.nbytes for layer in full.layers)
    assert loaded.weights_bytes == full.loaded.weights_bytes - experts
    assert loaded.peak_bytes < loaded.weights_bytes + ROUNDING
    alone = runner(full.path, mode="routers")
    alone.load()
    # The first layer with experts sees the same hidden states.
    assert alone.routing((0, 1), STEP)[0] == full.routing[0]


@pytest.mark.exhaustive(daily=True)
def test_tokens_and_prompts_are_counted_apart(case: Any) -> None:
    full = case("gpt_oss")
    for layer in full.routing:
        tokens = sum(count for _, count in layer.tokens)
        assert tokens == layer.top_k * sum(map(len, PROMPTS))
        assert {count for _, count in layer.prompts} <= {1, 2}


@pytest.mark.exhaustive
@pytest.mark.parametrize("capacity", [2, pytest.param(6, marks=pytest.mark.exhaustive)])
def test_weights_and_start_up_are_as_planned(case: Any, capacity: int) -> None:
    full = case("gpt_oss")
    plan = plan_of(open_checkpoint(str(full.path)), HOST, RUN)
    assert not isinstance(plan, str)
    layers = len(full.layers)
    setup = ExpertSetup(
        mode="slots", kept=(tuple(range(capacity)),) * layers, pinned=((),) * layers
    )
    with ModelProcess(full.path, experts=setup, timeout_seconds=60) as process:
        loaded = process.load()
    planned = plan.at([capacity] * layers)
    assert loaded.weights_bytes == planned.weights
    assert planned.startup is not None
    assert abs(loaded.peak_bytes - planned.startup) < ROUNDING


@pytest.mark.exhaustive
@pytest.mark.parametrize("capacity", quick([2, 4, 6], [4]))
def test_16_bits_run_on_the_cpu_as_the_full_model(case: Any, capacity: int) -> None:
    full = case("qwen3_moe", None)
    layers = len(full.layers)
    found = slots_of(full.path, capacity, "load", layers)
    found.choose(1)
    run = found.run(RUN, None)
    assert bool(run.value("decode_repeated")) == (capacity == 2)
    # Other models of these tests may still be in memory.
    above = run.decode_peak_bytes - mx.get_active_memory()
    assert full.agreement(found).identical
    plan = plan_of(open_checkpoint(str(full.path)), HOST, RUN)
    assert not isinstance(plan, str)
    bound, without = (each.at([capacity] * layers) for each in (plan, plan._replace(copies=0)))
    assert bound.decode_peak is not None
    assert without.decode_peak is not None
    assert bound.weights == without.weights is not None
    # A few scalars of a step are not in the formula, nor what MLX's thread frees late under load.
    assert without.decode_peak < above + bound.weights <= bound.decode_peak * 101 // 100


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    quick(["qwen3_moe", "mixtral", "deepseek_v3", "nemotron_h", "granitemoe"], ["qwen3_moe"]),
)
def test_experts_are_read_from_files_as_the_hub_has_them(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    save_checkpoint(path, Recipe(name, shards=3, has_tokenizer=False, is_published=True))
    full = Full(path, tmp_path / "reference.safetensors")
    found = slots_of(path, full.routing[0].top_k, "load", len(full.layers))
    # First, while the slots still hold what they began with.
    assert found.run(RUN, None).value("prefill_reads")
    assert full.agreement(found).identical


def test_experts_that_are_stored_transposed_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "published"
    save_checkpoint(path, Recipe("qwen3_vl_moe", has_tokenizer=False, is_published=True))
    with pytest.raises(UnsupportedError, match=r"gate_proj\.weight: is not stored as the model"):
        slots_of(path, 2, "load", 2)


@pytest.mark.parametrize("capacity", [2, pytest.param(6, marks=pytest.mark.exhaustive)])
@pytest.mark.exhaustive(daily=True)
def test_start_up_from_files_as_the_hub_has_them_is_as_planned(
    tmp_path: Path, capacity: int
) -> None:
    path = tmp_path / "published"
    save_checkpoint(path, Recipe("qwen3_moe", has_tokenizer=False, is_published=True))
    plan = plan_of(open_checkpoint(str(path)), HOST, RUN)
    assert not isinstance(plan, str)
    setup = ExpertSetup(mode="slots", kept=(tuple(range(capacity)),), pinned=((),))
    with ModelProcess(path, experts=setup, timeout_seconds=60) as process:
        loaded = process.load()
    planned = plan.at([capacity]).startup
    assert planned is not None
    assert abs(loaded.peak_bytes - planned) < ROUNDING


def test_a_figure_beyond_its_stated_error_is_reported_without_names(case: Any) -> None:
    plan = plan_of(open_checkpoint(str(case("gpt_oss").path)), HOST, RUN)
    assert not isinstance(plan, str)
    planned = plan.at([2] * len(plan.experts.layers))
    versions = {"mlx": "0.32.4", "mlx_lm": "0.32.2", "backend": "cpu", "device": "a name"}

    def report(**measured: int) -> tuple[str, ...]:
        figures = {
            name: PlannedFigure(nbytes, measured.get(name, nbytes))
            for name, nbytes in zip(FIGURES, planned, strict=True)
        }
        point = convert({**EMPTY, **to_builtins(figures)}, ExpertsPoint)
        return difference_report(plan, [point], RUN, versions)

    assert planned.weights
    assert planned.startup
    assert report() == report(startup=planned.startup + 1) == ()
    lines = report(weights=planned.weights + 1, startup=2 * planned.startup)
    assert lines[0].endswith("mlx 0.32.4, mlx-lm 0.32.2, cpu")
    assert [line.split(": ")[0].rpartition(" ")[2] for line in lines[3:]] == ["weights", "startup"]
    assert "a name" not in "".join(lines)


def test_a_start_up_above_what_mlx_moe_accepts_is_warned_of() -> None:
    def point(capacity: int, startup: int | None, status: str = "measured") -> ExpertsPoint:
        figures = {
            name: PlannedFigure(None, startup if name == "startup" else 1) for name in FIGURES
        }
        changes = {"capacity": capacity, "status": status}
        return convert({**EMPTY, **to_builtins(figures), **changes}, ExpertsPoint)

    # mlx-moe warns above 95 % of the working set.
    points = [point(2, 95), point(3, 96), point(4, None, "skipped")]
    assert list(start_up_warnings(points, 100, Units.GB)) == [
        "3 experts: the start-up takes 96 B, more than 95 % of the working set (95 B)"
    ]
    assert chosen_point(points, 2) is points[0]
    assert chosen_point(points, None) is chosen_point(points, 4) is points[1]
    assert chosen_point(points[2:], 4) is None


def test_a_missing_expert_is_an_error_if_the_user_says_so(case: Any) -> None:
    full = case("qwen3_moe")
    found = slots_of(full.path, 2, "fail", len(full.layers))
    with pytest.raises(MachineError, match=r"layer 1 needs expert \d, which has no slot"):
        found.run(RUN, None)


@pytest.mark.exhaustive(daily=True)
def test_misses_and_reads_are_counted_for_each_phase(case: Any) -> None:
    full = case("gpt_oss")
    run = slots_of(full.path, 2, "load", len(full.layers)).run(RUN, None)
    assert run.value("prefill_tokens") == RUN.prompt_tokens - 1
    slot_bytes = full.layers[0].nbytes // full.layers[0].experts
    for phase in ("prefill", "decode"):
        reads, misses = (run.value(f"{phase}_{name}") or 0 for name in ("reads", "misses"))
        assert 0 < reads <= misses
        assert run.value(f"{phase}_read_bytes") == reads * slot_bytes
    complete = slots_of(full.path, full.layers[0].experts, "load", len(full.layers))
    assert complete.run(RUN, None).value("decode_reads") is None


def test_a_pinned_expert_never_leaves(case: Any) -> None:
    full = case("gpt_oss")
    kept, layers = ((0, 1, 2),), len(full.layers)
    found = runner(full.path, mode="slots", kept=kept * layers, pinned=((1,),) * layers)
    found.load()
    found.run(RUN, None)
    for switch in found._switches:
        assert 1 in switch.module.slots.slots.slot_of
        assert len(switch.module.slots.slots.slot_of) == 3


def test_a_dense_model_has_no_experts(checkpoints: Checkpoints) -> None:
    with pytest.raises(InputError, match="no layer has routed experts"):
        runner(checkpoints("no-tokenizer"), mode="routers").load()


def packed(full: Full, directory: Path) -> prepacked.Manifest:
    layers = len(full.layers)
    manifest = prepacked.Manifest(
        fingerprint=fingerprint_of(open_checkpoint(str(full.path))),
        revision=None,
        source=prepacked.source_files(full.path),
        profile_sha256="0" * 64,
        kept=((0, 1, 2),) * layers,
        pinned=((),) * layers,
        files=(),
    )
    found = slots_of(full.path, 3, "load", layers)
    found.pack(directory, manifest)
    return prepacked.read(directory)


def test_prepacked_experts_are_the_chosen_ones(case: Any, tmp_path: Path) -> None:
    full, directory = case("gpt_oss"), tmp_path / "pack"
    manifest = packed(full, directory)
    prepacked.check(directory, manifest, full.path, manifest.fingerprint)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pack"]
    found = slots_of(full.path, 3, "load", len(full.layers), pack=str(directory))
    assert full.agreement(found).identical


@pytest.mark.parametrize("name", [prepacked.EXPERTS, prepacked.OTHERS])
def test_a_damaged_file_is_refused_by_name(case: Any, tmp_path: Path, name: str) -> None:
    full, directory = case("gpt_oss"), tmp_path / "pack"
    manifest = packed(full, directory)
    content = bytearray((directory / name).read_bytes())
    content[-1] ^= 1
    (directory / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name}: is damaged"):
        prepacked.check(directory, manifest, full.path, manifest.fingerprint)


def test_a_changed_source_is_refused_by_name(case: Any, tmp_path: Path) -> None:
    full, directory = case("gpt_oss"), tmp_path / "pack"
    manifest, source = packed(full, directory), tmp_path / "source"
    source.mkdir()
    shutil.copy(full.path / "model.safetensors", source)  # with a new time
    with pytest.raises(CheckpointError, match=r"model\.safetensors: has changed since"):
        prepacked.check(directory, manifest, source, manifest.fingerprint)
    with pytest.raises(CheckpointError, match="fingerprint: it is of another model"):
        prepacked.check(directory, manifest, full.path, "0" * 64)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("files", []),
        ("kept", [[0, 1], [0]]),
        ("kept", [[0, 0], [0, 1]]),
        ("pinned", [[0]]),
        ("pinned", [[3], []]),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused_by_key(
    tmp_path: Path, key: str, value: list[Any]
) -> None:
    values = json.loads(READERS["pack"].seed)
    (tmp_path / prepacked.MANIFEST).write_text(json.dumps(values))
    manifest = prepacked.read(tmp_path)
    with pytest.raises(InputError, match="kept: the model has other experts"):
        prepacked.require_layers(tmp_path, manifest, (4, 3))
    prepacked.require_layers(tmp_path, manifest, (4, 4))
    (tmp_path / prepacked.MANIFEST).write_text(json.dumps({**values, key: value}))
    with pytest.raises(InputError, match=f"{prepacked.MANIFEST}: {key}: expected"):
        prepacked.read(tmp_path)


def test_what_is_there_is_not_replaced(case: Any, tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "mine").touch()
    with pytest.raises(InputError, match="pack: exists; remove it"):
        packed(case("gpt_oss"), tmp_path / "pack")
    assert [path.name for path in (tmp_path / "pack").iterdir()] == ["mine"]


def test_a_full_disk_is_refused_before_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="of which a fifth stays"):
        prepacked.require_room(tmp_path / "pack", shutil.disk_usage(tmp_path).free)
