"""`memfit compare`: each model has the figures of `memfit estimate`, with differences."""

import csv
import io
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import UNDESCRIBED
from tests.cli.running import Memfit, Run
from tests.cli.test_bad_input import assert_one_line
from tests.cli.test_first_screen import SAMPLES
from tests.models import QWEN3_4B, QWEN3_4B_4BIT, QWEN3_NEXT_80B, write_checkpoint, write_config
from tests.sparse import Shapes

QWEN3_4B_8BIT = {**QWEN3_4B, "quantization": {"group_size": 64, "bits": 8}}
QWEN3_NEXT_4BIT = {**QWEN3_NEXT_80B, "quantization": {"group_size": 64, "bits": 4}}
_MEMFIT = "from memfit.cli.app import main; main()"
DEVICE = ("--device", "m4-pro-24")


@pytest.fixture
def four_bit(tmp_path: Path) -> Path:
    return write_config(tmp_path / "qwen3-4b-4bit", QWEN3_4B_4BIT)


@pytest.fixture
def eight_bit(tmp_path: Path) -> Path:
    return write_config(tmp_path / "qwen3-4b-8bit", QWEN3_4B_8BIT)


@pytest.fixture
def hybrid(tmp_path: Path) -> Path:
    return write_config(tmp_path / "qwen3-next-4bit", QWEN3_NEXT_4BIT)


@pytest.fixture
def unknown(tmp_path: Path) -> Path:
    return write_config(tmp_path / "unknown", {**QWEN3_4B, "model_type": "qwen3x"})


def figures_of(run: Run) -> dict[str, list[Any]]:
    return {figure["name"]: figure["values"] for figure in run.json["figures"]}


def test_every_figure_equals_the_estimate(memfit: Memfit, four_bit: Path, hybrid: Path) -> None:
    figures = figures_of(memfit("compare", four_bit, hybrid, *DEVICE, "--json"))
    for index, model in enumerate((four_bit, hybrid)):
        alone = memfit("estimate", model, *DEVICE, "--json").json
        parts = alone["components"]
        expected = {
            "weights": parts["weights"]["bytes"],
            "resident_weights": parts["weights"]["resident_bytes"],
            "kv_per_token": parts["kv"]["bytes_per_token"],
            "kv": parts["kv"]["bytes"],
            "state": parts["ssm"]["bytes"],
            "workspace": parts["workspace"]["bytes"],
            "peak": alone["peak_bytes"],
            "recommended_context": alone["recommendation"]["context_tokens"]["value"],
        }
        for name, nbytes in parts["weights"]["by_part"].items():
            if f"weights.{name}" in figures:
                expected[f"weights.{name}"] = nbytes
            else:
                assert nbytes == 0
        shown = {n: values[index] and values[index]["value"] for n, values in figures.items()}
        assert shown == expected


def test_the_basis_of_a_peak_is_the_weakest_of_its_parts(
    memfit: Memfit, four_bit: Path, tmp_path: Path
) -> None:
    pytest.importorskip("mlx_lm")
    traced = write_config(tmp_path / "traced", UNDESCRIBED["solar_open"])
    figures = figures_of(memfit("compare", four_bit, traced, *DEVICE, "--context", "300", "--json"))
    parts = ("weights", "kv", "workspace", "peak")
    assert [figures[name][0]["basis"] for name in parts] == [
        "derived",
        "exact",
        "derived",
        "derived",
    ]
    assert [figures[name][1]["basis"] for name in parts] == ["traced"] * 4
    # zinc's workspace and peak are upper bounds; the context that fits is not.
    runs = ("compare", four_bit, *DEVICE, "--runtimes", "mlx-lm,zinc")
    figures = figures_of(memfit(*runs, "--json"))
    assert [value["basis"] for value in figures["peak"]] == ["derived", "bound"]
    text = memfit(*runs).out
    assert text.count("up to 3.") == 1
    assert "up to 40960 tokens" not in text


