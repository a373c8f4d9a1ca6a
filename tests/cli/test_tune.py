"""``memfit tune``: real models through the whole command, and every error."""

import csv
import io
import json
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from memfit.cli.prompts import prompt_text
from memfit.cli.render.output import Format, rendered
from memfit.cli.render.views import tune_text
from memfit.cli.render.views.tune import TuneView
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import Units
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.machine.devices import find_device
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.decode_speed import decode_speed
from memfit.estimators.sizing.prefill_speed import first_tokens
from memfit.probes.experiments.generate import TuneRequest, tune
from memfit.probes.experiments.sweep import Sweeps
from memfit.probes.process import ModelProcess
from memfit.probes.result import TuneResult
from memfit.probes.store import Store
from tests.checkpoints import Checkpoints
from tests.cli.running import Memfit, Run
from tests.cli.test_bad_input import assert_one_line
from tests.cli.test_pages import Page
from tests.gguf.writing import recorded, write
from tests.selection import quick

pytest.importorskip("mlx_lm", reason="the models that run are mlx-lm's")
pytestmark = pytest.mark.usefixtures("home")
SHORT = ("--prompt-tokens", "70", "--prefill-step", "32", "--max-tokens", "3")
TO_THE_BYTE = ("weights", "kv", "kv_held", "ssm", "prefill_kv", "prefill_kv_held", "prefill_ssm")
PEAK_ERROR_PERCENT = 10  # docs/accuracy.md


@pytest.fixture
def dense(checkpoints: Checkpoints) -> Path:
    return checkpoints("dense")


