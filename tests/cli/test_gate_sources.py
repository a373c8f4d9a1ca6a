"""The source of a model in a policy: no folder takes the place of what the policy names."""

from pathlib import Path

import pytest

from tests.cli.gating import target, write_plain_config, write_policy
from tests.cli.running import Memfit
from tests.models import QWEN3_4B

SAMPLE = "qwen3-0.6b"
LIMITS = {"peak": "90%"}


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.mark.parametrize("name", [SAMPLE, SAMPLE.upper()])
@pytest.mark.parametrize("folder", [".", "policies"])
def test_a_name_of_a_sample_and_of_a_path_is_bad_input(
    folder: str, name: str, checkout: Path, memfit: Memfit
) -> None:
    for place in (checkout, checkout / folder):
        write_plain_config(place / name, {**QWEN3_4B, "num_hidden_layers": 1})
        (checkout / folder).mkdir(exist_ok=True)
        policy = write_policy(checkout / folder, it=target(LIMITS, model=name))
        run = memfit("gate", "check", "--policy", policy, "--format", "json")
        assert run.code == 2
        message = run.json["targets"][0]["message"]
        assert (
            f"write sample:{SAMPLE}, or ./{name} for the path" in message or "found in" in message
        )


def test_both_can_be_named_and_the_report_says_which_was_read(
    checkout: Path, memfit: Memfit
) -> None:
    write_plain_config(checkout / SAMPLE, {**QWEN3_4B, "num_hidden_layers": 1})
    for name, source in ((f"sample:{SAMPLE}", "sample"), (f"./{SAMPLE}", "local")):
        write_policy(checkout, it=target(LIMITS, model=name))
        run = memfit("gate", "--format", "json")
        assert (run.code, run.json["targets"][0]["source"]) == (0, source)
        assert ("(sample) on" in memfit("gate").out) == (source == "sample")


@pytest.mark.parametrize(
    "name", ["ollama:qwen3:4b", "modelscope:org/name", "https://huggingface.co/org/name"]
)
def test_a_path_does_not_take_the_place_of_a_store_or_a_url(
    name: str, checkout: Path, memfit: Memfit
) -> None:
    write_plain_config(checkout / name, QWEN3_4B)
    write_policy(checkout, it=target(LIMITS, model=name))
    assert memfit("gate").code in (2, 3, 4)
    assert memfit("gate", name, name).code in (2, 3, 4)


def test_a_path_that_is_found_in_two_places_is_bad_input(checkout: Path, memfit: Memfit) -> None:
    (checkout / "policies").mkdir()
    policy = write_policy(checkout / "policies", it=target(LIMITS, path="models/chat"))
    write_plain_config(checkout / "policies" / "models" / "chat", QWEN3_4B)
    assert memfit("gate", "check", "--policy", policy).code == 0
    write_plain_config(checkout / "models" / "chat", {**QWEN3_4B, "num_hidden_layers": 1})
    run = memfit("gate", "check", "--policy", policy, "--format", "json")
    assert run.code == 2
    assert "in the working directory; give the whole path" in run.json["targets"][0]["message"]
