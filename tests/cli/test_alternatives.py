"""A model that no settings fit on a Mac: what that Mac runs in its place."""

import pytest

from tests.cli.running import Memfit
from tests.selection import quick

FAST = ("--method", "formula")


def test_other_weights_of_the_model_come_first_then_other_models(memfit: Memfit) -> None:
    run = memfit("gpt-oss-20b", "--memory", "16GB", *FAST)
    text = " ".join(run.out.split())
    assert "This Mac runs gpt-oss-20b-mxfp4-q8 (12.6 GB, step 256, tight), " in text
    assert "memfit NAME --memory 16GB" in text


@pytest.mark.parametrize("model", quick(["gpt-oss-20b", "llama-3.1-70b"], ("gpt-oss-20b",)))
def test_each_alternative_has_the_verdict_that_its_own_estimate_has(
    memfit: Memfit, model: str
) -> None:
    machine = ("--memory", "16GB", *FAST, "--json")
    found = memfit(model, *machine).json["alternatives"]
    assert found
    for each in found:
        bits = ["--quantize", str(each["weight_bits"])] if each["weight_bits"] else []
        step = ["--prefill-step", str(each["prefill_step"])]
        own = memfit(each["name"], *machine, *bits, *step).json
        assert (own["verdict"], own["needed_bytes"]) == (each["verdict"], each["needed_bytes"])


@pytest.mark.parametrize(
    "words",
    [
        ["qwen3-8b-4bit", "--memory", "16GB"],
        pytest.param(["qwen3.5-35b-a3b", "--memory", "32GB"], marks=pytest.mark.exhaustive),
    ],
)
def test_what_fits_with_other_settings_has_no_alternatives(
    memfit: Memfit, words: list[str]
) -> None:
    assert "alternatives" not in memfit(*words, *FAST, "--json").json
