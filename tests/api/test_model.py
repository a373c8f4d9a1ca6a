"""`memfit.open`, `.on` and `.at`: many questions to a model that is read once."""

import json
import pickle
import pydoc
import re
from contextlib import suppress
from copy import copy, deepcopy
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

import memfit
from memfit.estimators.base.units import Units
from memfit.estimators.machine.devices import find_device
from memfit.estimators.results.terms import Verdict
from memfit.estimators.runtimes.registry import runtime_names
from tests.models import QWEN3_4B, plain_tensors, write_checkpoint, write_config

SAMPLE = Path(__file__).parents[2] / "sample_configs" / "qwen3-4b-4bit.yaml"


def test_a_model_is_read_once_for_all_machines_and_workloads(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, QWEN3_4B, plain_tensors(QWEN3_4B))
    model = memfit.open(tmp_path, quantize=4)
    large, small = model.on("m4-max-64"), model.on(memory="8GB", os_regime="macos-15")
    first = large.at("4k")
    for file in tmp_path.iterdir():
        file.unlink()
    assert first == large.at(4096)
    assert first.fits
    longer = small.at(prompt_tokens="60k", max_tokens=10, kv_bits=8)
    assert longer.verdict == "exceeds"
    assert longer.workload.kv_bits == 8
    with pytest.raises(memfit.CheckpointError, match="no such path"):
        memfit.open(tmp_path / "qwen")


def test_a_notebook_shows_which_model_is_open() -> None:
    model = memfit.open(str(SAMPLE))
    assert repr(model) == f"memfit.open({str(SAMPLE)!r})"
    assert repr(model.on("m4-max-64")) == f"memfit.open({str(SAMPLE)!r}).on('m4-max-64')"


@pytest.mark.parametrize(
    ("opened", "place", "asked"),
    [
        ({}, {}, {"context": "20k"}),
        ({"quantize": 8}, {}, {"prompt_tokens": "5k", "max_tokens": 300, "kv_bits": 8}),
        ({"draft": "qwen3-0.6b"}, {}, {"context": 3000}),
        ({}, {"ranks": 2}, {"context": "8k", "batch": 4}),
        ({"runtime": "llama.cpp"}, {}, {"context": "8k"}),
    ],
)
def test_the_peak_alone_is_that_of_the_estimate(
    opened: dict[str, Any], place: dict[str, Any], asked: dict[str, Any]
) -> None:
    model = memfit.open("qwen3-32b", **opened).on("m4-max-64", **place)
    assert model.peak(**asked) == model.at(**asked).peak_bytes


@pytest.mark.parametrize(
    ("name", "opened", "asked"),
    [
        ("qwen3-32b", {}, {"context": "20k"}),  # exceeds: other models
        ("qwen3-4b-4bit", {}, {"prompt_tokens": "20k", "max_tokens": 300, "kv_bits": 8}),
        ("qwen3-4b-4bit", {"runtime": "llama.cpp"}, {"context": "8k"}),
        ("qwen3-vl-4b", {}, {"context": "4k", "image": ["1280x720"]}),
    ],
)
def test_what_is_searched_later_is_what_an_estimate_has(
    name: str, opened: dict[str, Any], asked: dict[str, Any]
) -> None:
    whole = memfit.estimate(name, device="m4-pro-24", **opened, **asked)

    def at() -> memfit.Estimate:
        return memfit.open(name, **opened).on("m4-pro-24").at(**asked)

    assert at() == whole
    assert whole == at()
    assert at().to_dict() == whole.to_dict()
    assert at().to_json() == whole.to_json()
    assert repr(at()) == repr(whole)
    assert copy(at()) == deepcopy(at()) == pickle.loads(pickle.dumps(at())) == whole
    assert at().best == whole.best
    assert replace(at().complete(), verdict="tight").grid == whole.grid
    with pytest.raises(AttributeError, match="no attribute 'gird'"):
        getattr(at(), "gi" + "rd")


