"""Commands for mlx_lm's programs: existing flags, and values quoted for a shell."""

import argparse
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.machine.devices import memory_device
from memfit.estimators.results.advice import Advice, Recommendation
from memfit.estimators.runtimes.mlx_lm_commands import together
from memfit.estimators.runtimes.runtime import judge
from memfit.estimators.sizing.advise import NO_ADVICE
from memfit.estimators.sizing.opening import size
from memfit.estimators.sizing.server_bound import ServerBound, need_of
from memfit.estimators.sizing.sized_model import SizedModel
from memfit.probes.experiments.recommendation import command_lines, recommended_workload
from tests.models import QWEN3_4B_4BIT, write_config

ASKED = Workload(prompt_tokens=4096, max_tokens=100)
SETTINGS = replace(ASKED, prefill_step=512, kv_bits=8, kv_group_size=32, quantized_kv_start=0)


@pytest.fixture(scope="module")
def sized(tmp_path_factory: pytest.TempPathFactory) -> SizedModel:
    config = write_config(tmp_path_factory.mktemp("model"), QWEN3_4B_4BIT)
    return size(open_checkpoint(str(config)), device=memory_device(8 * 10**9), margin_bytes=0)


def recommended(**values: int) -> Recommendation:
    """Return a recommendation that changes these settings."""
    changes = {name: Advice("change", value, "") for name, value in values.items()}
    return replace(NO_ADVICE.recommendation, **changes)


def lines(sized: SizedModel, workload: Workload, prompt: str | None = "Hi") -> tuple[str, ...]:
    return command_lines(sized, workload, model="org/model", prompt=prompt)


def test_the_recommended_settings_are_in_both_lines(sized: SizedModel) -> None:
    generate, server = lines(sized, SETTINGS, 'Say "it\'s" $HOME')
    shared = "--prefill-step-size 512 --kv-bits 8 --kv-group-size 32 --quantized-kv-start 0"
    assert generate == (
        "mlx_lm.generate --model org/model --max-tokens 100"
        f" --prompt 'Say \"it'\"'\"'s\" $HOME' {shared}"
    )
    assert server.rpartition(" ")[0] == (
        f"mlx_lm.server --model org/model {shared}"
        " --prompt-concurrency 1 --decode-concurrency 1 --prompt-cache-size"
    )


def test_a_server_is_printed_only_with_flags_that_fit_in_every_order(sized: SizedModel) -> None:
    kept = []
    for tokens in (256, 4096, 8192, 12_000, 20_000):
        workload = replace(ASKED, prompt_tokens=tokens)
        printed = lines(sized, workload)
        if len(printed) == 1:
            continue
        step, count = re.findall(r"--prefill-step-size (\d+).*-cache-size (\d+)", printed[1])[0]
        served = replace(workload, prefill_step=int(step))
        need = need_of(ServerBound(sized, served, 1).moment(together(served, int(count))))
        assert judge(need, sized.device)[0] == "fits"
        kept.append(int(count))
    assert 0 < len(kept) < 5
    assert kept == sorted(kept, reverse=True)


def test_without_a_text_the_prompt_is_read_from_standard_input(sized: SizedModel) -> None:
    assert " --prompt - " in lines(sized, ASKED, None)[0]


def test_a_prompt_file_is_passed_by_the_shell(sized: SizedModel) -> None:
    limited = replace(ASKED, max_kv_size=1024)
    for workload in (ASKED, limited):
        line = command_lines(
            sized, workload, model="org/model", prompt=None, prompt_file="my prompt.txt"
        )[0]
        assert " --prompt - " in line
        assert line.endswith(" < 'my prompt.txt'")


def test_no_command_line_requests_zero_tokens(sized: SizedModel) -> None:
    assert not [line for line in lines(sized, replace(ASKED, max_tokens=0)) if "-tokens" in line]


def test_the_server_line_is_omitted_when_it_cannot_limit_a_cache(sized: SizedModel) -> None:
    (generate,) = lines(sized, replace(ASKED, max_kv_size=1024))
    assert generate.endswith("--max-kv-size 1024")


@given(st.text(min_size=1), st.text(min_size=1))
def test_any_model_and_prompt_reach_the_program_unchanged(
    sized: SizedModel, model: str, prompt: str
) -> None:
    parser = argparse.ArgumentParser()
    for flag in ("--model", "--prompt", "--max-tokens", "--prefill-step-size"):
        parser.add_argument(flag)
    line = command_lines(sized, ASKED, model=model, prompt=prompt)[0]
    found = parser.parse_args(shlex.split(line)[1:])
    assert (found.model, found.prompt) == (model, prompt)


@pytest.mark.parametrize("program", ["generate", "server"])
def test_the_programs_accept_every_flag(sized: SizedModel, program: str) -> None:
    spec = find_spec("mlx_lm")
    if spec is None or spec.origin is None:
        pytest.skip("the flags are mlx-lm's")
    source = Path(spec.origin).with_name(f"{program}.py").read_text(encoding="utf-8")
    known = set(re.findall(r'"(--[a-z-]+)"', source))
    workload = replace(SETTINGS, max_kv_size=512) if program == "generate" else SETTINGS
    written = lines(sized, workload)[program == "server"]
    assert {word for word in shlex.split(written) if word.startswith("--")} <= known


def test_a_recommendation_that_does_not_fit_with_another_is_omitted(sized: SizedModel) -> None:
    asked = Workload(prompt_tokens=16_000, prefill_step=1024)
    larger = replace(asked, prefill_step=2048)
    assert judge(sized.requirement(asked), sized.device)[0] == "fits"
    assert judge(sized.requirement(larger), sized.device)[0] != "fits"
    assert recommended_workload(sized, larger, recommended(prefill_step=1024)) == asked
    assert recommended_workload(sized, asked, recommended(prefill_step=2048)) == asked


def test_recommended_kv_bits_apply_from_the_first_token(sized: SizedModel) -> None:
    found = recommended_workload(sized, ASKED, recommended(kv_bits=8))
    assert found == replace(ASKED, kv_bits=8, quantized_kv_start=0)
    requested = replace(ASKED, kv_bits=8, quantized_kv_start=100)
    assert recommended_workload(sized, requested, recommended()) == requested


def test_a_model_that_never_fits_has_no_command_line(sized: SizedModel) -> None:
    too_long = replace(ASKED, prompt_tokens=10**6)
    assert recommended_workload(sized, too_long, recommended()) is None
