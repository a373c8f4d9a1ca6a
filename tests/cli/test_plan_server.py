"""``memfit plan server`` as a command."""

from pathlib import Path

import pytest

from memfit.estimators.base.units import format_bytes
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


def test_without_clients_the_flags_are_for_as_many_as_fit_with_a_prompt_cache(
    memfit: Memfit,
) -> None:
    asked = ("server", DENSE, "--memory", "32GB")
    run = memfit(*asked, "--json")
    assert run.json["clients"] == run.json["settings"]["decode_concurrency"] == 32
    better, clients = run.json["fitting"], run.json["fitting_clients"]
    assert better["prompt_cache_size"] > 0
    assert better["decode_concurrency"] >= clients > 1
    out = " ".join(memfit(*asked).out.split())
    bound = format_bytes(run.json["fitting_bound"]["needed_bytes"])
    assert f"no order of such requests from {clients} clients takes more than {bound}" in out
    # What is printed, given back, has the verdict and the bound that it was printed with.
    flags = (f"--{key}-concurrency={better[f'{key}_concurrency']}" for key in ("prompt", "decode"))
    kept = f"--prompt-cache-size={better['prompt_cache_size']}"
    again = memfit(*asked, *flags, kept, f"--clients={clients}", "--json").json
    assert (again["verdict"], again["bound"]) == ("fits", run.json["fitting_bound"])
    more = memfit(*asked, *flags, kept, f"--clients={clients + 1}", "--json").json
    assert more["bound"]["needed_bytes"] > again["bound"]["needed_bytes"]


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


ASKED = ("plan", "server", DENSE, "--context", "8k", "--clients", "4")


def test_what_only_usual_mixes_fit_is_tight_and_both_figures_are_printed(memfit: Memfit) -> None:
    run = memfit(*ASKED, "--memory", "64GB", "--json")
    data = run.json
    limit = data["device"]["working_set_bytes"]
    assert (run.code, data["verdict"]) == (0, "tight")
    assert data["usual"]["needed_bytes"] <= limit < data["bound"]["needed_bytes"]
    assert max(mix["needed_bytes"] for mix in data["mixes"]) == data["usual"]["needed_bytes"]
    assert len(data["mixes"]) == 4
    # The cache is the first lever.
    assert data["fitting"]["prompt_cache_size"] == 4
    for style in ("table", "markdown", "html"):
        out = " ".join(memfit(*ASKED, "--memory", "64GB", "--format", style).out.split())
        for nbytes in (data["usual"]["needed_bytes"], data["bound"]["needed_bytes"]):
            assert format_bytes(nbytes) in out
        assert "orst moment" not in out
        assert "4 of 10 caches are kept" in out


def test_a_cache_size_of_zero_says_its_price(memfit: Memfit) -> None:
    run = memfit(*ASKED[:3], "--context", "21500", "--clients", "1", "--memory", "16GB")
    assert "--prompt-cache-size 0" in run.out
    assert "computes its whole prompt again" in " ".join(run.out.split())


def test_no_simulation_decides_about_flags(memfit: Memfit) -> None:
    asked = (*ASKED, "--memory", "32GB", "--json")
    better = memfit(*asked).json
    limit = better["device"]["working_set_bytes"]
    assert better["fitting_bound"]["needed_bytes"] * 10 <= limit * 9


def test_times_in_the_file_replay_the_arrivals(memfit: Memfit, tmp_path: Path) -> None:
    header = "prompt_tokens,completion_tokens,arrival_seconds,duration_seconds\n"
    together = [f"4000,200,{number / 10},60\n" for number in range(4)]
    apart = [f"4000,200,{number * 100},60\n" for number in range(4)]
    peaks, clients = [], []
    for name, rows in (("together", together), ("apart", apart)):
        path = tmp_path / f"{name}.csv"
        path.write_text(header + "".join(rows))
        data = memfit("plan", "server", DENSE, "--memory", "64GB", "--traffic", path, "--json").json
        peaks.append(data["usual"]["needed_bytes"])
        clients.append(data["clients"])
        assert not [note for note in data["notes"] if note["code"] == "server-traffic-times"]
    assert peaks[0] > peaks[1]
    assert clients == [4, 1]


def test_without_times_the_answer_says_what_timing_changes(memfit: Memfit) -> None:
    run = memfit("plan", "server", DENSE, "--traffic", TRAFFIC, "--clients", "2")
    assert "Timing alone moves the peak by a third" in " ".join(run.out.split())


def test_times_are_numbers_and_in_every_row(memfit: Memfit, tmp_path: Path) -> None:
    header = "prompt_tokens,completion_tokens,arrival_seconds,duration_seconds\n"
    for rows, problem in (
        ("10,5,now,1\n", "arrival_seconds: 'now' is not a number of seconds"),
        ("10,5,nan,1\n", "arrival_seconds: 'nan' is not a number of seconds"),
        ("10,5,1,\n", "duration_seconds: '' is not a number of seconds"),
        ("10,5,1,1\n10,5,,\n", "in every row, or in none"),
    ):
        path = tmp_path / "traffic.csv"
        path.write_text(header + rows)
        run = memfit("plan", "server", DENSE, "--traffic", path)
        assert run.code == 2
        assert problem in " ".join(run.err.split())


def test_requests_at_once_of_a_context_plan_say_how_a_server_differs(memfit: Memfit) -> None:
    data = memfit("plan", "context", DENSE, "--memory", "32GB", "--json").json
    notes = [note["message"] for note in data["notes"] if note["code"] == "requests-in-one-batch"]
    assert len(notes) == 1
    assert "memfit plan server" in notes[0]
