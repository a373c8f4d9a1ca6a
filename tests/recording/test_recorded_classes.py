"""Answers of recorded classes, compared with the trace of the class itself."""

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from memfit.estimators.base.dtypes import converted
from memfit.estimators.base.errors import MemfitError
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.devices import find_device
from memfit.estimators.programs.graph import decoded
from memfit.estimators.runtimes.recorded import recorded_subject
from memfit.estimators.runtimes.source import MethodSetting, Recorded, Traced
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.sized_model import SizedModel
from tests.models import quantised_tensors, write_checkpoint, write_config
from tests.recording.configs import CONFIGS
from tests.selection import quick

pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

from memfit.estimators.recording.make import DATA, RECORDED, made_from
from memfit.estimators.trace.libraries import versions

MAC = find_device("m4-max-64")
WORKLOADS = (
    Workload(prompt_tokens=9000, max_tokens=100),
    Workload(prompt_tokens=2049, max_tokens=1),
    Workload(prompt_tokens=4098, max_tokens=256, prefill_step=1024),
    Workload(prompt_tokens=300, max_tokens=1),
    Workload(prompt_tokens=40, max_tokens=600),
    Workload(prompt_tokens=1, max_tokens=300),
    Workload(prompt_tokens=6153, max_tokens=2000, prefill_step=512),
)
QUICK = ("nanochat-0", "glm4_moe_lite-0", "afmoe-1")


def _sized(
    directory: Path,
    config: Mapping[str, Any],
    bits: int | None,
    method: MethodSetting,
    device: Device = MAC,
) -> SizedModel:
    path = write_config(directory, config)
    quantize = converted(bits) if bits else None
    return Catalog().sized(str(path), device=device, quantize=quantize, method=method)


def test_every_file_of_data_is_made_with_the_installed_versions_and_its_present_plan() -> None:
    files = {path.stem: decoded(path.read_bytes()) for path in DATA.glob("*.json")}
    assert set(files) == set(RECORDED), "run make programs CLASSES=..."
    installed = versions()
    stale = [
        name
        for name, recorded in files.items()
        if (recorded.versions, recorded.made_from) != (installed, made_from(RECORDED[name]))
    ]
    assert not stale, f"run make programs CLASSES={' '.join(stale)!r}"


def test_the_data_of_all_classes_is_small() -> None:
    # As in a wheel, whose files are deflated one by one.
    assert sum(len(zlib.compress(path.read_bytes())) for path in DATA.glob("*.json")) < 3 << 20


@pytest.mark.parametrize("bits", quick([None, 4, 8], (4,)))
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive) for name in CONFIGS],
)
def test_recorded_peaks_are_those_of_the_trace_to_the_byte(
    tmp_path: Path, name: str, bits: int | None
) -> None:
    recorded = _sized(tmp_path, CONFIGS[name], bits, "auto")
    traced = _sized(tmp_path, CONFIGS[name], bits, "trace")
    assert isinstance(recorded.runtime_model.source, Recorded)
    assert isinstance(traced.runtime_model.source, Traced)
    # Another prefill step is another recording, so that a few workloads take the time of one model.
    for workload in WORKLOADS[:2] if name in QUICK else WORKLOADS:
        a, b = (each.figures_for(workload) for each in (recorded, traced))
        assert (a.moment.nbytes, a.moment.workspace_bytes) == (
            b.moment.nbytes,
            b.moment.workspace_bytes,
        ), workload
        assert (a.kv.nbytes, a.ssm_bytes) == (b.kv.nbytes, b.ssm_bytes), workload
        assert a.moment.largest_buffer_bytes == b.moment.largest_buffer_bytes, workload
        assert a.moment.held_bytes == b.moment.held_bytes, workload
    assert recorded.footprint.sizes == traced.footprint.sizes


WAYS: tuple[MethodSetting, ...] = ("auto", "trace")
# A step that is no multiple of what a cache grows by, and one with scores that are written out.
ODD_WORKLOADS = (
    Workload(prompt_tokens=3501, max_tokens=20, prefill_step=1000),
    Workload(prompt_tokens=2049, max_tokens=1),
)