def test_differences_are_relative_to_the_first_model(
    memfit: Memfit, four_bit: Path, eight_bit: Path
) -> None:
    figures = figures_of(memfit("compare", four_bit, eight_bit, four_bit, "--json"))
    # 4,021,784,576 parameters; norms are not quantised: 36 x (2 x 2560 + 2 x 128) + 2560 elements.
    packed = 4_021_784_576 - (36 * (2 * 2560 + 2 * 128) + 2560)
    weights = figures["weights"]
    assert weights[0] == {"value": 2_262_535_712, "basis": "derived", "difference": None}
    # Eight bits instead of four: half a byte more for each packed element; the scales are equal.
    assert weights[1]["difference"]["amount"] == packed // 2
    assert weights[1]["difference"]["percent"] == 88.87
    assert weights[2]["difference"] == {"amount": 0, "percent": 0.0}
    assert figures["kv_per_token"][1]["difference"] == {"amount": 0, "percent": 0.0}


def test_a_figure_missing_in_the_first_model_has_no_percent(
    memfit: Memfit, four_bit: Path, hybrid: Path
) -> None:
    states = figures_of(memfit("compare", four_bit, hybrid, "--json"))["state"]
    assert states[1]["difference"] == {"amount": 77_266_944, "percent": None}
    back = figures_of(memfit("compare", hybrid, four_bit, "--json"))["state"]
    assert back[1]["difference"] == {"amount": -77_266_944, "percent": -100.0}


def test_the_figures_are_those_of_the_first_combination(memfit: Memfit, four_bit: Path) -> None:
    run = memfit(
        "compare", four_bit, "--matrix=memory=16GB,8GB", "--matrix=prefill-step=512,2k", "--json"
    )
    first = run.json["matrix"]["cells"][0]
    assert first["settings"] == {"memory": "16GB", "prefill-step": 512}
    assert run.json["workload"]["prefill_step"] == 512
    assert run.json["device"]["memory_bytes"] == 16 * 2**30
    assert figures_of(run)["peak"][0]["value"] == first["peak_bytes"]
    assert run.json["models"][0]["verdict"] == first["verdict"]


def test_quantize_and_max_tokens_are_axes_too(memfit: Memfit, tmp_path: Path) -> None:
    model = write_config(tmp_path / "plain", QWEN3_4B)
    run = memfit(
        "compare", model, "--matrix=quantize=none,8,4,mxfp4", "--matrix=max-tokens=0,256", "--json"
    )
    peaks = {
        (cell["settings"]["quantize"], cell["settings"]["max-tokens"]): cell["peak_bytes"]
        for cell in run.json["matrix"]["cells"]
    }
    assert list(peaks) == list(itertools.product([None, 8, 4, "mxfp4"], [0, 256]))
    four = memfit("estimate", model, "--quantize", "4", "--json").json["peak_bytes"]
    assert peaks[4, 0] == four < peaks[8, 0] < peaks[None, 0]
    assert peaks["mxfp4", 0] < four


def test_there_is_no_overall_verdict(memfit: Memfit, hybrid: Path, four_bit: Path) -> None:
    run = memfit("compare", hybrid, four_bit, "--memory", "8GB", "--json")
    assert [model["verdict"] for model in run.json["models"]] == ["exceeds", "fits"]
    assert run.code == 0


@pytest.mark.parametrize("position", [0, 1, 2])
def test_an_unknown_model_does_not_affect_the_others(
    memfit: Memfit, four_bit: Path, eight_bit: Path, unknown: Path, position: int
) -> None:
    models = [four_bit, eight_bit]
    models.insert(position, unknown)
    run = memfit("compare", *models, "--json")
    assert run.code == 3
    assert run.err == ""
    compared = run.json["models"]
    assert compared[position]["undecided"]["slug"] == "unsupported"
    assert "qwen3x" in compared[position]["undecided"]["reason"]
    weights = figures_of(run)["weights"]
    assert weights.pop(position) is None
    assert [value["value"] for value in weights] == [2_262_535_712, 4_273_329_952]
    # Against a first model without figures there is no difference.
    assert (weights[1]["difference"] is None) == (position == 0)
    table = memfit("compare", *models).out
    assert "unknown" in table
    assert "qwen3x" in table
    assert "2.3 GB" in table


