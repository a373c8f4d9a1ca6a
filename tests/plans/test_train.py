"""Plans of fine-tuning, compared with mlx-lm's own trainer, parser and data sets."""

import gc
import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit.estimators.base.dtypes import converted
from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.workload import Recipe
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.machine.devices import find_device, working_set_device
from memfit.estimators.mlx.versions import MlxVersions
from memfit.estimators.plans.train.commands import train_commands
from memfit.estimators.plans.train.plan import plan_train
from memfit.estimators.plans.train.question import Example, TrainQuestion, longest_batch
from memfit.estimators.plans.train.recipe_file import read_recipe
from memfit.estimators.results.train import TrainPlan
from memfit.estimators.sizing.opening import size
from memfit.estimators.sizing.run_limits import training_buffers
from memfit.estimators.sizing.search import most_fitting
from memfit.estimators.sizing.training_steps import TracedSteps
from memfit.estimators.trace.libraries import versions
from memfit.probes.training_data import read_training_data
from tests.oracle import Oracle
from tests.selection import quick

pytest.importorskip("mlx_lm")
CASES = Path(__file__).parents[1] / "arch" / "cases"
DEVICE = working_set_device(20 * 10**6)
SMALL = str(CASES / "qwen3.json")


@pytest.fixture(scope="module")
def planned() -> TrainPlan:
    sized = size(open_checkpoint(SMALL), device=DEVICE, margin_bytes=0)
    return plan_train(sized, TrainQuestion(recipe=Recipe(num_layers=-1, max_seq_length=257)))


def test_the_parts_add_up_to_the_peak(planned: TrainPlan) -> None:
    memory = planned.memory
    parts = (getattr(memory, name) for name in memory.__struct_fields__)
    assert sum(parts) == 2 * memory.peak_bytes
    phases = planned.phases
    assert memory.peak_bytes == max(
        *(phases.first_step_bytes, phases.later_steps_bytes, phases.validation_bytes or 0)
    )


def test_a_plan_names_the_versions_that_it_used() -> None:
    installed = versions()
    older = MlxVersions(mlx=(0, 31, 0), mlx_lm=(0, 31, 0))
    sized = size(open_checkpoint(SMALL), device=None, versions=older)
    plan = plan_train(sized, TrainQuestion(recipe=Recipe(num_layers=1, max_seq_length=64)))
    assert plan.versions == {**installed, "mlx rules": "0.31.0"}
    assert f"mlx-lm {installed['mlx-lm']}, by the rules of mlx 0.31.0" in plan.assumptions[0]
    [note] = [note for note in plan.notes if note.code == "other-classes"]
    assert f"mlx-lm {installed['mlx-lm']}, which is installed, not of 0.31.0" in note.message


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", [Recipe(num_layers=2), Recipe(fine_tune_type="full")])
def test_each_change_takes_what_its_own_plan_says(recipe: Recipe) -> None:
    sized = size(open_checkpoint(SMALL), device=None, margin_bytes=0)
    asked = replace(recipe, num_layers=2, batch_size=2, max_seq_length=257)
    knobs = plan_train(sized, TrainQuestion(recipe=asked)).knobs
    for knob in knobs:
        settings = dict(knob.settings)
        bits = settings.pop("weight_bits", None)
        changed = replace(asked, **settings)
        if "batch_size" in settings:
            changed = asked.in_batches(settings["batch_size"])
        quantize = converted(bits) if bits else None
        model = size(open_checkpoint(SMALL), device=None, margin_bytes=0, quantize=quantize)
        again = plan_train(model, TrainQuestion(recipe=changed, quantize=quantize))
        assert again.needed_bytes == knob.peak_bytes, settings
    assert len(knobs) >= 4


def test_what_is_said_to_fit_fits_and_one_more_does_not(planned: TrainPlan) -> None:
    assert planned.limits is not None
    assert planned.verdict == "exceeds"
    layers = planned.limits.num_layers
    sized = size(open_checkpoint(SMALL), device=DEVICE, margin_bytes=0)
    for count in {layers, layers + 1} & {1, 2, 3}:
        recipe = replace(planned.recipe, num_layers=count)
        need = TracedSteps(sized.checkpoint, "BF16", DEVICE, MlxVersions()).peak(recipe, 257)
        assert (need.later.nbytes <= DEVICE.working_set_bytes) is (count == layers)


