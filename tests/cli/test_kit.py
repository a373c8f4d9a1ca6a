"""`memfit tune --kit`: models that it makes are measured, and several kits are put side by side."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.published import compare, kit_rows
from memfit.estimators.machine.devices import find_device
from memfit.probes.experiments.kit import tune_kit
from memfit.probes.kit.comparison import compare_kits, read_kit
from memfit.probes.kit.models import MODELS, scale_of
from memfit.probes.kit.result import Kit, KitCheck
from memfit.probes.process import ModelProcess
from tests.cli.running import Memfit, validated
from tests.cli.test_bad_input import assert_one_line

pytestmark = pytest.mark.usefixtures("home")
PRIVATE = re.compile(r"/(home|root|Users|tmp|private|var)\b|[A-Za-z0-9_]+@")


def kit_of(device: str, *checks: KitCheck) -> Kit:
    """Return a kit as another machine would write it."""
    return Kit(
        memfit_version="1.0",
        mlx_version="0.32.0",
        mlx_lm_version="0.32.2",
        mlx_vlm_version=None,
        system="macOS 26.1",
        device=find_device(device),
        seconds=300,
        checks=checks,
    )


def peak(measured: int, estimated: int = 1_000_000) -> KitCheck:
    return KitCheck(
        subject="dense",
        setting="2048 tokens",
        figure="peak",
        estimated=estimated,
        basis="traced",
        measured=measured,
    )


def written(kit: Kit, path: Path) -> Path:
    path.write_text(kit.to_json())
    return path


@pytest.fixture(scope="module")
def allocations() -> Kit:
    """What needs no model."""
    pytest.importorskip("mlx_lm", reason="the processes need it")
    start = partial(ModelProcess, timeout_seconds=300)
    return tune_kit(start, parts=("wired limit", "allocator"))


def test_what_only_metal_can_answer_is_marked_as_not_run_elsewhere(allocations: Kit) -> None:
    wired = [check for check in allocations.checks if check.subject == "wired limit"]
    assert [check.figure for check in wired] == ["set", "refused above the working set", "restored"]
    for check in wired:
        if allocations.device.backend == "metal":
            assert (check.status, check.difference) == ("measured", 0)
        else:
            assert check.status == "not run"
            assert "no wired limit" in (check.reason or "")


def test_the_allocator_takes_what_the_rules_say(allocations: Kit) -> None:
    rounded = [check for check in allocations.checks if check.figure == "allocated"]
    assert len(rounded) == 5
    assert all(check.difference == 0 for check in rounded)


def test_a_kit_has_no_names_and_no_paths_and_reads_back(allocations: Kit, tmp_path: Path) -> None:
    path = written(allocations, tmp_path / "kit.json")
    assert not PRIVATE.search(path.read_text())
    assert read_kit(path) == allocations
    validated(json.loads(path.read_text()))


@pytest.mark.exhaustive
def test_a_whole_kit_of_this_machine_is_one_file(memfit: Memfit, tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm", reason="the models are mlx-lm's")
    path = tmp_path / "kit.json"
    run = memfit("tune", "--kit", "-o", path)
    assert run.code == 0, run.err
    kit = read_kit(path)
    assert not PRIVATE.search(path.read_text())
    assert not [check for check in kit.checks if check.status == "failed"]
    subjects = {check.subject for check in kit.checks if check.status == "measured"}
    assert subjects >= {"allocator", *MODELS}
    exact = [each for each in kit.checks if each.basis == "exact" and each.figure == "weights"]
    assert len(exact) >= len(MODELS)
    assert all(check.difference == 0 for check in exact)
    assert any("freeing" in check.figure for check in kit.checks)
    assert any(check.figure == "start-up by layer" for check in kit.checks)
    shown = memfit("compare-kit", path, path)
    assert shown.code == 0
    assert "Kit 2" in shown.out
    rows = kit_rows(kit, tmp_path)
    assert {row["model"].split()[0] for row in rows} == set(MODELS)
    peaks = [abs(each.error) for each in compare(rows, "trace", tmp_path) if each.predicted]
    assert max(peaks) < 0.05


def test_kits_side_by_side_show_where_a_machine_differs(memfit: Memfit, tmp_path: Path) -> None:
    same = replace(peak(500, 500), figure="weights")
    one = written(kit_of("m4-max-64", peak(1_000_000), same), tmp_path / "one.json")
    other = written(kit_of("m1-8", peak(1_200_000), same), tmp_path / "other.json")
    shown = memfit("compare-kit", one, other)
    assert shown.code == 0
    assert "1 of 2 checks are off by more than 0.5 %" in shown.out
    assert "(+20.00%)" in shown.out
    assert "weights" not in shown.out
    assert "weights" in memfit("compare-kit", one, other, "--all").out
    result = memfit("compare-kit", one, other, "--json").json
    assert [kit["different"] for kit in result["kits"]] == [0, 1]


def test_a_check_that_one_kit_lacks_is_empty_there() -> None:
    result = compare_kits(
        [kit_of("m4-max-64", peak(1)), kit_of("m1-8", replace(peak(1), figure="x"))]
    )
    assert [[each is None for each in check.kits] for check in result.checks] == [
        [False, True],
        [True, False],
    ]


def test_a_kit_is_rows_of_the_published_peaks(tmp_path: Path) -> None:
    name, workload = next(iter(scale_of("metal").workloads().items()))
    check = replace(peak(20_000_000), setting=name)
    [row] = kit_rows(kit_of("m4-max-64", check, replace(check, figure="kv")), tmp_path)
    assert (row["prompt_tokens"], row["batch"]) == (workload.prompt_tokens, 1)
    [answer] = compare([row], "formula", tmp_path)
    assert answer.predicted
    assert answer.measured == 20_000_000


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda data: data | {"schema": "memfit.tune/2"}, "schema: expected memfit.kit/1"),
        (lambda data: data | {"checks": []}, "checks: "),
        (lambda data: data | {"owner": "me"}, "owner: unknown key"),
        (lambda data: {k: v for k, v in data.items() if k != "device"}, "device: missing"),
        (lambda data: data | {"seconds": -1}, "seconds: "),
    ],
)
def test_a_file_that_is_no_kit_is_one_line(
    memfit: Memfit, tmp_path: Path, change: object, error: str
) -> None:
    data = json.loads(kit_of("m4-max-64", peak(1)).to_json())
    path = tmp_path / "kit.json"
    path.write_text(json.dumps(change(data)))  # type: ignore[operator]
    assert_one_line(memfit("compare-kit", path), 2, error)


@pytest.mark.parametrize("more", [("--prompt-tokens", "5"), ("some-model",), ("--flags",)])
def test_a_kit_takes_no_model_and_no_prompt(memfit: Memfit, more: tuple[str, ...]) -> None:
    assert_one_line(memfit("tune", *more, "--kit"), 2, "--kit makes its own models")
