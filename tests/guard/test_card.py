"""Memory cards: above memfit's figures, the same in every language, refused when altered."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

import memfit
from memfit.estimators.base.dtypes import converted
from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.opening import open_sample
from memfit.estimators.guard.card import LANGUAGES, evaluator, read_card
from memfit.estimators.guard.evaluators.memory_card import Prompt, peak
from memfit.estimators.guard.tabulate import (
    _Engine,
    _samples,
    _window_shares,
    card_facts,
    make_card,
    random_questions,
)
from memfit.estimators.machine.devices import find_device
from memfit.estimators.mlx.kv_cache import capacity_at
from memfit.estimators.results.card import MemoryCard
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.sized_model import SizedModel
from tests.models import QWEN3_4B, write_config
from tests.selection import quick

ROOT = Path(__file__).parents[2]
MODELS = {
    "qwen3-0.6b": None,
    "gemma-3-4b": 4,
    "gpt-oss-20b": None,
    "lfm2.5-8b-a1b-4bit": None,
    "qwen3.5-35b-a3b": 4,
    "falcon-h1-7b": None,
}


def sized_sample(name: str, device: str, bits: int | None = None) -> SizedModel:
    """Return a sample, quantised, on a machine."""
    catalog = Catalog()
    quantize = converted(bits) if bits else None
    reference = catalog.add(open_sample(name))
    return catalog.sized(reference, quantize=quantize, device=find_device(device))


@pytest.fixture(scope="module")
def made() -> Callable[[str], tuple[SizedModel, MemoryCard]]:
    """Cards of models, each made once."""
    cards: dict[str, tuple[SizedModel, MemoryCard]] = {}

    def make(name: str) -> tuple[SizedModel, MemoryCard]:
        if name not in cards:
            sized = sized_sample(name, "m4-max-64", bits=MODELS.get(name))
            cards[name] = sized, make_card(sized, questions=100)
        return cards[name]

    return make


Made = Callable[[str], tuple[SizedModel, MemoryCard]]


@pytest.mark.parametrize("name", quick(list(MODELS), ("qwen3-0.6b",)))
def test_a_card_is_hardly_ever_below_and_never_far_above(made: Made, name: str) -> None:
    sized, card = made(name)
    plain = json.loads(card.to_json())
    excess = []
    for question in random_questions(card, Random(9), 100):
        new, cached, step, reply = question
        workload = Workload(
            prompt_tokens=new + cached, cached_tokens=cached, prefill_step=step, max_tokens=reply
        )
        own = sized.figures_for(workload).moment.nbytes
        excess.append((peak(plain, *question) - own) / own)
    assert sum(each < 0 for each in excess) <= 2
    assert min(excess) > -0.01
    assert sorted(excess)[50] < 0.05
    assert max(excess) < 0.12


@pytest.mark.parametrize("name", quick(list(MODELS), ("qwen3-0.6b",)))
def test_whole_chunks_are_not_as_large_as_the_largest_of_their_row(made: Made, name: str) -> None:
    sized, card = made(name)
    plain = json.loads(card.to_json())
    for step in card.steps:
        for chunks in (1, 2, 3):
            workload = Workload(prompt_tokens=chunks * step + 1, prefill_step=step)
            own = sized.figures_for(workload).moment.nbytes
            assert -0.01 < peak(plain, chunks * step + 1, 0, step, 0) / own - 1 < 0.08


def test_windows_longer_than_their_limit_count_by_the_layers_that_have_them_in_a_decode_step() -> (
    None
):
    sized = sized_sample("gemma-3-4b", "m4-max-64", bits=4)
    card = card_facts(sized)
    shares = _window_shares(_Engine(sized, card), card)
    engine = _Engine(sized, replace(card, window_shares=shares))
    for tokens in (9000, 15_540, 60_000):
        for reply in (0, 300):
            rest = [engine.decode(tokens, reply, step) for step in card.steps]
            assert max(rest) - min(rest) < 64 * 10**6  # without the shares: up to 680 MB


SAMPLES = sorted(path.stem for path in (ROOT / "sample_configs").glob("*.yaml"))
NO_CARD = {
    "gemma-2-2b": "a context of at least 32768 tokens, and this one has 8192",
    "olmo-3-7b": "a context of at least 32768 tokens, and this one has 8192",
    "llama-4-scout": "whose caches mlx-lm stores as they are",
}


@pytest.mark.parametrize("name", quick(SAMPLES, ("qwen3-0.6b", *NO_CARD)))
def test_every_sample_has_a_card_or_a_reason_for_none(
    made: Made, tmp_path: Path, name: str
) -> None:
    if name in NO_CARD:
        with pytest.raises(UnsupportedError, match=NO_CARD[name]):
            made(name)
        return
    sized, card = made(name)
    (file := tmp_path / "card.json").write_text(card.to_json())
    plain = json.loads(read_card(file).to_json())
    for new, cached, step, reply in random_questions(card, Random(5), 50):
        workload = Workload(
            prompt_tokens=new + cached, cached_tokens=cached, prefill_step=step, max_tokens=reply
        )
        own = sized.figures_for(workload).moment.nbytes
        assert peak(plain, new, cached, step, reply) > 0.99 * own


def test_a_model_with_a_short_context_has_no_card(tmp_path: Path) -> None:
    write_config(tmp_path, {**QWEN3_4B, "max_position_embeddings": 4096})
    sized = Catalog().sized(str(tmp_path), device=find_device("m4-max-64"))
    with pytest.raises(UnsupportedError, match="at least 32768 tokens, and this one has 4096"):
        make_card(sized)


def test_every_sample_of_a_table_is_within_the_context() -> None:
    for most in (128000, 131072, 40960):
        for tokens in (1, 2047, 2048, 4096):
            for sample in _samples(most, tokens, Random(most)):
                assert sample.cached + sample.done + tokens + 1 <= most


def test_caches_of_the_evaluator_are_those_of_the_engine(made: Made) -> None:
    sized, card = made("qwen3-0.6b")
    (buffer,) = sized.model.kv_buffer_counts
    random = Random(3)
    for new, cached, step, _ in random_questions(card, random, 300):
        workload = Workload(prompt_tokens=new + cached, cached_tokens=cached, prefill_step=step)
        prompt = Prompt({**json.loads(card.to_json())}, new, cached, step, 0)
        done = new - 1
        assert prompt.room(0, done) == capacity_at(buffer, workload, cached + done)


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_language_gives_the_same_bytes(made: Made, tmp_path: Path, language: str) -> None:
    _, card = made("qwen3-0.6b")
    plain = json.loads(card.to_json())
    questions = [*random_questions(card, Random(4), 200)]
    vectors = tuple((*each, peak(plain, *each)) for each in questions)
    file, source = tmp_path / "card.json", tmp_path / LANGUAGES[language]
    file.write_text(replace(card, vectors=vectors).to_json())
    source.write_text(evaluator(language))
    command = _program(language, source)
    done = subprocess.run([*command, str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0 wrong\n"), done.stderr
    wrong = ((*questions[0], vectors[0][4] + 1), *vectors[1:])
    file.write_text(replace(card, vectors=wrong).to_json())
    done = subprocess.run([*command, str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "1 wrong\n")


def _program(language: str, source: Path) -> list[str]:
    """Return the command of an evaluator, skipping where the language is not installed."""
    needs = {
        **{"python": "python3", "javascript": "node", "go": "go", "rust": "rustc"},
        **{"swift": "swift"},
    }[language]
    if not shutil.which(needs):
        pytest.skip(f"{needs} is not installed")
    if language == "go":
        return ["go", "run", str(source)]
    if language == "rust":
        program = source.with_suffix("")
        subprocess.run(["rustc", "-o", str(program), str(source)], check=True, capture_output=True)
        return [str(program)]
    return [needs, str(source)]


def test_the_page_for_any_language_prints_what_its_comments_say(made: Made, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "your-server.md").read_text()
    (example,) = re.findall(r"^```js\n(.*?)^```$", page, re.M | re.S)
    commands = re.findall(r"^memfit .*$", page, re.M)
    assert [Path(line.split()[-1]).name for line in commands] == ["memory.json", "memory_card.js"]
    (tmp_path / "memory.json").write_text(made("qwen3-0.6b")[1].to_json())
    (tmp_path / "memory_card.js").write_text(evaluator("javascript"))
    (tmp_path / "example.js").write_text(example)
    command = _program("javascript", tmp_path / "example.js")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == re.findall(r"^console.*// (.*)$", example, re.M), done.stderr


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda card: card.update(weights_bytes=card["weights_bytes"] + 1), "gives"),
        (lambda card: card["decode"].reverse(), "decode: its knots do not ascend"),
        (lambda card: card["rows"][3][2].reverse(), "first: its knots do not ascend"),
        (lambda card: card["rows"].pop(), "rows: they end before the longest prefill step"),
        (lambda card: card["rows"].reverse(), "rows"),
        (lambda card: card.update(vectors=[]), "vectors: there are none"),
        (lambda card: card.update(unit=0), "unit"),
        (lambda card: card.update(schema="memfit.card/9"), "memfit.card/9"),
        (lambda card: card.update(max_tokens=-5), "max_tokens"),
        (lambda card: card.update(steps=["a"]), "steps"),
        (lambda card: card["rows"][0].append(1), "at most length 4"),
        # What no vector meets.
        (lambda card: card["rows"][-2][3].pop(-2), "sha256: the card was altered"),
        (lambda card: card["check"].update(below=9), "sha256: the card was altered"),
        (lambda card: card.update(model="another"), "sha256: the card was altered"),
    ],
)
def test_an_altered_card_is_refused(
    made: Made, tmp_path: Path, change: Callable[[dict[str, Any]], Any], reason: str
) -> None:
    file = tmp_path / "card.json"
    file.write_text(text := made("qwen3-0.6b")[1].to_json())
    assert read_card(file).to_json() == text
    card = json.loads(text)
    change(card)
    file.write_text(json.dumps(card))
    with pytest.raises(InputError, match=reason):
        read_card(file)


@pytest.mark.parametrize(
    "question", [(0, 0, 2048, 0), (1, -1, 2048, 0), (10, 0, 100, 0), (2**17, 0, 2048, 1)]
)
def test_a_question_beyond_the_card_has_no_answer(made: Made, question: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="the card"):
        peak(json.loads(made("qwen3-0.6b")[1].to_json()), *question)


def test_a_card_says_whose_it_is(made: Made) -> None:
    sized, card = made("qwen3-0.6b")
    answer = memfit.open("qwen3-0.6b").on("m4-max-64").at("4k")
    assert card.weights_bytes == sized.resident_bytes
    assert card.model == answer.model.id
    assert len(card.to_json()) < 25_000
