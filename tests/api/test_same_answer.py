"""The library answers as the command line does."""

import json
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import fields

import memfit as library
from memfit.cli.commands.estimate import EstimateOutput, EstimateReport
from memfit.cli.commands.estimate import estimate as command
from memfit.cli.exits import exit_of
from memfit.cli.options import questions as options
from memfit.cli.options.groups import Options
from memfit.estimators.questions.question import Question, WorkloadQuestion
from memfit.estimators.questions.target import MachineQuestion, ModelQuestion, RuntimeQuestion
from memfit.estimators.results.error import error_report
from memfit.settings import EstimateSettings, MachineSettings, OpenSettings, WorkloadSettings
from tests.cli.running import Memfit
from tests.selection import examples
from tests.sparse import write_adapter

SAMPLES = Path(__file__).parents[2] / "sample_configs"
counts = st.integers(1, 20_000) | st.sampled_from(("4k", "1.5k", "many"))

questions = st.tuples(
    st.sampled_from(("qwen3-4b-4bit", "gemma-2-2b", "falcon-h1-7b", "qwen3-30b-a3b-4bit")),
    st.fixed_dictionaries(
        {},
        optional={
            "device": st.sampled_from(("m4-pro-24", "rtx-4090", "m9-max-64")),
            "memory": st.sampled_from((16, "64G", "32GB", 2**35)),
            "working_set": st.just("20GB"),
            "quantize": st.sampled_from((3, 4, 7, "4bit", "mxfp4")),
            "runtime": st.sampled_from(("mlx-lm", "vllm", "llama.cpp", "zinc")),
            "ranks": st.sampled_from((2, 3)),
            "parallel": st.sampled_from(("tensor", "pipeline")),
            "method": st.sampled_from(("auto", "formula")),
            "margin": st.sampled_from(("64MB", "1GB", 0)),
            "mlx_version": st.just("0.32.0"),
            "mlx_lm_version": st.just("0.31.0"),
            # Its directory takes the place of this name.
            "adapter": st.just("of-qwen3-4b"),
            "flash_attn": st.booleans(),
            "prompt_tokens": counts,
            "max_tokens": counts,
            "batch": st.integers(0, 4),
            "prefill_step": st.sampled_from((300, 4096)),
            "kv_bits": st.sampled_from((0, 4, 8)),
            "kv_group_size": st.sampled_from((32, 48)),
            "quantized_kv_start": st.just(0),
            "max_kv_size": st.just(4096),
        },
    )
    # Most combinations of many are errors.
    .filter(lambda asked: len(asked) < 6),
)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter"))


@settings(max_examples=examples(30), suppress_health_check=list(HealthCheck))
@given(questions)
def test_the_library_and_the_command_line_give_one_answer(
    memfit: Memfit, adapter: Path, question: tuple[str, dict[str, Any]]
) -> None:
    name, asked = question
    path = SAMPLES / f"{name}.yaml"
    if "adapter" in asked:
        asked = {**asked, "adapter": adapter}
    ran = memfit("estimate", path, *map(_option, asked, asked.values()), "--json")
    said = ran.json
    if ran.code < exit_of(library.InputError()):
        # Commands have options in both; sentences name settings as each of them does.
        said |= _with_keywords({"assumptions": said["assumptions"]})
    else:
        said = _with_keywords(said)
    assert _answer(path, asked) == (ran.code, said)


def _answer(path: Path, asked: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    try:
        answer = library.estimate(path, **asked)
    except library.MemfitError as error:
        code = exit_of(error)
        return code, error_report(error.slug, str(error), code).to_dict()
    return int(answer.verdict == "exceeds"), answer.to_dict()


def _option(name: str, value: Any) -> str:
    if name == "flash_attn":
        return "--flash-attn" if value else "--no-flash-attn"
    text = "none" if name == "kv_bits" and value == 0 else value
    return f"--{name.replace('_', '-')}={text}"


def _with_keywords(report: dict[str, Any]) -> dict[str, Any]:
    """Sentences of the command line, with its options under the names of the keywords."""
    text = json.dumps(report).replace("--no-", "--")
    for name in (*EstimateSettings.__annotations__, "device"):
        text = text.replace(f"--{name.replace('_', '-')}", name)
    said: dict[str, Any] = json.loads(text)
    return said


def test_every_option_is_a_keyword() -> None:
    """What the command takes of a model, a machine or a workload, the library takes too."""
    offered = set(signature(command).parameters)
    shown = {field.name for group in (EstimateReport, EstimateOutput) for field in fields(group)}
    positional = {"model", "device", "context"}
    groups = [each for each in vars(options).values() if isinstance(each, Options)]
    of_others = {
        name
        for group in groups
        for name in group.declared.keys() - set(group.question.__struct_fields__)
    }
    assert EstimateSettings.__annotations__.keys() | positional == offered - shown - of_others


@pytest.mark.parametrize(
    ("settings", "questions"),
    [
        (OpenSettings, (ModelQuestion, RuntimeQuestion)),
        (MachineSettings, (MachineQuestion,)),
        (WorkloadSettings, (WorkloadQuestion,)),
    ],
)
def test_each_method_takes_the_settings_of_its_questions(
    settings: type, questions: tuple[type[Question], ...]
) -> None:
    named = {name for question in questions for name in question.__struct_fields__}
    assert settings.__annotations__.keys() == named - {"model", "device", "context"}