@pytest.fixture(scope="module")
def result(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> TuneResult:
    """What one real run found, for every test of how it is shown."""
    path, place = checkpoints("dense"), tmp_path_factory.mktemp("tuned")
    return tune(
        TuneRequest(
            model=str(path),
            checkpoint=open_checkpoint(str(path)),
            workload=Workload(prompt_tokens=70, prefill_step=32, max_tokens=3),
        ),
        start=partial(ModelProcess, path, timeout_seconds=60),
        sweeps=Sweeps(place / "sweeps", Store(place / "measurements")),
    )


def shown(result: TuneResult, form: Format) -> Run:
    return Run(0, rendered(TuneView(result, Units.GB, plot=False), form, to_file=False), "")


def figures_of(run: Run) -> dict[str, dict[str, Any]]:
    return {figure["name"]: figure for figure in run.json["points"][0]["figures"]}


@pytest.mark.parametrize("name", quick(["sliding", "mla", "hybrid"], ["hybrid"]))
def test_weights_caches_and_states_are_estimated_to_the_byte(
    memfit: Memfit, checkpoints: Checkpoints, name: str
) -> None:
    run = memfit("tune", checkpoints(name), *SHORT, "--json")
    assert run.code == 0, run.err
    figures = figures_of(run)
    assert {figures[n]["difference_bytes"] for n in TO_THE_BYTE} == {0}
    for peak in ("prefill_peak", "decode_peak", "peak"):
        figure = figures[peak]
        off = abs(figure["difference_bytes"])
        assert 100 * off <= PEAK_ERROR_PERCENT * figure["measured_bytes"], figure


def test_what_mlx_holds_is_measured_and_compared(memfit: Memfit, dense: Path) -> None:
    run = memfit("tune", dense, *SHORT, "--footprint", "--json")
    assert run.code == 0, run.err
    figures = figures_of(run)
    held = figures["held"]
    assert held["measured_bytes"] > figures["peak"]["measured_bytes"]
    # The CPU keeps 32 MiB at most, and so does the estimate.
    assert 0 <= held["estimated_bytes"] - figures["peak"]["estimated_bytes"] <= 32 * 2**20
    # No chip of Apple: there are no seconds to compare.
    assert (run.json["first_token"], run.json["decode_speed"]) == (None, None)
    notes = {note["code"] for note in run.json["notes"]}
    is_mac = sys.platform == "darwin"
    assert ("footprint" in figures, "footprint" in notes) == (is_mac, not is_mac)


def test_measured_seconds_stand_beside_the_estimate(result: TuneResult) -> None:
    sized = Catalog().sized("qwen3-8b-4bit", device=find_device("m4-max-64"))
    work = Workload(prompt_tokens=2048, max_tokens=100)
    estimated = replace(
        result, first_token=first_tokens(sized, work)[0], decode_speed=decode_speed(sized, work)
    )
    text = " ".join(shown(estimated, "table").out.split())
    assert "(estimated 2." in text
    low, high = estimated.decode_speed.range_tokens_per_second  # type: ignore[union-attr, misc]
    assert f"(estimated {tune_text.rate(low)} to {tune_text.rate(high)})" in text
    assert "(estimated" not in shown(result, "table").out


@pytest.mark.exhaustive
def test_every_measured_byte_is_accounted_for(result: TuneResult) -> None:
    run = shown(result, "json")
    figures = figures_of(run)
    measured = {name: figure["measured_bytes"] for name, figure in figures.items()}
    estimated = {name: figure["estimated_bytes"] for name, figure in figures.items()}
    there = measured["active"] + measured["kv"] + measured["ssm"]
    workspace = estimated["peak"] - estimated["active"] - estimated["kv"] - estimated["ssm"]
    assert measured["peak"] == there + workspace + measured["unaccounted"]
    assert measured["peak"] == max(measured["prefill_peak"], measured["decode_peak"])
    assert (
        measured["workspace"]
        == measured["peak"] - measured["weights"] - measured["kv"] - measured["ssm"]
    )
    # It evaluates the logits of a whole chunk, which generation never does.
    assert measured["swift_workspace"] > 0
    assert measured["process"] > measured["active"]
    assert all(figure["spread_bytes"] >= 0 for figure in figures.values())
    point = run.json["points"][0]
    assert point["repeats"] == 3
    assert point["speed"]["decode_tokens_per_second"] > 0
    assert run.json["loaded"]["load_ns"] > 0


@pytest.mark.exhaustive
def test_a_batch_has_no_shortest_prompt_above_the_longest(memfit: Memfit, dense: Path) -> None:
    run = memfit("tune", dense, *SHORT, "--batch", "2", "--shortest-prompt", "71")
    assert_one_line(run, 2, "71 tokens is longer than the longest, which has 70")


@pytest.mark.exhaustive
def test_a_text_prompt_uses_the_chat_template(
    memfit: Memfit, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    text = "Every byte has a reason."
    (tmp_path / "prompt.txt").write_text(text)
    ask = ("--prompt", f"@{tmp_path / 'prompt.txt'}", "--max-tokens", "1", "--json")
    run = memfit("tune", checkpoints("chat"), *ask)
    assert run.code == 0, run.err
    # Byte-level tokens of a template that adds [user] and [assistant].
    added = len("<s>[user]\n[assistant]")
    assert 5 < run.json["prompt_tokens"] <= len(text) + added


def test_a_prompt_is_the_same_as_text_file_or_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "Größer als zuvor\n"
    (tmp_path / "prompt.txt").write_bytes(text.encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    for given in (text, f"@{tmp_path / 'prompt.txt'}", "-"):
        assert prompt_text(given) == text


def test_a_typed_prompt_is_read_as_mlx_lm_reads_the_pasted_one(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(r"a\nb\tc")
    assert prompt_text(r"a\nb\tc") == "a\nb\tc"
    assert prompt_text(f"@{file}") == r"a\nb\tc"  # mlx_lm.generate does not change piped text
    with pytest.raises(InputError, match="empty"):
        prompt_text(r"\n")


@pytest.mark.exhaustive
def test_commands_include_the_prompt_or_its_source(
    memfit: Memfit, dense: Path, result: TuneResult, tmp_path: Path
) -> None:
    file = tmp_path / "my prompt.txt"
    file.write_text("Every byte has a reason.")
    for given, ends in ((r"a\nb", r"--prompt 'a\nb'"), (f"@{file}", f" < '{file}'")):
        run = memfit("tune", dense, "--prompt", given, "--max-tokens", "1", "--json")
        assert ends in run.json["flags"][0]
        assert "standard-input" not in {note["code"] for note in run.json["notes"]}
    run = shown(result, "json")
    assert " --prompt - " in run.json["flags"][0]
    assert "standard-input" in {note["code"] for note in run.json["notes"]}


@pytest.mark.exhaustive
def test_a_model_without_a_tokenizer_has_no_commands(
    memfit: Memfit, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    file = tmp_path / "t.json"
    run = memfit("tune", checkpoints("no-tokenizer"), *SHORT, "--json", "-o", file)
    assert (run.code, run.out) == (0, ""), run.err
    data = Run(0, file.read_text(), "").json
    assert data["points"][0]["status"] == "measured"
    assert data["flags"] == []
    assert "cannot run the model without one" in json.dumps(data["notes"])
    assert "prompt" in {note["code"] for note in data["notes"]}


@pytest.mark.exhaustive
def test_everything_fits_a_terminal_of_eighty_columns(
    memfit: Memfit, dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ask = ("--prompt-tokens", "1", "--max-tokens", "0", "--sweep", "context=100,200")
    run = memfit("tune", dense, *ask, "--kv-bits", "none", "--plot", "--margin", "1GB")
    assert run.code == 0, run.err
    lines = [line for line in run.out.splitlines()[1:] if "mlx_lm." not in line]
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if line != line.rstrip()]
    assert "1 prompt token," in run.out
    assert "prompt read in" in run.out
    (heading,) = (line for line in lines if line.startswith("Prompt"))
    assert heading.split()[:5] == ["Prompt", "Step", "KV", "bits", "Runs"]


def test_without_standard_input_there_is_no_piped_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(InputError, match="closed"):
        prompt_text("-")


@pytest.mark.exhaustive(daily=True)
def test_a_result_is_a_page_with_its_charts(result: TuneResult) -> None:
    page = Page(rendered(TuneView(result, Units.GB, plot=True), "html", to_file=True))
    assert [each["aria-label"] for each in page.every("svg")] == [
        "Memory against context",
        "Prefill, tokens/s against memory",
        "Decode, tokens/s against memory",
    ]
    assert "Peak in prefill" in page.inside["th"]


@pytest.mark.exhaustive
def test_flags_are_the_only_output_on_stdout(memfit: Memfit, dense: Path) -> None:
    run = memfit("tune", dense, *SHORT, "--flags")
    assert run.code == 0, run.err
    generate, server = run.out.splitlines()
    assert shlex.split(generate)[:3] == ["mlx_lm.generate", "--model", str(dense)]
    assert shlex.split(server)[:3] == ["mlx_lm.server", "--model", str(dense)]
    assert "Peak in prefill" in run.err


def test_csv_has_a_line_for_each_point_with_estimate_and_measurement(result: TuneResult) -> None:
    run = shown(result, "csv")
    rows = list(csv.DictReader(io.StringIO(run.out)))
    assert rows[0]["prompt_tokens"] == "70"
    assert rows[0]["weights_estimated_bytes"] == rows[0]["weights_measured_bytes"] != ""
    assert rows[0]["status"] == "measured"
    assert all(row["weights_measured_bytes"] for row in rows)


def test_markdown_and_table_show_the_values_of_json(result: TuneResult) -> None:
    table, markdown = (shown(result, form).out for form in ("table", "markdown"))
    for words in ("Active after load", "KV cache after prefill", "Unaccounted", "median of 3"):
        assert words in table
        assert words in markdown
    assert "| Weights |" in markdown
    assert "mlx_lm.generate --model" in markdown


@pytest.mark.exhaustive
def test_a_run_beyond_free_memory_is_rejected_before_loading(
    memfit: Memfit, dense: Path, home: Path
) -> None:
    run = memfit("tune", dense, *SHORT, "--margin", "100TB")
    assert_one_line(run, 5, "estimated to need 100.1 TB", "are free", "--force")
    assert not home.exists()


@pytest.mark.exhaustive
def test_a_rejected_run_can_be_forced(memfit: Memfit, dense: Path) -> None:
    run = memfit("tune", dense, *SHORT, "--margin", "100TB", "--force", "--json")
    assert run.code == 1  # measured, and with such a margin it does not fit
    assert run.json["verdict"] == "exceeds"
    (note,) = (note for note in run.json["notes"] if note["code"] == "forced")
    assert note["message"].startswith("forced: ")
    assert run.json["points"][0]["status"] == "measured"


@pytest.mark.exhaustive
def test_a_stopped_run_shows_its_figures_so_far(memfit: Memfit, dense: Path) -> None:
    run = memfit("tune", dense, *SHORT, "--memory-limit", "1MB", "--force", "--json")
    assert run.code == 5
    assert "more than the memory limit of 1.0 MB" in run.err
    point = run.json["points"][0]
    assert point["status"] == "failed"
    assert point["peak_bytes"] is None
    weights = next(f for f in point["figures"] if f["name"] == "weights")
    assert weights["estimated_bytes"] == weights["measured_bytes"] > 0
    # A prompt that did not run is not recommended.
    assert run.json["flags"] == []
    assert "memory-limit" in {note["code"] for note in run.json["notes"]}


@pytest.mark.exhaustive
def test_a_run_must_fit_the_memory_limit(memfit: Memfit, dense: Path, home: Path) -> None:
    ask = ("tune", dense, *SHORT, "--margin", "0B", "--memory-limit")
    assert_one_line(memfit(*ask, "1MB"), 5, "above the memory limit of 1.0 MB", "--force")
    assert not home.exists()
    run = memfit(*ask, "3MB", "--sweep", "context=64,1000", "--json")
    assert run.code == 0, run.err
    assert [point["status"] for point in run.json["points"]] == ["measured", "measured", "skipped"]
    assert "above the memory limit of 3.0 MB" in run.json["points"][2]["reason"]
    assert run.json["recommendation"]["context_tokens"]["value"] < 1000


@pytest.mark.exhaustive
def test_a_run_the_class_does_not_support_has_no_commands(
    memfit: Memfit, checkpoints: Checkpoints
) -> None:
    ask = ("tune", checkpoints("sliding"), *SHORT)
    eight_bits = ("--kv-bits", "8", "--quantized-kv-start", "0")
    assert_one_line(memfit(*ask, *eight_bits, "--force"), 3, "RotatingKVCache")
    assert_one_line(memfit(*ask, *eight_bits, "--sweep", "kv-bits=none"), 3, "rotating cache")
    run = memfit(*ask, "--sweep", "kv-bits=none,8", "--force", "--json")
    assert run.code == 0, run.err
    assert [point["status"] for point in run.json["points"]] == ["measured", "skipped"]
    assert "RotatingKVCache" in run.json["points"][1]["reason"]


def test_an_unwritable_output_is_reported_before_the_run(
    memfit: Memfit, dense: Path, home: Path, tmp_path: Path
) -> None:
    for output in (tmp_path / "nowhere" / "t.json", tmp_path):
        run = memfit("tune", dense, *SHORT, "-o", output)
        assert_one_line(run, 2, str(output))
    assert not home.exists()


@pytest.mark.exhaustive
def test_a_prompt_beyond_the_models_limit_has_to_be_forced(
    memfit: Memfit, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    model = tmp_path / "short"
    shutil.copytree(checkpoints("dense"), model)
    change(model, max_position_embeddings=64)
    assert_one_line(memfit("tune", model, *SHORT), 2, "73 tokens", "limit of 64", "--force")
    forced = memfit("tune", model, *SHORT, "--force", "--json")
    assert forced.code == 0, forced.err
    assert "beyond-context" in {note["code"] for note in forced.json["notes"]}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), ["--prompt", "--prompt-tokens"]),
        (("--prompt", "a", "--prompt-tokens", "3"), ["--prompt", "--prompt-tokens"]),
        (("--prompt", ""), ["empty"]),
        (("--prompt", " \n\t"), ["empty"]),
        (("--prompt", "@"), ["@"]),
        (("--prompt", "a", "--plot", "--json"), ["--plot", "json has no charts"]),
        (("--prompt", "a", "--plot", "--format", "csv"), ["--plot", "csv has no charts"]),
        (("--prompt-tokens", "999999999999999"), ["more than 1099511627776 tokens"]),
        (("--prompt", "a", "--kv-bits", "0"), ["--kv-bits", "none"]),
        (("--prompt", "@nowhere.txt"), ["nowhere.txt"]),
        (("--prompt-tokens", "0"), ["prompt tokens 0"]),
        (("--prompt-tokens", "many"), ["--prompt-tokens", "many"]),
        (("--prompt-tokens", "9", "--memory-limit", "64G"), ["--memory-limit", "64G"]),
        (("--prompt-tokens", "9", "--kv-bits", "7"), ["KV bits 7"]),
    ],
)
def test_bad_options_give_a_one_line_error(
    memfit: Memfit, dense: Path, options: tuple[str, ...], words: list[str]
) -> None:
    assert_one_line(memfit("tune", dense, *options), 2, *words)


def test_a_prompt_that_is_not_text_gives_the_bad_byte(
    memfit: Memfit, dense: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompt.bin").write_bytes(b"ab\xff")
    run = memfit("tune", dense, "--prompt", f"@{tmp_path / 'prompt.bin'}")
    assert_one_line(run, 2, "prompt.bin", "UTF-8", "byte 2")


@pytest.mark.exhaustive
def test_a_text_needs_a_tokenizer(memfit: Memfit, checkpoints: Checkpoints) -> None:
    run = memfit("tune", checkpoints("no-tokenizer"), "--prompt", "hello")
    assert_one_line(run, 2, "no tokenizer", "--prompt-tokens")


@pytest.mark.exhaustive
def test_a_class_mlx_lm_does_not_have_is_unsupported(
    memfit: Memfit, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    model = tmp_path / "unknown"
    shutil.copytree(checkpoints("dense"), model)
    change(model, model_type="qwen3x")
    run = memfit("tune", model, *SHORT)
    assert (run.code, "'qwen3x' is not described" in run.err) == (3, True)


@pytest.mark.exhaustive
def test_weights_that_do_not_match_the_config_report_the_first_tensor(
    memfit: Memfit, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    model = tmp_path / "mismatched"
    shutil.copytree(checkpoints("dense"), model)
    config = json.loads((model / "config.json").read_text())
    change(model, intermediate_size=config["intermediate_size"] * 2)
    assert_one_line(memfit("tune", model, *SHORT), 2, "tensor", "mlp", "shape")


def test_gguf_is_not_loaded_by_mlx_lm(memfit: Memfit, tmp_path: Path) -> None:
    entry = recorded()["qwen3"]
    path = write(tmp_path / "model.gguf", entry.metadata, entry.tensors)
    assert_one_line(memfit("tune", path, *SHORT), 3, "GGUF", "mlx_lm.convert")


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_one_file_of_a_model_is_not_enough(memfit: Memfit, dense: Path, file: str) -> None:
    assert_one_line(memfit("tune", dense / file, *SHORT), 2, file, "directory")


def test_without_mlx_the_missing_package_is_reported(
    memfit: Memfit, dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlx", None)
    assert_one_line(memfit("tune", dense, *SHORT), 5, "mlx", "install")


def change(model: Path, **keys: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
