"""Directories without a model that can be measured: each error is one line with the fix."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.base.errors import CheckpointError, InputError, MemfitError, UnsupportedError
from memfit.probes.loading import load_model
from memfit.probes.process import ModelProcess
from memfit.probes.tokenize_prompt import prompt_ids
from tests.checkpoints import CHAT_TEMPLATE, SENTENCES, Checkpoints, save_weights
from tests.selection import quick

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm", reason="it is what refuses")

Damage = Callable[[Path], object]
CREATES_A_FILE = "open('ran', 'w')"


Spoilt = Callable[[str, Damage], Path]


@pytest.fixture
def damaged(checkpoints: Checkpoints, tmp_path: Path) -> Spoilt:

    def make(name: str, damage: Damage) -> Path:
        path = tmp_path / "model"
        shutil.copytree(checkpoints(name), path)
        damage(path)
        return path

    return make


def started(path: Path) -> ModelProcess:
    return ModelProcess(path, timeout_seconds=60)


def config(**changes: Any) -> Damage:
    def damage(path: Path) -> None:
        file = path / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return damage


def tensors(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Damage:
    return lambda path: save_weights(path, change(mx.load(str(path / "model.safetensors"))))


def written(name: str, text: str) -> Damage:
    def damage(path: Path) -> None:
        (path / name).write_text(text)

    return damage


def without(part: str) -> Damage:
    return tensors(lambda all_: {name: all_[name] for name in all_ if part not in name})


CANNOT_LOAD: dict[str, tuple[Damage, type[MemfitError], str]] = {
    "a tensor of another shape": (
        tensors(lambda all_: {**all_, "model.norm.weight": mx.zeros((64,))}),
        CheckpointError,
        r"tensor model.norm.weight has shape \(64,\), the config expects \(128,\)",
    ),
    "missing tensors": (
        without("q_proj"),
        CheckpointError,
        r"tensor model.layers.0.self_attn.q_proj.weight is missing \(and 2 more\)",
    ),
    "a tensor too many": (
        tensors(lambda all_: {**all_, "more\x1b[31m": mx.zeros((64,))}),
        CheckpointError,
        r"the config has no tensor more\\x1b\[31m",
    ),
    "a config of fewer layers": (
        config(num_hidden_layers=2),
        CheckpointError,
        r"the config has no tensor model.layers.2.input_layernorm.weight \(and 10 more\)",
    ),
    "weights cut short": (
        lambda path: (path / "model.safetensors").write_bytes(b"\xff" * 100),
        CheckpointError,
        "cannot be read",
    ),
    "no weights": (
        lambda path: (path / "model.safetensors").unlink(),
        CheckpointError,
        "No safetensors",
    ),
    "an unknown class": (config(model_type="zork"), UnsupportedError, "model_type zork: mlx-lm"),
    "a module that is no model": (config(model_type="cache"), UnsupportedError, "'cache'"),
    "code of its own": (config(model_file="code.py"), UnsupportedError, "never runs"),
}


@pytest.mark.parametrize(("damage", "kind", "words"), CANNOT_LOAD.values(), ids=CANNOT_LOAD)
def test_a_model_that_does_not_load_gives_the_reason(
    damaged: Spoilt, damage: Damage, kind: type[MemfitError], words: str
) -> None:
    path = damaged("dense", damage)
    with pytest.raises(kind, match=words) as raised:
        load_model(path)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    "case", quick(["a tensor of another shape", "an unknown class"], ("an unknown class",))
)
def test_an_error_of_the_process_is_raised_here(damaged: Spoilt, case: str) -> None:
    damage, kind, words = CANNOT_LOAD[case]
    with started(damaged("dense", damage)) as process, pytest.raises(kind, match=words):
        process.load()


def test_missing_experts_are_reported(damaged: Spoilt) -> None:
    # Unstacked experts, as in most repositories: the class looks for each by name.
    def unstack(all_: dict[str, Any]) -> dict[str, Any]:
        stacked = "model.layers.1.mlp.switch_mlp.up_proj.weight"
        return {**all_, "model.layers.1.mlp.experts.0.up_proj.weight": all_.pop(stacked)[0]}

    path = damaged("moe", tensors(unstack))
    with pytest.raises(CheckpointError, match=r"up_proj.weight is missing"):
        load_model(path)


CANNOT_TOKENISE: dict[str, tuple[str, Damage, str]] = {
    "no tokenizer": ("no-tokenizer", lambda path: None, "no tokenizer; use --prompt-tokens N"),
    "a damaged tokenizer": ("dense", written("tokenizer.json", "{"), "cannot be loaded"),
    "a template that raises": (
        "chat",
        written("chat_template.jinja", "{{ raise_exception('not\nthis') }}"),
        "not this",
    ),
    "another model's tokenizer": ("dense", config(vocab_size=50), "a vocabulary of 50"),
}


@pytest.mark.parametrize(("name", "damage", "words"), CANNOT_TOKENISE.values(), ids=CANNOT_TOKENISE)
def test_a_text_that_cannot_be_tokenised_is_an_input_error(
    damaged: Spoilt, name: str, damage: Damage, words: str
) -> None:
    path = damaged(name, damage)
    with pytest.raises(InputError, match=words) as raised:
        prompt_ids(path, "How many bytes?", None)
    assert str(raised.value).isprintable()


def test_an_empty_prompt_is_an_input_error(checkpoints: Checkpoints) -> None:
    with pytest.raises(InputError, match="the prompt is empty"):
        prompt_ids(checkpoints("dense"), " \n", None)


def test_a_number_of_tokens_needs_no_tokenizer(checkpoints: Checkpoints) -> None:
    with started(checkpoints("no-tokenizer")) as process:
        with pytest.raises(InputError, match="no tokenizer; use --prompt-tokens N"):
            process.prompt("How many bytes?", None)
        prompt = process.prompt(None, 1_000_000)
    assert prompt.tokens == 1_000_000
    assert prompt.notes == ("no tokenizer: the prompt consists of plain token ids",)


def test_a_text_prompt_uses_the_chat_template(checkpoints: Checkpoints) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    path = checkpoints("chat")
    assert "[assistant]" in CHAT_TEMPLATE
    seen = f"<s>[user]{SENTENCES[0]}\n[assistant]"
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    ids, notes = prompt_ids(path, SENTENCES[0], None)
    assert ids == tokenizer.encode(seen, add_special_tokens=False).ids
    assert notes == ()


def test_code_from_a_model_never_runs(damaged: Spoilt, monkeypatch: pytest.MonkeyPatch) -> None:
    def plant(path: Path) -> None:
        config(auto_map={"AutoConfig": "code.C", "AutoTokenizer": ["code.T", None]})(path)
        settings = json.loads((path / "tokenizer_config.json").read_text())
        settings |= {"auto_map": {"AutoTokenizer": ["code.T", None]}, "tokenizer_class": "T"}
        written("tokenizer_config.json", json.dumps(settings))(path)
        for name in ("code", "json", "mlx_lm", "transformers"):
            written(f"{name}.py", CREATES_A_FILE)(path)

    path = damaged("dense", plant)
    monkeypatch.chdir(path)
    with started(path) as process:
        process.prompt("How many bytes?", None)
        process.load()
    assert not (path / "ran").exists()