@pytest.mark.parametrize("device", ["m5-max-128", "h100-80"])
@pytest.mark.parametrize("name", quick(sorted(CONFIGS), ("nanochat-1",)))
def test_other_gpus_have_the_peaks_of_their_own_trace(
    tmp_path: Path, name: str, device: str
) -> None:
    machine, config = find_device(device), CONFIGS[name]
    recorded, traced = (_sized(tmp_path, config, 4, way, machine) for way in WAYS)
    backends = {
        backend
        for variant in decoded((DATA / f"{config['model_type']}.json").read_bytes()).variants
        for backend in variant.facts["backend"]
    }
    is_recorded = isinstance(recorded.runtime_model.source, Recorded)
    assert is_recorded == (machine.backend in backends)
    for workload in ODD_WORKLOADS if is_recorded else ():
        a, b = (each.figures_for(workload).moment for each in (recorded, traced))
        assert (a.nbytes, a.held_bytes) == (b.nbytes, b.held_bytes), workload


@pytest.mark.parametrize(("bits", "group_size"), [(3, 64), (4, 128), (8, 32)])
def test_headers_of_packed_weights_are_answered_as_by_trace(
    tmp_path: Path, bits: int, group_size: int
) -> None:
    config = {
        **next(c for name, c in CONFIGS.items() if name == "nanochat-1"),
        "num_hidden_layers": 4,
        "quantization": {"bits": bits, "group_size": group_size},
    }
    plain = {key: value for key, value in config.items() if key != "quantization"}
    path = write_checkpoint(tmp_path, config, quantised_tensors(plain, bits, group_size))
    recorded, traced = (
        Catalog().sized(str(path), device=MAC, method=method) for method in ("auto", "trace")
    )
    assert isinstance(recorded.runtime_model.source, Recorded)
    a, b = (each.figures_for(WORKLOADS[1]) for each in (recorded, traced))
    assert (a.moment.nbytes, a.kv.nbytes) == (b.moment.nbytes, b.kv.nbytes)
    assert recorded.footprint.nbytes == traced.footprint.nbytes


@pytest.mark.parametrize(
    "changes",
    [
        {"torch_dtype": "float16"},
        {"text_config": {"hidden_size": 512}},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    ],
)
def test_what_no_recording_has_is_traced(tmp_path: Path, changes: Mapping[str, Any]) -> None:
    config = {**CONFIGS["nanochat-0"], "num_hidden_layers": 2, **changes}
    assert not isinstance(_sized(tmp_path, config, None, "auto").runtime_model.source, Recorded)


def _changed(value: Any) -> Iterator[Any]:
    if isinstance(value, bool) or value is None:
        yield not value
    elif isinstance(value, int):
        yield from (0, 1, value + 1, 2 * value)
    elif isinstance(value, float):
        yield from (0.0, 1.0, 2 * value)
    elif isinstance(value, str):
        yield "unknown"
    elif isinstance(value, Mapping):
        yield from (
            {**value, key: other} for key, each in value.items() for other in _changed(each)
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(RECORDED))
def test_no_setting_changed_alone_gives_a_silent_wrong_peak(tmp_path: Path, name: str) -> None:
    recorded = decoded((DATA / f"{name}.json").read_bytes())
    base = RECORDED[name].base
    config = {**recorded.settings, **next(c for c in CONFIGS.values() if c["model_type"] == name)}
    shallow = {
        **config,
        recorded.layer_count: len(RECORDED[name].layer_kinds({**recorded.settings, **base})),
    }
    for key in ("layer_types", "is_moe_layer"):
        if key in base:
            shallow[key] = base[key]
    workload, wrong = Workload(prompt_tokens=700, max_tokens=3, prefill_step=512), []
    for key, value in shallow.items():
        if key == "model_type":
            continue
        for other in _changed(value):
            changed = {**shallow, key: other}
            path = write_config(tmp_path, changed)
            # Of what is refused nothing is traced: MLX ends the process at some values.
            if recorded_subject(Catalog().checkpoint(str(path)), None, MAC) is None:
                continue
            try:
                sized = _sized(tmp_path, changed, None, "auto")
                peak = sized.figures_for(workload).moment.nbytes
                traced = _sized(tmp_path, changed, None, "trace").figures_for(workload)
            except MemfitError:
                continue
            if peak != traced.moment.nbytes:
                wrong.append((key, value, other, peak, traced.moment.nbytes))
    assert not wrong, json.dumps(wrong)
