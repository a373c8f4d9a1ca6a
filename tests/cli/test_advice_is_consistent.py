"""Each advice says what it assumes, and none contradicts the verdict."""

from typing import Any

import pytest

from memfit.estimators.base.errors import MachineError
from memfit.estimators.machine.device import LEAST_LEFT_BYTES, wired_limit
from memfit.estimators.machine.devices import find_device, memory_device
from memfit.estimators.trace.libraries import versions
from tests.cli.running import Memfit

QUESTIONS = [
    ("qwen3.5-35b-a3b", "--memory", "32GB", "--context", "128k"),
    ("llama-3.1-70b", "--memory", "36GB"),
    ("qwen3-8b-4bit", "--memory", "8GB", "--context", "32k"),
    ("qwen3-8b-4bit", "--memory", "32GB"),
    ("gemma-3-27b", "--memory", "24GB", "--context", "64k"),
]
EXHAUSTIVE = pytest.mark.exhaustive
OPTIONS = {"weight_bits": "--quantize", "kv_bits": "--kv-bits", "prefill_step": "--prefill-step"}


# As `quick` marks them; the ids are the questions.
@pytest.mark.parametrize(
    "question",
    [
        pytest.param(
            each,
            id=" ".join(each),
            marks=() if each[:3] == ("qwen3-8b-4bit", "--memory", "8GB") else EXHAUSTIVE,
        )
        for each in QUESTIONS
    ],
)
def test_what_an_advice_assumes_gives_the_verdict_that_it_says(
    memfit: Memfit, question: tuple[str, ...]
) -> None:
    result = memfit("estimate", *question, "--json").json
    for name in OPTIONS:
        advice = result["recommendation"][name]
        if advice["state"] not in ("change", "keep"):
            continue
        settings = {**advice["assumes"]}
        if advice["state"] == "change":
            settings[name] = advice["value"]
        if result["verdict"] == "exceeds":
            assert settings, (name, advice)
        for other in advice["assumes"]:
            assert str(advice["assumes"][other]) in advice["reason"]
        again = with_settings(memfit, question, settings)
        word = "tight" if "tightly" in advice["reason"] else "fits"
        assert (name, again["verdict"]) == (name, word)


def with_settings(memfit: Memfit, question: tuple[str, ...], settings: dict[str, int]) -> Any:
    arguments = [each for name, value in settings.items() for each in (OPTIONS[name], str(value))]
    if "kv_bits" in settings:
        arguments += ["--quantized-kv-start", "0"]
    if "weight_bits" in settings and "--quantize" in question:
        place = question.index("--quantize")
        question = question[:place] + question[place + 2 :]
    return memfit("estimate", *question, *arguments, "--json").json


def test_a_mac_is_advised_with_what_else_has_to_change(memfit: Memfit) -> None:
    advice = memfit("estimate", *QUESTIONS[1], "--json").json["recommendation"]["memory_bytes"]
    assert advice["assumes"] == {"weight_bits": 5, "kv_bits": 8, "prefill_step": 256}
    assert "with weights of 5 bits and KV of 8 bits and prefill step 256" in advice["reason"]


@pytest.mark.parametrize("gigabytes", [8, 16, 32, 64, 192, 512])
def test_no_wired_limit_leaves_the_system_less_than_macos_ever_does(gigabytes: int) -> None:
    mac = memory_device(gigabytes * 10**9)
    assert mac_of_8_gb_leaves() == LEAST_LEFT_BYTES
    most = mac.memory_bytes - LEAST_LEFT_BYTES
    for need in (mac.working_set_bytes + 1, most - 2**20, most, most + 1, mac.memory_bytes - 1):
        found = wired_limit(need, mac)
        if found.sysctl_mebibytes is not None:
            assert found.left_for_system_bytes >= LEAST_LEFT_BYTES
            assert found.sysctl_mebibytes * 2**20 >= need
        else:
            assert need > most - 2**20 or need <= mac.working_set_bytes


def mac_of_8_gb_leaves() -> int:
    mac = find_device("m1-8")
    return mac.memory_bytes - mac.working_set_bytes


def test_a_trace_without_mlx_advises_no_method_that_may_not_be_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("memfit.estimators.trace.libraries.find_spec", lambda _: None)
    with pytest.raises(MachineError) as error:
        versions()
    assert "memfit[mlx]" in str(error.value)
    assert "formula" not in str(error.value)
