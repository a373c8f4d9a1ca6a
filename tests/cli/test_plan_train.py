"""``memfit plan train`` as a command."""

from pathlib import Path

import pytest

from tests.cli.running import Memfit
from tests.cli.test_bad_input import assert_one_line

pytest.importorskip("mlx_lm")
SMALL = Path(__file__).parents[1] / "arch" / "cases" / "qwen3.json"


def test_the_command_answers_for_the_data(memfit: Memfit, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "one two"}\n' * 3)
    asked = ("plan", "train", SMALL, "--working-set", "25MB", "--num-layers", "1")
    options = ("--batch-size", "2", "--max-seq-length", "64", "--data", tmp_path)
    answer = memfit(*asked, *options, "--json").json
    assert (answer["sequence_tokens"], answer["data"]["examples"]) == (33, 3)
    assert memfit(*asked, *options).out.startswith("LoRA of ")


@pytest.mark.exhaustive
def test_a_file_names_model_and_data_and_stays_in_the_command(
    memfit: Memfit, tmp_path: Path
) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "one two"}\n' * 9)
    (tmp_path / "valid.jsonl").write_text('{"text": "one two"}\n' * 5)
    (tmp_path / "lora.yaml").write_text(
        f"model: {SMALL}\ndata: {tmp_path}\nnum_layers: 1\nbatch_size: 2\nmax_seq_length: 64\n"
        "lora_parameters: {rank: 4, scale: 1.0, dropout: 0.0}\n"
    )
    asked = ("plan", "train", "-c", tmp_path / "lora.yaml", "--memory", "8GB", "--json")
    answer = memfit(*asked).json
    assert answer["data"]["examples"] == 9
    # No batch is larger than the validation set.
    assert answer["limits"]["batch_size"] == 5
    [command] = answer["commands"]
    assert f"-c {tmp_path}/lora.yaml" in command
    assert "> lora_parameters.yaml" in memfit(*asked, "--rank", "2").json["commands"][0]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (
            ("--num-layers", "1", "--batch-size", "9", "--data", "{data}"),
            2,
            "3 examples are fewer than the batch",
        ),
        (("--data", "{data}/nowhere"), 2, "needs a train.jsonl"),
        (("--num-layers", "9"), 3, "num_layers 9: the model has 3 layers"),
        (("--fine-tune-type", "full", "--num-layers", "1", "-q"), 3, "weights have no gradient"),
        (("--keys", "nothing", "--num-layers", "1"), 3, "no such module"),
        (("--batch-size", "0"), 2, "batch_size 0: must be from 1 to 1048576"),
        (("--batch-size", "10000000000"), 2, "batch_size 10000000000: must be from 1"),
        (("--max-seq-length", "1"), 2, "the trainer predicts the second token at least"),
        (("--rank", "-1"), 2, "rank -1: must be from 1"),
        (("--scale", "nan"), 2, "scale nan: must be a finite number"),
        (("--dropout", "1"), 2, "dropout 1.0: must be from 0 to below 1"),
        (("-c", "{data}/train.jsonl"), 2, "train.jsonl"),
    ],
)
def test_what_cannot_be_trained_is_one_line(
    options: tuple[str, ...], code: int, message: str, memfit: Memfit, tmp_path: Path
) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "one two"}\n' * 3)
    given = [option.format(data=tmp_path) for option in options]
    assert_one_line(memfit("plan", "train", SMALL, "--memory", "8GB", *given), code, message)