def test_an_unreachable_source_does_not_affect_the_others(four_bit: Path, tmp_path: Path) -> None:
    # A separate process: huggingface_hub reads its settings once, at import.
    done = subprocess.run(
        [sys.executable, "-c", _MEMFIT, "compare", str(four_bit), "org/name", "--json"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    run = Run(done.returncode, done.stdout, done.stderr)
    assert run.code == 4, run.err
    here, there = run.json["models"]
    assert there["undecided"]["slug"] == "unreachable"
    assert "org/name" in there["undecided"]["reason"]
    assert here["model"]["parameters"] == 4_021_784_576


def test_an_undecided_cell_states_the_reason(memfit: Memfit, tmp_path: Path) -> None:
    model = write_config(tmp_path / "gemma", {**QWEN3_4B, "model_type": "gemma2"})
    arguments = ("compare", model, *DEVICE, "--context=8k", "--matrix=kv-bits=none,8")
    run = memfit(*arguments, "--json")
    plain, quantised = run.json["matrix"]["cells"]
    assert run.code == 3
    assert plain["verdict"] == "fits"
    assert quantised["verdict"] is quantised["peak_bytes"] is None
    assert "gemma2" in quantised["undecided"]["reason"]
    table = memfit(*arguments).out
    assert f"(1) {quantised['undecided']['reason']}" in table
    assert "2 cells: 1 fit, 1 unknown" in table


def test_a_cell_states_what_its_verdict_excludes(memfit: Memfit, four_bit: Path) -> None:
    axes = ("--matrix=context=4k,64k", "--matrix=kv-bits=none,8")
    run = memfit("compare", four_bit, *DEVICE, *axes, "--json")
    codes = [[note["code"] for note in cell["notes"]] for cell in run.json["matrix"]["cells"]]
    assert codes == [[], ["kv-start"], ["beyond-context"], ["beyond-context"]]
    table = memfit("compare", four_bit, *DEVICE, *axes).out
    assert "(2) 65536 tokens exceed the model's own limit 40960" in table


def test_a_damaged_checkpoint_ends_the_comparison(
    memfit: Memfit, four_bit: Path, tmp_path: Path
) -> None:
    broken = write_config(tmp_path / "broken", {**QWEN3_4B, "hidden_size": "wide"})
    output = tmp_path / "out.json"
    run = memfit("compare", four_bit, broken, "-o", output)
    assert_one_line(run, 2, "broken", "hidden_size")
    assert not output.exists()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((), "two or more"),
        (("--matrix", "context"), "context"),
        (("--matrix", "colour=red"), "colour"),
        (("--matrix", "context="), "--matrix"),
        (("--matrix", "context=4k,,8k"), "--matrix"),
        (("--matrix", "context=many"), "many"),
        (("--matrix", "context=4k,4096"), "twice"),
        (("--matrix", "context=4k", "--matrix", "context=8k"), "twice"),
        (("--matrix", "context=0"), "prompt tokens"),
        (("--matrix", "context=4k", "--context", "8k"), "context"),
        (("--matrix", "context=4k", "--prompt-tokens", "8k"), "context"),
        (("--matrix", "batch=1,2", "--batch", "3"), "batch"),
        (("--matrix", "device=m4-max-64", "--memory", "8GB"), "device"),
        (("--matrix", "device=m4-max-64", "--matrix", "memory=8GB"), "machine"),
        (("--matrix", "device=m9-max-64"), "m9-max-64"),
        (("--matrix", "memory=64X"), "64X"),
        (("--matrix", "kv-bits=7"), "KV bits"),
        (("--matrix", "quantize=9"), "9 bits"),
        (("--matrix", "quantize=int4"), "int4"),
        (("--matrix", f"context={','.join(map(str, range(1, 10_002)))}"), "10001"),
        (("./nowhere",), "./nowhere"),
        (("--matrix", "batch=1", "-o", f"{__file__}/out"), f"{__file__}/out"),
    ],
)
def test_bad_options_are_reported(
    memfit: Memfit, four_bit: Path, arguments: tuple[str, ...], word: str
) -> None:
    assert_one_line(memfit("compare", four_bit, *arguments), 2, word)


def test_a_very_long_prompt_is_judged_with_any_prefill_step(memfit: Memfit, four_bit: Path) -> None:
    axes = ("--matrix=context=300m", "--matrix=prefill-step=1,8k")
    run = memfit("compare", four_bit, *DEVICE, *axes, "--json")
    assert [cell["verdict"] for cell in run.json["matrix"]["cells"]] == ["exceeds", "exceeds"]


