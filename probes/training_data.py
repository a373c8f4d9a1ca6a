"""The lengths of the examples that mlx_lm.lora would train on, as its own classes count them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import is_there, printable, read_whole
from memfit.estimators.base.reading.strict_json import parse_object
from memfit.estimators.base.units import ceil_div
from memfit.estimators.plans.train.question import Example, TrainingData
from memfit.probes.loading import one_line
from memfit.probes.tokenize_prompt import NoTokenizerError, model_tokenizer

MAX_DATA_BYTES = 2**29
MAX_LINE_VALUES = 1_000_000
# English text and code have three to five bytes a token; fewer bytes make more tokens.
BYTES_PER_TOKEN = 3


def read_training_data(
    directory: Path, model: Path | None, config: Mapping[str, Any], *, mask_prompt: bool
) -> TrainingData:
    """Return the examples of ``train.jsonl`` and ``valid.jsonl``.

    ``model`` is the directory of the tokenizer, ``config`` the model's. Without a tokenizer the
    bytes are counted.

    Raises:
        InputError: when there is no training set, a line is not a JSON object, or mlx-lm does not
            take its format; the message names file and line.
    """
    name = printable(directory)
    train = list(_rows(directory / "train.jsonl"))
    if not train:
        raise InputError(f"{name}: needs a train.jsonl with at least one line")
    valid = list(_rows(directory / "valid.jsonl"))
    try:
        tokenizer = model_tokenizer(model, config) if model else None
    except NoTokenizerError:
        tokenizer = None
    settings = SimpleNamespace(mask_prompt=mask_prompt)
    return TrainingData(
        name,
        _examples(train, tokenizer, settings, directory / "train.jsonl"),
        _examples(valid, tokenizer, settings, directory / "valid.jsonl"),
        is_tokenized=tokenizer is not None,
    )


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if not is_there(path):
        return
    content = read_whole(path, limit=MAX_DATA_BYTES)
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            yield parse_object(
                line, path, what=f"line {number}", error=InputError, max_values=MAX_LINE_VALUES
            )


def _examples(
    rows: Sequence[dict[str, Any]], tokenizer: Any, settings: Any, path: Path
) -> tuple[Example, ...]:
    if not rows:
        return ()
    if tokenizer is None:
        return tuple(Example(ceil_div(_text_bytes(row), BYTES_PER_TOKEN), len(row)) for row in rows)
    from mlx_lm.tuner.datasets import create_dataset

    found: list[Example] = []
    try:
        data = create_dataset(list(rows), tokenizer, settings)
        for row in rows:
            found.append(Example(len(data.process(row)[0]), len(row)))
    except Exception as error:  # noqa: BLE001 - a template is code of the repository
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise InputError(
            f"{printable(path)}: example {len(found) + 1}: mlx-lm does not take it ({reason})"
        ) from None
    return tuple(found)


def _text_bytes(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return 0
    return sum(map(_text_bytes, value))
