"""``memfit estimate`` with saved measurements of the model: which one is used, and the output."""

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median_low
from typing import Any

import pytest
from msgspec.structs import replace

from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import fingerprint_of
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.machine.host import detect_host
from memfit.estimators.runtimes.measurement import Measurement
from memfit.estimators.sizing.measurement_lookup import machine_name
from memfit.estimators.sizing.opening import size
from memfit.probes.store import Store
from tests.checkpoints import Checkpoints
from tests.cli.running import Memfit
from tests.probes.measurements import LOADED, RUN, measurement

pytest.importorskip("mlx_lm", reason="a measurement holds for the versions that are installed")
WORKLOAD = Workload(prompt_tokens=600, max_tokens=8)
ASK = ("--prompt-tokens", "600", "--max-tokens", "8", "--device", "host")
PEAKS = (4_000_000, 4_200_000, 4_100_000)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Store:
    monkeypatch.setenv("MEMFIT_HOME", str(tmp_path))
    return Store(tmp_path / "measurements")


@pytest.fixture
def model(checkpoints: Checkpoints) -> Path:
    return checkpoints("dense")


@pytest.fixture
def taken(model: Path) -> Callable[..., Measurement]:
    """Measurements of the model on this machine, with fields changed."""
    host, checkpoint = detect_host(), open_checkpoint(str(model))
    assert host
    weights = size(checkpoint, device=None).footprint.loaded_bytes

    def make(**changes: Any) -> Measurement:
        values = {
            "fingerprint": fingerprint_of(checkpoint),
            "device": machine_name(host),
            "backend": host.backend,
            "mlx_version": version("mlx"),
            "mlx_lm_version": version("mlx-lm"),
            "workload": WORKLOAD,
            "loaded": replace(LOADED, weights_bytes=weights, active_bytes=weights + 50_000),
            "runs": tuple(replace(RUN, prefill_peak_bytes=peak) for peak in PEAKS),
        }
        return measurement(**{**values, **changes})

    return make


def answer(memfit: Memfit, *arguments: str | Path) -> Any:
    """An estimate without the memory that is used and free, which differs from call to call."""
    data = memfit("estimate", *arguments, "--json").json
    for name in ("used_by_others_bytes", "working_set_bytes"):
        data["device"].pop(name)
    return data


def test_a_matching_measurement_is_used_before_the_formulas(
    memfit: Memfit, store: Store, model: Path, taken: Callable[..., Measurement]
) -> None:
    store.save(taken())
    data = memfit("estimate", model, *ASK, "--json").json
    parts = data["components"]
    assert data["method"] == "measure"
    bases = {parts[name]["basis"] for name in ("weights", "kv", "ssm", "workspace")}
    assert bases == {"measured"}
    assert (data["peak_bytes"], data["peak_phase"]) == (4_100_000, "prefill")  # the median
    loaded = taken().loaded
    assert parts["weights"]["loaded_bytes"] == loaded.weights_bytes
    assert parts["weights"]["resident_bytes"] == loaded.active_bytes
    assert (parts["kv"]["bytes"], parts["kv"]["held_bytes"]) == (65_536, 32_768)
    assert parts["workspace"]["bytes"] == 4_100_000 - loaded.active_bytes - 65_536
    assert data["assumptions"][0].startswith(f"measured on 2026-11-21 on {taken().device} with ")
    assert "the median of 3 runs, 200.0 kB apart" in data["assumptions"][0]
    assert taken().id in data["assumptions"][0]


def test_a_warm_up_above_every_repeat_is_the_peak(
    memfit: Memfit, store: Store, model: Path, taken: Callable[..., Measurement]
) -> None:
    for peak, expected in ((4_150_000, 4_100_000), (4_300_000, 4_300_000)):
        store.save(taken(warm_up=replace(RUN, prefill_peak_bytes=peak)))
        data = memfit("estimate", model, *ASK, "--json").json
        assert (data["method"], data["peak_bytes"]) == ("measure", expected)


def test_recommendations_of_a_measured_run_estimate_what_was_not_measured(
    memfit: Memfit, store: Store, model: Path, taken: Callable[..., Measurement]
) -> None:
    store.save(taken(workload=replace(WORKLOAD, prefill_step=32)))
    data = memfit("estimate", model, *ASK, "--prefill-step", "32", "--json").json
    assert (data["method"], data["peak_bytes"]) == ("measure", 4_100_000)
    assert data["recommendation"]["prefill_step"]["state"] == "keep"
    assert data["recommendation"]["context_tokens"]["value"] > 32


