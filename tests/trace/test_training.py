"""Recorded training steps, compared with MLX's own peaks (benchmarks.training_accuracy)."""

import json
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Recipe, Workload
from memfit.estimators.checkpoint.local.samples import read_sample
from memfit.estimators.machine.device import Backend, Device
from memfit.estimators.machine.devices import find_device
from memfit.estimators.mlx.versions import MLX_VERSION
from memfit.estimators.trace.gradient_stubs import resolved, training_stubs
from memfit.estimators.trace.graph_format import Call
from memfit.estimators.trace.isolation import tracing
from memfit.estimators.trace.kernel_stubs import TraceTarget, library_for
from memfit.estimators.trace.leaves import leaves_of
from memfit.estimators.trace.libraries import changed
from memfit.estimators.trace.recording import record_call
from memfit.estimators.trace.replay import CallReplay
from memfit.estimators.trace.schedule import unmerged
from memfit.estimators.trace.training_peak import LoopGrowth, TrainingPeak, training_peak
from memfit.estimators.trace.training_recorder import Training

pytest.importorskip("mlx_lm")
from memfit.estimators.trace.traced_model import TracedModel

CONFIGS = Path(__file__).parents[1] / "arch" / "cases"
SAMPLES = CONFIGS.parents[2] / "sample_configs"
MEASURED = json.loads((Path(__file__).parent / "training_peaks.json").read_text())
HOST = Device("this host", "cpu", 0, 0, None, "flag")
# One of each kind: the others take longer.
QUICK = {
    ("qwen3", False, None),
    ("gemma2", True, None),
    ("qwen3_moe", False, 4),
    ("deepseek_v2_lite", True, None),
}


def built(name: str, backend: Backend, **options: Any) -> TracedModel:
    return TracedModel(json.loads((CONFIGS / f"{name}.json").read_text()), backend, **options)


def recorded(
    model: TracedModel, backend: Backend, recipe: Recipe, tokens: int = 129, **options: Any
) -> Training:
    return model.record_training(recipe, tokens, TraceTarget(backend=backend), **options)


def followed(run: Training, device: Device) -> TrainingPeak:
    return training_peak(run, device, MLX_VERSION)


def _marked(case: dict[str, Any]) -> Any:
    recipe = case["recipe"]
    kind = case["name"], recipe.get("grad_checkpoint", False), case["bits"]
    is_quick = kind in QUICK and len(recipe) <= 1 and case["tokens"] == 129
    marks = () if is_quick else pytest.mark.exhaustive
    name = "-".join(map(str, (case["name"], case["bits"], case["dtype"], *recipe.values())))
    return pytest.param(case, id=name, marks=marks)


@pytest.mark.parametrize("case", [_marked(case) for case in MEASURED["cases"]])
def test_the_largest_step_is_as_measured(case: dict[str, Any]) -> None:
    bits = case["bits"]
    model = built(
        case["name"],
        "cpu",
        dtype=case["dtype"],
        quantize=Quantization(bits, MEASURED["group_size"]) if bits else None,
    )
    recipe = Recipe(**{"num_layers": -1, "batch_size": 2, **case["recipe"]})
    run = model.record_training(recipe, case["tokens"], TraceTarget(backend="cpu"))
    largest = max(moment.nbytes for moment in followed(run, HOST).moments)
    assert largest == pytest.approx(case["peak_bytes"], rel=0.05)


def test_a_mac_has_gradient_kernels_and_no_fused_attention_in_a_step() -> None:
    run = recorded(
        built("qwen3", "metal"), "metal", Recipe(num_layers=2), validated=97, is_whole=True
    )
    names = {phase: [node.name for node in call.nodes] for phase, call, _ in run.calls}
    assert list(names) == ["validation", "first", "later"]
    assert "ScaledDotProductAttention" in names["validation"]
    step = names["later"]
    assert "ScaledDotProductAttention" not in step
    # Two norms of heads and two of layers, each layer; no gradient below the first trained layer.
    assert step.count("RMSNorm") == 3 * 4 + 1
    assert step.count("RMSNormVJP") == 2 * 4 - 1 + 1
    assert step.count("RoPE") == 3 * 2 + 2 * 2
    assert not [name for name in step if "memfit" in name]


def test_checkpointing_computes_again_and_holds_less() -> None:
    model = built("qwen3", "cpu")
    plain, less = (
        recorded(model, "cpu", Recipe(num_layers=-1, grad_checkpoint=checkpointed))
        for checkpointed in (False, True)
    )
    products = [
        sum(node.name == "Matmul" for node in run.calls[-1].call.nodes) for run in (plain, less)
    ]
    assert products[0] < products[1]
    assert followed(less, HOST).later.nbytes < followed(plain, HOST).later.nbytes