@pytest.mark.exhaustive
def test_a_loop_over_too_many_tokens_to_trace_is_continued() -> None:
    sized = size(open_checkpoint(str(CASES / "qwen3_5.json")), device=None, margin_bytes=0)
    asked = Recipe(num_layers=2, batch_size=1, max_seq_length=4097, grad_checkpoint=True)
    plan = plan_train(sized, TrainQuestion(recipe=asked))
    assert (plan.basis, [note.code for note in plan.notes]) == ("derived", ["token-loop"])
    half = next(knob for knob in plan.knobs if "max_seq_length" in knob.settings)
    # Each iteration adds an array of all tokens.
    assert half.peak_bytes < plan.needed_bytes // 3


@pytest.mark.exhaustive
def test_an_action_fits_and_none_of_its_settings_can_be_left_out(planned: TrainPlan) -> None:
    [action] = planned.actions
    assert action.verdict != "exceeds"
    asked = Recipe(num_layers=-1, max_seq_length=257)
    for name in action.settings:
        others = {key: value for key, value in action.settings.items() if key != name}
        bits = others.pop("weight_bits", None)
        changed = asked.in_batches(int(others.pop("batch_size", asked.batch_size)))
        quantize = converted(bits) if bits else None
        sized = size(open_checkpoint(SMALL), device=DEVICE, margin_bytes=0, quantize=quantize)
        question = TrainQuestion(recipe=replace(changed, **others), quantize=quantize)
        assert plan_train(sized, question).verdict == "exceeds", name


def test_changes_are_shown_with_what_costs_no_quality_first(planned: TrainPlan) -> None:
    assert [knob.cost for knob in planned.knobs] == sorted(
        (knob.cost for knob in planned.knobs), key=["none", "speed", "quality"].index
    )


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(),
        Recipe(fine_tune_type="full", num_layers=-1, grad_checkpoint=True),
        Recipe(rank=16, keys=("self_attn.q_proj",), optimizer="muon", mask_prompt=True),
    ],
)
def test_mlx_lm_reads_the_commands_as_the_recipe(recipe: Recipe, tmp_path: Path) -> None:
    lora = pytest.importorskip("mlx_lm.lora")
    *before, command = train_commands("org/m", recipe, data="d", quantize=converted(4))
    arguments = vars(lora.build_parser().parse_args(shlex.split(command)[1:]))
    assert arguments["model"] == "mlx_model"
    if len(before) == 2:
        text = shlex.split(before[1])[1].replace("\\n", "\n")
        (tmp_path / "lora.yaml").write_text(text)
        arguments["config"] = str(tmp_path / "lora.yaml")
    given = {key: value for key, value in arguments.items() if key in Recipe.__struct_fields__}
    path = arguments["config"]
    assert read_recipe(Path(path) if path else None, given) == recipe


def test_the_longest_batch_is_the_trainers(tmp_path: Path) -> None:
    trainer = pytest.importorskip("mlx_lm.tuner.trainer")
    datasets = pytest.importorskip("mlx_lm.tuner.datasets")

    class Counted:
        """Data with as many tokens as a line says."""

        def __init__(self, rows: list[dict[str, Any]]) -> None:
            self.rows = rows

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> dict[str, Any]:
            return self.rows[index]

        def process(self, row: dict[str, Any]) -> tuple[list[int], int]:
            return [1] * row["tokens"], 0

    numbers = np.random.default_rng(0)
    for _ in range(30):
        count, batch = int(numbers.integers(4, 12)), int(numbers.integers(1, 5))
        rows = [
            {"tokens": int(tokens)} | ({"tools": 1} if tokens % 3 else {})
            for tokens in numbers.integers(2, 300, count)
        ]
        recipe = Recipe(batch_size=batch, max_seq_length=200)
        made = trainer.iterate_batches(datasets.CacheDataset(Counted(rows)), batch, 200)
        longest = max(tokens.shape[1] for tokens, _ in made)
        examples = [Example(row["tokens"], len(row)) for row in rows]
        assert longest_batch(examples, recipe, "data") == longest


@given(st.integers(1, 200), st.integers(1, 6), st.integers(0, 10**7), st.integers(1, 200))
def test_the_largest_value_is_found(count: int, power: int, limit: int, known: int) -> None:
    values = range(1, count + 1)
    right = max((value for value in values if value**power <= limit), default=0)
    assert most_fitting(values, lambda value: value**power, limit, [known]) == right