def test_settings_are_searched_when_they_are_read() -> None:
    machine = memfit.open("qwen3-32b").on("m4-pro-24")
    machine.at("4k").complete()  # imports

    def seconds(read: str, tokens: int) -> float:
        start = process_time()
        for more in range(5):
            getattr(machine.at(tokens + more), read)
        return process_time() - start

    assert seconds("peak_bytes", 5000) < seconds("grid", 6000) / 4
    assert machine.at(5001) is machine.at(5001)


def test_a_peak_takes_milliseconds_and_the_same_one_microseconds() -> None:
    machine = memfit.open("qwen3-4b-4bit").on("m4-max-64")
    machine.peak("4k")  # imports

    def seconds(tokens: int) -> float:
        start = process_time()
        machine.peak(tokens)
        return process_time() - start

    lengths = [97 * n for n in range(1, 60)]
    assert median(map(seconds, lengths)) < 0.005
    assert median(map(seconds, lengths)) < 0.0002


def test_a_checkpoint_that_is_not_loaded_has_no_peak(tmp_path: Path) -> None:
    write_config(tmp_path, {**QWEN3_4B, "model_file": "modeling.py"})
    model = memfit.open(tmp_path).on("m4-max-64")
    with pytest.raises(memfit.UnsupportedError, match="mlx-lm does not load it: model_file"):
        model.peak("4k")


def test_a_device_and_a_workload_can_be_objects() -> None:
    model = memfit.open(SAMPLE)
    work = memfit.Workload(prompt_tokens=4096, prefill_step=512)
    by_object = model.on(find_device("m4-max-64")).at(work)
    assert by_object == model.on("m4-max-64").at("4k", prefill_step=512)
    with pytest.raises(memfit.InputError, match="a whole workload excludes batch"):
        model.at(work, batch=2)
    with pytest.raises(memfit.InputError, match="a whole device excludes memory"):
        model.on(find_device("m4-max-64"), memory="32GB")


def test_formulas_and_plots_are_added_where_they_are_requested() -> None:
    machine = memfit.open(SAMPLE, margin=None).on("m4-max-64", memory=None)
    plain, full = machine.at(), machine.at(explain=True, plot=True)
    assert (plain.explanation, plain.curve) == (UNSET, UNSET)
    assert full.explanation
    assert full.curve


def test_one_estimate_is_shown_in_both_units() -> None:
    machine = memfit.open(SAMPLE).on("m4-max-64")
    decimal = machine.at(explain=True)
    binary = decimal.in_units(Units.GIB)
    for result, shown, other in ((decimal, " GB", "GiB"), (binary, "GiB", " GB")):
        text = result.to_json()
        assert shown in text
        assert other not in text
        assert result.to_dict() == json.loads(text)
    numbers = [re.sub(r"[0-9.]+ [kKMG]i?B", "", each.to_json()) for each in (decimal, binary)]
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize("device", ["m4-max-64", "rtx-4090"])
def test_every_size_in_a_sentence_has_its_unit(device: str) -> None:
    shown = 0
    for runtime in runtime_names():
        with suppress(memfit.UnsupportedError, memfit.InputError):
            model = memfit.open(SAMPLE, runtime=runtime).on(device)
            result = model.at("8k", explain=True)
            for units in Units:
                assert "\x1e" not in str(result.in_units(units).to_dict()), runtime
            shown += 1
    assert shown > 3