@pytest.mark.exhaustive
def test_the_next_estimate_uses_the_tuned_figures(
    memfit: Memfit, store: Store, model: Path
) -> None:
    tuned = json.loads(memfit("tune", model, *ASK[:4], "--json").out)
    data = memfit("estimate", model, *ASK, "--json").json
    assert data["method"] == "measure"
    figures = {f["name"]: f["measured_bytes"] for f in tuned["points"][0]["figures"]}
    parts = data["components"]
    assert data["peak_bytes"] == tuned["points"][0]["peak_bytes"]
    assert parts["weights"]["loaded_bytes"] == figures["weights"]
    assert parts["weights"]["resident_bytes"] == figures["active"]
    assert parts["kv"]["bytes"] == figures["kv"]
    (kept,) = store.all().measurements
    assert tuned["points"][0]["measurement_id"] == kept.id
    assert kept.warm_up is not None
    assert len(kept.runs) == tuned["points"][0]["repeats"] == 3
    firsts = [run.first_token_ns for run in kept.runs]
    assert tuned["points"][0]["speed"]["first_token_ns"] == median_low(firsts)
    listed = memfit("measurements", "list", "--json").json["measurements"]
    assert [one["id"] for one in listed] == [kept.id]
    verbose = memfit("estimate", model, "--context", "600", "--device", "host", "-v").out
    assert " ".join(verbose.split()).count(f"measured on {kept.device}: 600 + 8 tokens")
    assert kept.id in data["assumptions"][0]


def test_measured_and_estimated_are_shown_together_where_they_differ(
    memfit: Memfit, store: Store, model: Path, taken: Callable[..., Measurement]
) -> None:
    formula = memfit("estimate", model, *ASK, "--json").json
    weights, kv = formula["components"]["weights"], formula["components"]["kv"]
    run = replace(
        RUN,
        kv_bytes=kv["bytes"],
        kv_held_bytes=kv["held_bytes"],
        prefill_peak_bytes=formula["peak_bytes"],
    )
    loaded = replace(
        LOADED, weights_bytes=weights["loaded_bytes"], active_bytes=weights["resident_bytes"]
    )
    store.save(taken(runs=(run,), loaded=loaded))
    agreed = memfit("estimate", model, *ASK, "--json").json
    assert agreed["peak_bytes"] == formula["peak_bytes"]
    assert "methods-differ" not in {note["code"] for note in agreed["notes"]}
    far = replace(run, prefill_peak_bytes=2 * formula["peak_bytes"], kv_bytes=kv["bytes"] + 1)
    store.save(taken(runs=(far,), loaded=loaded))
    differing = memfit("estimate", model, *ASK, "--json").json
    messages = [n["message"] for n in differing["notes"] if n["code"] == "methods-differ"]
    assert len(messages) == 2
    assert f"KV cache: measured {kv['bytes'] + 1} bytes, formula {kv['bytes']}" in messages[0]
    assert f"peak: measured {far.peak_bytes} bytes, formula {formula['peak_bytes']}" in messages[1]


@pytest.mark.parametrize(
    "options",
    [
        ("--method", "formula"),
        ("--method", "trace"),
        ("--quantize", "4"),
        ("--runtime", "mlx-swift-lm"),
        ("--device", "m4-max-64"),
    ],
    ids=lambda options: options[0] + options[1],
)
def test_figures_that_were_not_measured_are_estimated(
    memfit: Memfit,
    store: Store,
    model: Path,
    taken: Callable[..., Measurement],
    options: tuple[str, ...],
) -> None:
    # A machine of its own takes the place of the host.
    asked = ASK[:-2] if "--device" in options else ASK
    ask: tuple[str | Path, ...] = (model, *asked, *options)
    before = answer(memfit, *ask)
    store.save(taken())
    assert answer(memfit, *ask) == before