def test_options_come_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "lora.yaml"
    path.write_text(
        "model: m\nbatch_size: 2\nnum_layers: 8\nlora_parameters:\n  rank: 4\n  scale: 10.0\n"
        "  dropout: 0.1\n  keys: [mlp.gate]\n"
    )
    assert read_recipe(path, {"batch_size": 1, "rank": None}) == Recipe(
        batch_size=1, num_layers=8, rank=4, scale=10.0, dropout=0.1, keys=("mlp.gate",)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_size: two\n", "lora.yaml:1: batch_size: expected an integer, got 'two'"),
        ("batch_sise: 2\n", "lora.yaml:1: batch_sise: no such key"),
        ("lora_parameters:\n  rank: 8\n", "lora.yaml:1: lora_parameters.scale: missing"),
        ("max_seq_length: 0\n", "max_seq_length"),
        ("fine_tune_type: qlora\n", "fine_tune_type: 'qlora' is not one of the values"),
    ],
)
def test_a_mistake_in_the_file_has_its_place(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "lora.yaml").write_text(text)
    with pytest.raises(InputError) as raised:
        read_recipe(tmp_path / "lora.yaml", {})
    assert message in str(raised.value)


def test_bytes_are_counted_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "' + "a" * 299 + '"}\n\n{"text": "é"}\n')
    data = read_training_data(tmp_path, None, {}, mask_prompt=False)
    assert data.train == (Example(100, 1), Example(1, 1))
    assert not data.valid
    assert not data.is_tokenized
    (tmp_path / "valid.jsonl").write_text("[1]\n")
    with pytest.raises(InputError, match=r"valid\.jsonl: line 1 is not a JSON object"):
        read_training_data(tmp_path, None, {}, mask_prompt=False)


def test_a_class_without_a_gradient_is_refused_in_one_line() -> None:
    checkpoint = open_checkpoint(str(CASES / "rwkv7.json"))
    with pytest.raises(UnsupportedError) as raised:
        plan_train(size(checkpoint, device=None), TrainQuestion(recipe=Recipe(num_layers=-1)))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", quick(("qwen3", "llama", "falcon_h1"), ("qwen3",)))
def test_compiled_steps_keep_as_many_constants_as_the_trace_counts(name: str) -> None:
    """By the bytes in use after each further length of a real run of the trainer's step."""
    from functools import partial

    import mlx.core as mx
    from mlx import nn, optimizers
    from mlx_lm.tuner.trainer import default_loss
    from mlx_lm.tuner.utils import linear_to_lora_layers

    recipe = Recipe(num_layers=2, max_seq_length=257, rank=4)
    config = json.loads((CASES / f"{name}.json").read_text())
    model = Oracle(config, "BF16").model
    model.freeze()
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 20.0, "dropout": 0.0})
    model.train()
    optimizer = optimizers.Adam(learning_rate=1e-5)
    state = [model.state, optimizer.state, mx.random.state]
    loss = nn.value_and_grad(model, default_loss)

    @partial(mx.compile, inputs=state, outputs=state)
    def step(batch: mx.array, lengths: mx.array) -> Any:
        (value, count), gradients = loss(model, batch, lengths)
        optimizer.update(model, gradients)
        return value, count

    before = mx.set_cache_limit(0)
    try:
        active = []
        for tokens in (33, 65, 97, 129):
            mx.eval(state, step(mx.ones((1, tokens), mx.int32), mx.array([[0, tokens - 1]])))
            gc.collect()
            active.append(mx.get_active_memory())
    finally:
        mx.set_cache_limit(before)
    grown = {after - before for before, after in itertools.pairwise(active[1:])}
    sized = size(open_checkpoint(str(CASES / f"{name}.json")), device=find_device("m4-max-64"))
    plan = plan_train(sized, TrainQuestion(recipe=recipe))
    (row,) = plan.run_limits
    # 33, 65, ... 225, and 257.
    lengths = 8
    kept = (row.figure - training_buffers(0, 0, 0).figure) // lengths
    # Scalars of two and four bytes; some of the step's are made outside of what is recorded.
    assert len(grown) == 1
    assert grown.pop() / 4 <= kept <= 40
    assert (row.verdict, row.unit) == ("fits", "buffers")


def test_many_lengths_with_many_constants_are_tight() -> None:
    """494 for each of 1,010 lengths: unsloth-zoo 918, mlx 4464."""
    few, many = (training_buffers(700, lengths, 494) for lengths in (64, 1010))
    assert (few.verdict, many.verdict) == ("fits", "tight")
    assert many.figure == pytest.approx(many.limit, rel=0.01)