@pytest.mark.parametrize(
    ("verdict", "fits"), [("fits", True), ("tight", True), ("exceeds", False), ("unknown", False)]
)
def test_it_fits_only_where_that_is_known(verdict: Verdict, fits: bool) -> None:
    answer = memfit.estimate(SAMPLE, device="m4-max-64")
    assert replace(answer, verdict=verdict).fits is fits


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context": "many"}, "context: 'many' is not a count"),
        ({"batch": "two"}, "batch: expected a whole number, got 'two'"),
        ({"batch": True}, "batch: expected a whole number, got True"),
        ({"context": 10**30}, "context: expected a whole number from 0 to 9223372036854775807, or"),
        ({"device": []}, r"device: expected one or more, got \[\]"),
        ({"memory": ()}, r"memory: expected one or more, got \(\)"),
        ({"split": []}, "split: expected a string"),
        ({"adapter": 3}, "adapter: "),
        ({"num_draft_tokens": 0}, "^num_draft_tokens 0: give from 1 to 64"),
        ({"method": "guess"}, "method: expected auto, formula, trace; got 'guess'"),
        ({"flash_attn": False}, "^flash_attn: mlx-lm has no such setting"),
        ({"group_size": 32}, "^group_size and quant_mode need quantize"),
        ({"ranks": 2, "split": [20, 16]}, "^split is of the layers of a pipeline: add parallel"),
        ({"device": "m4-max-64", "memory": "32GB"}, "^device, memory and working_set each name"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_wrong_setting_is_one_line_that_names_the_keyword(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(memfit.InputError, match=message) as error:
        memfit.estimate(SAMPLE, **settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, "^model is missing; name a directory"),
        (5, "^model: expected a name or a path, got 5"),
    ],
)
def test_a_model_that_is_not_named_is_refused(model: Any, message: str) -> None:
    """The command line has a sample then; a program that has lost a name gets no figures of it."""
    with pytest.raises(memfit.InputError, match=message):
        memfit.open(model)


def test_a_share_of_all_memory_is_an_integer_too() -> None:
    settings: dict[str, Any] = {"device": "rtx-4090", "runtime": "vllm"}
    whole, written = (
        memfit.estimate(SAMPLE, gpu_memory_utilization=share, **settings) for share in (1, "1.0")
    )
    assert whole == written
    with pytest.raises(memfit.InputError, match="'2' is not a share above 0"):
        memfit.estimate(SAMPLE, gpu_memory_utilization=2, **settings)


def test_help_describes_an_open_model() -> None:
    """It resolves the types of a Struct's fields, also of those that are imported later."""
    assert "on(self, device" in pydoc.plain(pydoc.render_doc(memfit.OpenModel))


def test_sentences_change_their_units_by_name_and_after_a_copy() -> None:
    answer = memfit.estimate(SAMPLE.with_name("qwen3-30b-a3b-4bit.yaml"), device="m1-8")
    reason = answer.recommendation.memory_bytes.reason
    assert reason.endswith("for 18.5 GB")
    assert answer.in_units("gb") == answer  # type: ignore[arg-type]
    binary = pickle.loads(pickle.dumps(answer)).in_units("gib")
    assert binary == answer.in_units(Units.GIB)
    assert binary.recommendation.memory_bytes.reason.endswith("for 17.2 GiB")
    with pytest.raises(memfit.InputError, match="expected gb, gib; got 'tb'"):
        answer.in_units("tb")  # type: ignore[arg-type]


def test_an_unknown_setting_is_a_type_error_with_the_nearest_name() -> None:
    with pytest.raises(TypeError, match="no setting 'prompt_token', but 'prompt_tokens'"):
        memfit.estimate(SAMPLE, prompt_token=3)  # type: ignore[call-arg]


def test_a_path_is_never_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(memfit.CheckpointError, match="no such path"):
        memfit.open(Path("mlx-community/Qwen3-4B-4bit"))


@pytest.mark.parametrize("name", ["image", "video"])
def test_one_picture_is_given_as_text_or_in_a_list(name: str) -> None:
    size = {"image": "640x480", "video": "8x320x240"}[name]

    def of(given: Any) -> memfit.Estimate:
        return memfit.estimate("qwen3-vl-4b", device="m4-max-64", **{name: given})

    alone, listed, twice = map(of, (size, [size], (size, size)))
    assert alone == listed
    assert twice.workload.image_tokens == 2 * alone.workload.image_tokens > 0
