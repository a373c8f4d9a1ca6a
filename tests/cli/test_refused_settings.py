"""Settings that mlx-lm refuses in a run of some length: no answer prints a command with them."""

import json
from pathlib import Path

import pytest

from tests.cli.running import Memfit
from tests.models import QWEN3_4B, write_config

MACHINE = ("--memory", "64GB", "--context", "4k")
# The first four rotate; Gemma 2 cannot attend over a quantised cache.
REFUSE = ("gpt-oss-20b", "gemma-3-4b", "gemma-4-26b-a4b", "olmo-3-7b", "gemma-2-2b")


@pytest.mark.parametrize("model", REFUSE)
def test_kv_bits_are_answered_below_their_first_token_as_above_it(
    model: str, memfit: Memfit
) -> None:
    codes = {
        memfit(*question, model, "--memory", "64GB", "--context", context, "--kv-bits", "8").code
        for context in ("4k", "6k")
        for question in (("estimate",), ("plan", "server"), ("plan", "context"))
    }
    assert codes == {3}


def test_a_rotating_cache_of_the_user_s_own_takes_no_kv_bits_either(memfit: Memfit) -> None:
    options = ("--max-kv-size", "1024", "--kv-bits", "8", "--context", "512")
    run = memfit("estimate", "qwen3-0.6b", *options, "--memory", "64GB")
    assert (run.code, run.out) == (3, "")
    assert "rotating cache" in run.err


def _model(directory: Path, rows: int, tokens: int | None) -> Path:
    write_config(directory, {**QWEN3_4B, "vocab_size": rows, "num_hidden_layers": 2})
    if tokens is not None:
        vocabulary = {str(index): index for index in range(tokens)}
        added = [{"id": tokens, "content": "<s>"}]
        text = json.dumps({"added_tokens": added, "model": {"type": "BPE", "vocab": vocabulary}})
        (directory / "tokenizer.json").write_text(text)
    return directory


@pytest.mark.parametrize(
    ("rows", "tokens", "code", "said"),
    [
        ((152_064, 151_936), (None, None), 0, ""),
        ((32_768, 32_000), (None, None), 3, "embeddings of 32000 and 32768 tokens"),
        ((1024, 1024), (1000, None), 0, ""),
        ((1024, 1024), (1000, 999), 3, "tokenizers of 999 and 1000 tokens"),
        ((4096, 1024), (1000, 1000), 0, ""),
    ],
)
def test_a_draft_model_has_the_tokenizer_of_its_model(
    rows: tuple[int, int],
    tokens: tuple[int | None, int | None],
    code: int,
    said: str,
    tmp_path: Path,
    memfit: Memfit,
) -> None:
    target, draft = (
        _model(tmp_path / name, *each)
        for name, each in zip(("target", "draft"), zip(rows, tokens, strict=True), strict=True)
    )
    run = memfit("estimate", target, "--draft", draft, *MACHINE)
    assert run.code == code
    assert said in run.err
    assert ("--draft-model" in run.out) == (code == 0)


def test_the_size_of_a_tokenizer_is_the_one_mlx_lm_compares(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="mlx-lm compares its vocab_size")
    from memfit.estimators.checkpoint.opening import open_checkpoint
    from memfit.estimators.checkpoint.tokenizer import tokenizer_size
    from tests.checkpoints import save_tokenizer

    write_config(tmp_path, QWEN3_4B)
    save_tokenizer(tmp_path, has_chat_template=False)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer_size(open_checkpoint(str(tmp_path))) == loaded.vocab_size