def test_another_workload_uses_formulas_and_shows_how_to_measure(
    memfit: Memfit, store: Store, model: Path, taken: Callable[..., Measurement]
) -> None:
    before = answer(memfit, model, *ASK)
    for tokens in (512, 700, 4096, 9000):
        store.save(taken(workload=Workload(prompt_tokens=tokens, max_tokens=8)))
    data = answer(memfit, model, *ASK)
    (note,) = (note for note in data["notes"] if note["code"] == "measured-otherwise")
    assert note["message"] == (
        f"measured on {taken().device}: 512 + 8 tokens, 700 + 8 tokens, 4096 + 8 tokens, and 1"
        " more;"
        f" memfit tune {model} --prompt-tokens 600 --max-tokens 8 would measure this workload"
    )
    assert {**data, "notes": before["notes"]} == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlx_version": "0.1.0"}, "it is of mlx 0.1.0 and mlx-lm "),
        ({"mlx_lm_version": "0.1.0"}, " and mlx-lm 0.1.0, here is mlx "),
        ({"device": "x86_64 CPU, 1 GiB"}, "it is of x86_64 CPU, 1 GiB, this is "),
        ({"device": "Apple M4 Max", "backend": "metal"}, "it is of Apple M4 Max, this is "),
    ],
)
def test_a_measurement_of_another_version_or_machine_is_not_used_with_a_reason(
    memfit: Memfit,
    store: Store,
    model: Path,
    taken: Callable[..., Measurement],
    change: dict[str, str],
    message: str,
) -> None:
    store.save(taken(**change))
    data = memfit("estimate", model, *ASK, "--json").json
    assert data["method"] == "formula"
    (note,) = (note for note in data["notes"] if note["code"] == "measurement-not-used")
    assert message in note["message"]
    assert f"memfit tune {model} --prompt-tokens 600 --max-tokens 8" in note["message"]


def test_a_measurement_of_another_model_is_ignored(
    memfit: Memfit, store: Store, model: Path, taken: Callable[..., Measurement]
) -> None:
    before = answer(memfit, model, *ASK)
    store.save(taken(fingerprint="0" * 64))
    assert answer(memfit, model, *ASK) == before


def test_a_damaged_record_gives_a_note_and_the_estimate_is_made(
    memfit: Memfit, store: Store, model: Path, taken: Callable[..., Measurement]
) -> None:
    store.save(taken())
    (store.directory / f"{taken().id}.json").write_text("{")
    run = memfit("estimate", model, *ASK, "--json")
    assert (run.code, run.err) == (0, "")
    (note,) = (note for note in run.json["notes"] if note["code"] == "measurement")
    assert note["message"].endswith(f"it is renamed to {taken().id}.json.damaged")


def test_a_measurement_of_other_weights_is_not_used(
    memfit: Memfit, store: Store, model: Path, taken: Callable[..., Measurement]
) -> None:
    wrong = taken(loaded=replace(taken().loaded, weights_bytes=taken().loaded.weights_bytes - 1))
    store.save(wrong)
    data = memfit("estimate", model, *ASK, "--json").json
    assert data["method"] != "measure"
    [text] = [note["message"] for note in data["notes"] if note["code"] == "measurement"]
    assert text.startswith(f"the measurement {wrong.id} is damaged and not used")


@pytest.mark.parametrize(
    ("weights", "text"),
    [(0, "weights_bytes is 0"), (5_000_000, "runs: a peak is below the weights")],
)
def test_a_measurement_that_contradicts_itself_is_damaged(
    memfit: Memfit,
    store: Store,
    model: Path,
    taken: Callable[..., Measurement],
    weights: int,
    text: str,
) -> None:
    store.save(taken(loaded=replace(taken().loaded, weights_bytes=weights)))
    data = memfit("estimate", model, *ASK, "--json").json
    [note] = [note["message"] for note in data["notes"] if note["code"] == "measurement"]
    assert text in note
    assert note.endswith(".json.damaged")


@pytest.mark.parametrize(
    "names", [("kv_bytes",), ("kv_held_bytes",), ("kv_bytes", "kv_held_bytes")]
)
@pytest.mark.parametrize("states", [0, 1000])
def test_a_measurement_without_the_cache_that_every_run_has_is_not_used(
    memfit: Memfit,
    store: Store,
    model: Path,
    taken: Callable[..., Measurement],
    names: tuple[str, ...],
    states: int,
) -> None:
    first, *others = taken().runs
    empty = replace(first, ssm_bytes=states, **dict.fromkeys(names, 0))
    store.save(taken(runs=(empty, *others)))
    data = memfit("estimate", model, *ASK, "--json").json
    assert data["method"] != "measure"
    [note] = [note["message"] for note in data["notes"] if note["code"] == "measurement"]
    assert "0 bytes" in note


def test_the_table_states_the_basis_and_explain_the_values(
    memfit: Memfit, store: Store, model: Path, taken: Callable[..., Measurement]
) -> None:
    store.save(taken())
    run = memfit("estimate", model, *ASK, "--explain", "--plot")
    assert "measured" in run.out
    text = " ".join(run.out.split())
    assert "peak = 4100000 bytes, the median of measured 4000000, 4200000, 4100000" in text
