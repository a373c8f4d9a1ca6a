"""``memfit plan server`` as a command."""

from pathlib import Path

import pytest

from tests.cli.running import Memfit

SAMPLES = Path(__file__).parents[2] / "sample_configs"
DENSE = SAMPLES / "qwen3-8b-4bit.yaml"
TRAFFIC = SAMPLES / "plans" / "traffic.csv"


def test_flags_that_do_not_fit_get_flags_that_do(memfit: Memfit) -> None:
    asked = ("plan", "server", DENSE, "--memory", "32GB", "--context", "8k", "--clients", "4")
    run = memfit(*asked, "--json")
    assert (run.code, run.json["verdict"]) == (1, "exceeds")
    better = run.json["fitting"]
    flags = [
        part
        for name in ("prompt_concurrency", "decode_concurrency", "prompt_cache_size")
        for part in (f"--{name.replace('_', '-')}", str(better[name]))
    ]
    again = memfit(*asked, "--prefill-step-size", str(better["prefill_step"]), *flags, "--json")
    assert (again.code, again.json["verdict"]) == (0, "fits")
    assert again.json["bound"] == run.json["fitting_bound"]


def test_the_command_to_paste_is_printed(memfit: Memfit) -> None:
    run = memfit("plan", "server", DENSE, "--memory", "64GB", "--context", "2k", "--clients", "1")
    assert run.code == 0
    assert "mlx_lm.server --model mlx-community/Qwen3-8B-4bit --prefill-step-size 2048" in run.out


def test_kv_bits_run_one_request_at_a_time(memfit: Memfit) -> None:
    data = memfit("plan", "server", DENSE, "--memory", "32GB", "--kv-bits", "8", "--json").json
    assert data["sequential"] == "KV bits switch batching off"
    assert data["usual"] is None


def test_recorded_requests_set_the_lengths(memfit: Memfit) -> None:
    run = memfit("plan", "server", DENSE, "--traffic", TRAFFIC, "--clients", "2", "--json")
    rows = [line.split(",") for line in TRAFFIC.read_text().splitlines()[1:]]
    assert run.json["requests"] == len(rows)
    assert run.json["longest_prompt_tokens"] == max(int(row[0]) for row in rows)


@pytest.mark.parametrize("size", ["26G", "26g", "26GB", "26gb", "26Gb", "26000M", "26000000000"])
def test_cache_sizes_are_read_as_mlx_lm_reads_them(memfit: Memfit, size: str) -> None:
    arguments = ("plan", "server", "qwen3-8b-4bit", "--memory", "64GB", "--clients", "1")
    plan = memfit(*arguments, "--prompt-cache-bytes", size, "--json").json
    assert plan["settings"]["prompt_cache_bytes"] == 26 * 10**9
