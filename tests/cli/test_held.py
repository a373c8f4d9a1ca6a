"""What the process holds, on the command line."""

from pathlib import Path

import pytest

from tests.cli.gating import write_policy
from tests.cli.running import Memfit
from tests.models import sample_config, write_config


def test_the_first_screen_says_what_the_process_holds(memfit: Memfit) -> None:
    text = " ".join(
        memfit("qwen3-8b-4bit", "--device", "m4-max-64", "--context", "32k").out.split()
    )
    assert "holds up to 14.7 GB, 4.6 GB returnable" in text
    short = memfit("qwen3-8b-4bit", "--device", "m4-max-64", "--context", "1k").out
    assert "returnable" not in short


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--memory", "16", "--reserve", "20GB"), "nothing is left"),
        (("--working-set", "16GB", "--reserve", "2GB"), "--reserve is of a machine's memory"),
        (("--reserve", "20GB"), "--reserve needs --device or --memory"),
    ],
)
def test_a_reserve_that_leaves_nothing_is_refused(
    memfit: Memfit, arguments: tuple[str, ...], text: str
) -> None:
    result = memfit("qwen3-8b-4bit", *arguments)
    assert result.code == 2
    assert text in result.err


def test_what_is_said_of_a_machine_holds_for_each_of_several(
    memfit: Memfit, tmp_path: Path
) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text('[{"ssh": "a", "memory": "64GB"}, {"ssh": "b", "device": "m4-max-64"}]')
    for machines in (("--hosts", str(hosts)), ("--memory", "64,64")):
        text = " ".join(memfit("llama-3.1-70b", *machines, "--reserve", "40GB").out.split())
        assert "GB beside the reserve" in text, machines
    refused = memfit("qwen3-4b-4bit", "--device", "m4-max-64,m4-max-64", "--gpu-cores", "2")
    assert (refused.code, "has 32 to 40 cores" in refused.err) == (2, True)


def test_the_gate_limits_what_is_held_and_the_buffers_that_leak(
    memfit: Memfit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = sample_config("qwen3.6-27b")
    write_config(tmp_path / "model", {**config, "quantization": {"group_size": 64, "bits": 4}})
    limits = {"held": "90%", "buffers": 250_000}
    work = {"prompt_tokens": 4096, "max_tokens": 4000}
    longer = {**work, "max_tokens": 6000}
    keys = {"model": "model", "device": "m4-max-64", "limits": limits}
    write_policy(tmp_path, short=keys | {"workload": work}, long=keys | {"workload": longer})
    run = memfit("gate", "--format", "json")
    short, long = (
        {check["limit"]: check for check in each["checks"]} for each in run.json["targets"]
    )
    assert run.code == 1
    assert all(check["passed"] for check in short.values())
    assert [long[name]["passed"] for name in limits] == [True, False]
    # 47 of its 48 recurrent layers leak a buffer a token.
    assert long["buffers"]["figure"] - short["buffers"]["figure"] == 47 * 2000
    assert long["buffers"]["unit"] == "buffers"