def test_numbers_are_never_cut_on_a_narrow_terminal(
    memfit: Memfit, four_bit: Path, eight_bit: Path, hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("compare", four_bit, eight_bit, hybrid, *DEVICE, "--matrix=context=4k,32k")
    monkeypatch.setenv("COLUMNS", "400")
    numbers = re.findall(r"[+−]?[0-9.]+ (?:[kMG]?B|%|tokens)(?!\S)", memfit(*arguments).out)
    assert len(numbers) > 80
    for columns in ("100", "72", "20"):
        monkeypatch.setenv("COLUMNS", columns)
        out = memfit(*arguments).out
        assert "\x1b" not in out
        for number in numbers:
            assert number in out


def test_signs_come_before_amount_and_percent(
    memfit: Memfit, four_bit: Path, eight_bit: Path
) -> None:
    more = memfit("compare", four_bit, eight_bit).out
    assert re.search(r"Weights on disk +2\.3 GB +4\.3 GB +\+2\.0 GB +\+88\.87 %", more)
    less = memfit("compare", eight_bit, four_bit).out
    assert re.search(r"Weights on disk +4\.3 GB +2\.3 GB +−2\.0 GB +−47\.05 %", less)
    assert re.search(r"KV cache .* same", less)


def test_csv_has_a_line_for_each_model_and_figure(
    memfit: Memfit, four_bit: Path, eight_bit: Path, unknown: Path
) -> None:
    arguments = ("compare", four_bit, eight_bit, unknown, *DEVICE)
    rows = list(csv.DictReader(io.StringIO(memfit(*arguments, "--format", "csv").out)))
    by_place = {(row["model"], row["figure"]): row for row in rows}
    for figure in memfit(*arguments, "--json").json["figures"]:
        for model, value in zip((four_bit, eight_bit), figure["values"], strict=False):
            row = by_place[str(model), figure["name"]]
            assert row["value"] == str(value["value"])
            change = value["difference"]
            assert row["difference"] == (str(change["amount"]) if change else "")
    assert by_place[str(four_bit), "verdict"]["value"] == "fits"
    assert "qwen3x" in by_place[str(unknown), ""]["reason"]


def test_csv_of_a_matrix_has_a_line_for_each_cell(memfit: Memfit, four_bit: Path) -> None:
    arguments = ("compare", four_bit, "--matrix=memory=8GB,16GB", "--matrix=kv-bits=none,8")
    rows = list(csv.DictReader(io.StringIO(memfit(*arguments, "--format", "csv").out)))
    cells = memfit(*arguments, "--json").json["matrix"]["cells"]
    assert [row["kv-bits"] for row in rows] == ["none", "8", "none", "8"]
    assert [row["peak_bytes"] for row in rows] == [str(cell["peak_bytes"]) for cell in cells]
    assert [row["verdict"] for row in rows] == [cell["verdict"] for cell in cells]


def test_markdown_tables_have_the_same_cells_in_every_row(
    memfit: Memfit, four_bit: Path, eight_bit: Path, unknown: Path
) -> None:
    out = memfit(
        "compare", four_bit, eight_bit, unknown, "--matrix=context=4k,8k", "--format=markdown"
    ).out
    tables = re.findall(r"(?:^\|.*\n)+", out, re.MULTILINE)
    assert len(tables) == 2
    for table in tables:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1
    assert "+88.87 %" in out


def test_each_checkpoint_is_read_once(memfit: Memfit, tmp_path: Path) -> None:
    shapes: Shapes = {"model.embed_tokens.weight": ("BF16", (151669, 2560))}
    model = write_checkpoint(tmp_path / "model", QWEN3_4B, shapes)
    opened: list[str] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(str(model)):
            opened.append(str(arguments[0]))

    sys.addaudithook(watch)
    memfit("estimate", model)
    once = sorted(opened)
    opened.clear()
    axes = ("--matrix=memory=8GB,16GB", "--matrix=context=1k,2k", "--matrix=quantize=none,4")
    memfit("compare", model, model, *axes)
    assert str(model / "model.safetensors") in once
    assert sorted(opened) == once


def test_a_plot_has_all_models_to_one_scale_and_every_combination(memfit: Memfit) -> None:
    asked = ("--memory", "8GB", "--matrix", "context=4k,32k", "--plot")
    run = memfit("compare", SAMPLES / "qwen3-4b-4bit.yaml", SAMPLES / "qwen3-8b-4bit.yaml", *asked)
    _, _, drawn = run.out.partition("\nMemory: ")
    small, large = drawn.splitlines()[1:3]
    assert small.index("│") == large.index("│")
    assert (" over " in small, " over " in large) == (False, True)
    _, _, cells = drawn.partition("Needs in GB by settings and model")
    assert "context 32768" in cells
    assert cells.count(" no ") == 3
