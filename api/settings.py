"""The keyword arguments of the library: the settings of the four questions, under their names."""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from inspect import Parameter, signature
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.questions.question import Question, WorkloadQuestion
from memfit.estimators.questions.target import (
    MachineQuestion,
    ModelQuestion,
    Ranks,
    RuntimeQuestion,
)

if TYPE_CHECKING:
    from memfit.estimators.machine.device import OsRegime

    Place = tuple[Device | None, Ranks | None]
    Prompted = str | PathLike[str] | Sequence[str | PathLike[str]] | None


class OpenSettings(TypedDict, total=False):
    """Settings of `memfit.open`; one that is None or not given is as on the command line."""

    quantize: int | str | None
    group_size: int | None
    quant_mode: str | None
    adapter: str | PathLike[str] | None
    draft: str | None
    draft_quantize: int | str | None
    num_draft_tokens: int | None
    as_type: str | None
    mmproj: str | PathLike[str] | None
    runtime: str | None
    method: Literal["auto", "formula", "trace"] | None
    margin: int | str | None
    mlx_version: str | None
    mlx_lm_version: str | None
    mlx_vlm_version: str | None
    gpu_memory_utilization: float | str | None
    cache_type: str | None
    cache_type_k: str | None
    cache_type_v: str | None
    flash_attn: bool | None
    kv_unified: bool | None
    swa_full: bool | None
    all_logits: bool | None
    gpu_layers: int | str | None
    n_cpu_moe: int | str | None
    batch_size: int | str | None
    host_memory: int | str | None
    host_bandwidth: int | str | None
    capacity: int | str | None
    kv_cache_dtype: str | None
    max_requests: int | None
    mtp_tokens: int | None
    cpu_moe: bool
    override_tensor: str | None
    kv_offload: bool
    mmproj_offload: bool


class MachineSettings(TypedDict, total=False):
    """Settings of `OpenModel.on`."""

    memory: int | str | None
    working_set: int | str | None
    reserve: int | str | None
    os_regime: "OsRegime | str | None"
    gpu_cores: int | None
    ranks: int | None
    parallel: Literal["tensor", "pipeline"] | None
    split: str | Sequence[int] | None
    hosts: str | PathLike[str] | None


class WorkloadSettings(TypedDict, total=False):
    """Settings of `OpenModel.at`."""

    prompt_tokens: int | str | None
    max_tokens: int | str | None
    batch: int | None
    prefill_batch: int | None
    decode_batch: int | None
    prefill_step: int | None
    kv_bits: int | None
    kv_group_size: int | None
    quantized_kv_start: int | None
    max_kv_size: int | None
    cached_tokens: int | str | None
    image: "Prompted"
    video: "Prompted"


class EstimateSettings(OpenSettings, MachineSettings, WorkloadSettings, total=False):
    """Settings of `memfit.estimate`: those of the other three."""


def with_keywords(function: Callable[..., Any], kind: Any) -> None:
    """Let `help`, and what else reads a signature, show the settings of a function one by one."""
    own = signature(function)
    named = [each for each in own.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
    settings = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in kind.__annotations__.items()
        if name not in own.parameters
    ]
    vars(function)["__signature__"] = own.replace(parameters=[*named, *settings])


def model_and_runtime(
    model: str | PathLike[str], settings: Mapping[str, Any]
) -> tuple[ModelQuestion, RuntimeQuestion]:
    """Return which model is opened, and for which runtime.

    Raises:
        InputError: when a setting cannot be read, or the model is None.
    """
    _require_known(settings, OpenSettings)
    own, runtime = (_settings_of(kind, settings) for kind in (ModelQuestion, RuntimeQuestion))
    question = ModelQuestion.read({**own, "model": model})
    question.reference()  # only the command line has a sample for a model that is not named
    return question, RuntimeQuestion.read(runtime)


def place(device: str | Device | None, settings: Mapping[str, Any]) -> "Place":
    """Return the machine and the ranks; without settings the machine is this one if it has a GPU.

    Raises:
        InputError: when it is unknown, or more than one is named.
    """
    _require_known(settings, MachineSettings)
    if isinstance(device, Device):
        _require_none(settings, "device")
        return device, None
    machine = MachineQuestion.read({"device": device, **settings})
    return machine.first_machine(), machine.over()


def workload(context: str | int | Workload | None, settings: Mapping[str, Any]) -> WorkloadQuestion:
    """Return a prompt and settings, or a whole workload.

    Raises:
        InputError: when a value cannot be read or is out of range.
    """
    _require_known(settings, WorkloadSettings)
    if isinstance(context, Workload):
        _require_none(settings, "workload")
        return WorkloadQuestion.of(context)
    return WorkloadQuestion.read({"context": context, **settings})


def parts(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the settings of `memfit.estimate` as those of `open`, `on` and `at`."""
    _require_known(settings, EstimateSettings)
    machine, workload = (
        _settings_of(kind, settings) for kind in (MachineQuestion, WorkloadQuestion)
    )
    others = settings.keys() - machine.keys() - workload.keys()
    return {name: settings[name] for name in others}, machine, workload


def _settings_of(question: type[Question], settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name in question.__struct_fields__}


def _require_known(settings: Mapping[str, Any], kind: Any) -> None:
    for name in settings.keys() - kind.__annotations__.keys():
        nearest = get_close_matches(name, EstimateSettings.__annotations__, 1)
        raise TypeError(f"no setting {name!r}" + "".join(f", but {each!r}" for each in nearest))


def _require_none(settings: Mapping[str, Any], kind: str) -> None:
    given = [name for name, value in settings.items() if value is not None]
    if given:
        raise InputError(f"a whole {kind} excludes {', '.join(given)}")
