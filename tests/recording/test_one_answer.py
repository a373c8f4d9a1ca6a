"""All commands and the library give one peak and one longest context of a recorded class."""

from pathlib import Path

import pytest

import memfit
from memfit.estimators.checkpoint.local.local_models import LocalModel
from memfit.estimators.questions.question import WorkloadQuestion
from memfit.estimators.questions.target import MARGIN_BYTES
from memfit.estimators.runtimes.source import Recorded
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.fits import fits
from tests.models import write_config
from tests.recording.configs import CONFIGS
from tests.selection import quick
from tests.sizing.test_one_answer import Question, check_every_command, estimated

LENGTH = 5000
MODELS = {**CONFIGS, "shallow": {**CONFIGS["nanochat-1"], "num_hidden_layers": 4}}


@pytest.mark.parametrize("name", quick(sorted(MODELS), ("shallow",)))
def test_every_command_gives_the_figures_of_a_recorded_class(tmp_path: Path, name: str) -> None:
    config = {"max_position_embeddings": 16_384, **MODELS[name]}
    path = write_config(tmp_path, config)
    question = Question(str(path), "m4-max-64", None, 4, {"prompt_tokens": LENGTH}, MARGIN_BYTES)
    assert isinstance(Catalog().sized(str(path)).runtime_model.source, Recorded)
    check_every_command(path, path, tmp_path, question)
    answer = estimated(question, str(path))
    shared = memfit.estimate(path, device="m4-max-64", quantize=4, context=LENGTH)
    assert shared.peak_bytes == answer.peak_bytes
    assert shared.recommendation == answer.recommendation
    listed = fits(
        Catalog(),
        [LocalModel(name, "folder", str(path))],
        question.device,
        WorkloadQuestion(prompt_tokens=LENGTH),
    )
    [row] = listed.models
    step = {"prompt_tokens": LENGTH, "prefill_step": row.prefill_step}
    of_row = estimated(question._replace(quantize=row.weight_bits, workload=step), str(path))
    assert row.peak_bytes == of_row.peak_bytes
