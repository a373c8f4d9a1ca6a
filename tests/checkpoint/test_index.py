"""The shipped index: every fact has a source, every config a size, and every name its model."""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from memfit.estimators.arch.registry import build_model
from memfit.estimators.base.errors import CheckpointError, ConfigError, MemfitError
from memfit.estimators.checkpoint.index.checkpoint import indexed_checkpoint
from memfit.estimators.checkpoint.index.lookup import look_up, model_size
from memfit.estimators.checkpoint.index.names import find, name_words
from memfit.estimators.checkpoint.index.records import (
    Index,
    IndexedModel,
    index,
    shipped_index,
    updated_file,
    write_index,
)
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.sized_model import refusal_of, runtimes_that_load
from tests.selection import quick

INDEX = shipped_index()
CONFIGURED = [name for name in INDEX.names if INDEX.model(name).config is not None]
# Configs of types that memfit does not describe, or that mlx-lm's class cannot take: each says why.
REFUSED = (
    "is not described",
    "but mlx-lm's model class takes",
)


def parameters(model: IndexedModel) -> int | str:
    """The parameters of a model's config, or why it has none."""
    catalog = Catalog()
    try:
        return catalog.sized(catalog.add(indexed_checkpoint(model))).footprint.parameters
    except MemfitError as error:
        return str(error)


def meant(word: str) -> str:
    """What a word is taken for, or what is said of it."""
    try:
        found = look_up(word, INDEX)
    except CheckpointError as error:
        return str(error)
    return found.model.name if found else ""


def test_the_index_is_small_and_has_three_hundred_models_with_their_config() -> None:
    assert len(CONFIGURED) >= 300
    assert sum(map(len, INDEX._content.splitlines())) <= 3_000_000
    assert len(INDEX.names) == len({name.lower() for name in INDEX.names})


def test_every_model_has_a_source_with_its_date() -> None:
    for name in INDEX.names:
        key = INDEX.model(name).source.partition(":")[0]
        assert INDEX.header.sources[key].address, name
        assert INDEX.header.sources[key].date, name


def test_what_is_checked_is_the_published_total() -> None:
    models = [INDEX.model(name) for name in CONFIGURED]
    checked = [model for model in models if model.checked]
    assert len(checked) >= 200
    for model in checked:
        assert model.parameters == model.published


@pytest.mark.parametrize("name", quick(CONFIGURED, set(CONFIGURED[::40])))
def test_every_config_has_the_parameters_that_the_index_states_or_is_refused_with_its_reason(
    name: str,
) -> None:
    model = INDEX.model(name)
    size = parameters(model)
    if isinstance(size, str) and "not a language model" in size:
        return  # the index states its parameters, which are not those of a generator
    if isinstance(size, str):
        assert any(reason in size for reason in REFUSED)
        if model.parameters and find_spec("mlx_vlm") is None:
            pytest.skip("its class is one of mlx-vlm alone, which is not installed")
    assert model.parameters == (None if isinstance(size, str) else size)


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("qwen3-8b", "Qwen/Qwen3-8B"),
        ("qwen3:8b", "Qwen/Qwen3-8B"),
        ("Qwen 3 8B", "Qwen/Qwen3-8B"),
        ("qwen2.5-7b", "Qwen/Qwen2.5-7B"),
        ("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct"),
        ("llama3.3", "meta-llama/Llama-3.3-70B-Instruct"),
        ("phi-4", "microsoft/phi-4"),
        ("phi4:latest", "microsoft/phi-4"),
        ("mistral-small", "mistralai/Mistral-Small-24B-Instruct-2501"),
        ("mistral-small:24b", "mistralai/Mistral-Small-24B-Instruct-2501"),
        ("gpt-oss:20b", "openai/gpt-oss-20b"),
        ("Qwen3.5 35B", "Qwen/Qwen3.5-35B-A3B"),
        ("gemma3:27b", "google/gemma-3-27b-it"),
        ("mixtral:8x7b", "mistralai/Mixtral-8x7B-v0.1"),
        ("smollm2:135m", "HuggingFaceTB/SmolLM2-135M"),
        ("qwen3-vl-4b", "Qwen/Qwen3-VL-4B-Instruct"),
        ("Qwen3-4B", "Qwen/Qwen3-4B"),
        ("olmo2:7b", "allenai/OLMo-2-1124-7B"),
        ("Llama 3.1 8B Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
    ],
)
def test_a_model_is_found_by_its_family_and_size(word: str, name: str) -> None:
    assert meant(word) == name
    assert INDEX.model(name).config is not None


@pytest.mark.parametrize("word", ["qwen3", "llama3.2", "gemma3", "qwen", "devstral", "gpt-oss"])
def test_a_name_of_several_sizes_lists_them(word: str) -> None:
    assert re.search(r"several models: .*\(.* B\)[^\n]*$", meant(word))