@pytest.mark.parametrize(("tokens", "published"), [(2048, 924), (4096, 3408), (8192, 13057)])
def test_attention_and_its_gradient_are_as_published_for_a_mac(tokens: int, published: int) -> None:
    """IonDen/mlx-train-perf, docs/papers/when-the-bottleneck-moved.md: MiB on an M1 Max, causal."""
    import mlx.core as mx

    core, stubs = library_for("metal").core, training_stubs(TraceTarget())
    given: dict[str, Any] = {}

    def run() -> list[Any]:
        def total(q: Any, k: Any, v: Any) -> Any:
            attend = core.fast.scaled_dot_product_attention
            return attend(q, k, v, scale=0.1, mask="causal").astype(mx.float32).sum()

        with changed(core, stubs):
            value, gradients = mx.value_and_grad(total, argnums=(0, 1, 2))(*given["qkv"])
        return [value, *gradients]

    with tracing():
        given["qkv"] = [mx.zeros((1, 32, tokens, 128), mx.bfloat16)] * 3
        graph = record_call(run, list(leaves_of(given, "qkv", "cache")))
    arrays = list(graph.arrays)
    nodes, ends = resolved(graph.nodes, graph.outputs, arrays)
    call = Call("first_chunk", 0, 0, tuple(arrays), tuple(nodes), tuple(ends), tuple(ends))
    peak = CallReplay(find_device("m1-max-32"), MLX_VERSION).follow(unmerged(call)).nbytes
    assert peak / 2**20 == pytest.approx(published, rel=0.04)


def test_steps_with_accumulation_keep_gradients() -> None:
    model = built("qwen3", "cpu")
    recipes = (
        Recipe(fine_tune_type="full", num_layers=-1, grad_accumulation_steps=n) for n in (1, 2)
    )
    once, twice = (
        followed(recorded(model, "cpu", recipe, is_whole=True), HOST) for recipe in recipes
    )
    assert twice.later.nbytes >= once.later.nbytes + twice.trained_bytes // 2
    assert once.first is not None
    assert once.first.nbytes < once.later.nbytes


def test_a_training_leaves_the_class_as_it_was() -> None:
    model, fresh = built("qwen3", "metal"), built("qwen3", "metal")
    recorded(model, "metal", Recipe(num_layers=-1, grad_checkpoint=True), validated=65)
    asked = Workload(prompt_tokens=100), TraceTarget()
    assert model.record(*asked) == fresh.record(*asked)


def test_frozen_layers_of_a_loop_over_tokens_are_left_out_without_a_difference() -> None:
    config = dict(read_sample(SAMPLES / "qwen3.5-27b.yaml").config)
    kinds = config["text_config"]["layer_types"][:8]
    text = {**config["text_config"], "num_hidden_layers": 8, "layer_types": kinds}
    recipe = Recipe(num_layers=3, batch_size=1)
    operations, peaks = [], []
    for loops in (False, True):
        model = TracedModel(config | {"text_config": text}, "metal")
        model.loops_in_training = loops
        run = model.record_training(recipe, 9, TraceTarget(), validated=9, is_whole=True)
        operations.append(sum(len(call.call.nodes) for call in run.calls))
        peaks.append(followed(run, find_device("m4-pro-24")))
    assert operations[1] < operations[0]
    whole, less = peaks
    assert (less.frozen_bytes, less.validation) == (whole.frozen_bytes, whole.validation)
    for before, after in zip(whole.moments, less.moments, strict=True):
        assert after.nbytes == pytest.approx(before.nbytes, rel=0.001)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "checkpointed"), [("qwen3_5", True), ("mamba", False)])
def test_a_loop_that_is_continued_takes_about_what_it_does(name: str, checkpointed: bool) -> None:
    model, tokens, few = built(name, "metal"), 97, 36
    model.loops_in_training = True
    recipe = Recipe(num_layers=-1, batch_size=2, grad_checkpoint=checkpointed)
    whole, less, more = (
        recorded(model, "metal", recipe, tokens, iterations=count) for count in (None, few, 2 * few)
    )
    device = find_device("m4-pro-24")
    lacking = tokens - 1 - 2 * few
    growth = LoopGrowth(less, device, MLX_VERSION, added=few, lacking=lacking)
    right = followed(whole, device).later
    bound = training_peak(more, device, MLX_VERSION, growth).later
    assert 0.98 * right.nbytes <= bound.nbytes < 1.25 * right.nbytes
    assert bound.largest_buffer_bytes == right.largest_buffer_bytes


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rwkv7", "rwkv7: mlx-lm cannot train it: one of its operations has no gradient"),
        ("qwen3_next", "qwen3_next: a training step has more operations than can be traced"),
    ],
)
def test_what_cannot_be_traced_is_named(name: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        recorded(built(name, "metal"), "metal", Recipe(num_layers=-1), tokens=4097)