@pytest.mark.parametrize(
    "word", ["qwen3-9b", "gpt-oss-2b", "qwen3-8b-turbo", "llama", "nonsense", "phi-4-20b"]
)
def test_a_wrong_name_is_no_other_model(word: str) -> None:
    assert not meant(word) or "several models" in meant(word)


def test_a_name_means_only_models_of_its_family_and_size() -> None:
    for name in CONFIGURED:
        words = name_words(name)
        for other in find(name, INDEX.names).best:
            found = name_words(other)
            assert (found.family, found.size) == (words.family, words.size), (name, other)


@pytest.mark.parametrize("word", ["ernie", "nemotron-3-nano", "kimi"])
def test_sizes_are_listed_also_where_no_name_is_plain(word: str) -> None:
    assert "several models" in meant(word)
    assert "()" not in meant(word)


@pytest.mark.parametrize(
    ("word", "near"),
    [("qwen3:999b", "qwen3-"), ("llama 70b", "llama-"), ("qwen3:8b-q4_K_M", "qwen3-8b")],
)
def test_an_unknown_name_of_several_words_has_the_nearest_names(word: str, near: str) -> None:
    with pytest.raises(CheckpointError, match=rf"no such path.*; nearest: .*{near}"):
        open_checkpoint(word)


def test_no_model_is_listed_with_the_parameters_of_a_part_of_it() -> None:
    sizes = {name: model_size(INDEX.model(name)) for name in INDEX.names}
    assert sizes["baidu/ERNIE-4.5-21B-A3B-PT"] == "21B"
    assert sizes["upstage/Solar-Open-100B"] == "100B"
    assert sizes["openai/gpt-oss-safeguard-120b"] == "120B"
    # A model that drafts has the size of another in its name.
    assert sizes["z-lab/Qwen3.6-27B-DFlash"] == "1.7 B"
    for name, size in sizes.items():
        named = re.fullmatch(r"(\d+)b", name_words(name).size)
        number, _, unit = size.partition(" ")
        # A "_" ends a word: "1_6b" is not six billion.
        drafts = re.search("DFlash|[Ee]agle|EAGLE|_6b", name)
        if named and unit == "B" and not drafts:
            assert 2 * float(number) >= int(named[1]) - 0.1, name


def test_qwen3_vl_without_the_key_that_mlx_lm_needs_is_sized_for_mlx_vlm() -> None:
    """Its config says at the root alone that the head is not tied."""
    catalog = Catalog()
    model = INDEX.model("Qwen/Qwen3-VL-8B-Instruct")
    sized = catalog.sized(catalog.add(indexed_checkpoint(model)))
    assert sized.footprint.parameters == model.published
    assert "tie_word_embeddings is missing" in refusal_of(sized)
    assert runtimes_that_load(sized) == ("mlx-vlm", "lm-studio")
    config = {**(model.config or {}), "tie_word_embeddings": True}
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        build_model(config, "config")


def test_where_nothing_is_guessed_the_name_to_write_is_given() -> None:
    with pytest.raises(CheckpointError, match=r"no such path; .* is index:Qwen/Qwen3-8B$"):
        open_checkpoint("qwen3:8b", guess_hub=False)


def test_the_answer_says_which_model_was_taken() -> None:
    opened = open_checkpoint("qwen3:8b")
    assert (opened.id, opened.source) == ("Qwen/Qwen3-8B", "index")
    assert "qwen3:8b: Qwen/Qwen3-8B" in opened.meaning


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the user's own index."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    index.cache_clear()
    yield tmp_path
    index.cache_clear()


def test_the_users_own_index_takes_the_place_of_the_shipped_one(cache_home: Path) -> None:
    models = [IndexedModel(name="b/b-1b"), IndexedModel(name="a/a-1b", config={"a": 1})]
    write_index(updated_file(), INDEX.header, models)
    assert index().names == ("a/a-1b", "b/b-1b")
    assert index().model("a/a-1b").config == {"a": 1}


@pytest.mark.parametrize("content", [b"", b"{}\n", b'{"schema":"memfit.index/2"}\n', b"\xff\n"])
def test_a_damaged_index_says_how_to_make_a_new_one(content: bytes) -> None:
    with pytest.raises(CheckpointError, match="memfit index update makes a new one"):
        Index(content, "models.jsonl")


def test_a_damaged_line_is_an_error_only_for_its_model() -> None:
    first = INDEX._content.split(b"\n")[0]
    damaged = Index(first + b'\n{"name":"a/a","config":}\n{"name":"b/b"}\n', "models.jsonl")
    assert damaged.model("b/b").config is None
    with pytest.raises(CheckpointError, match="a/a"):
        damaged.model("a/a")
