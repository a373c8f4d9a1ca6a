"""The policy of a gate: named targets, each a model, a machine, a workload and its limits.

docs/gate.md lists every key; tests/gate/test_docs.py compares it with the tables here.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.dtypes import FLOAT_MODES, Quantization, converted
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import path_near, short
from memfit.estimators.base.ranks import Parallel
from memfit.estimators.base.reading.section import Reading, Section, one_of, read_yaml, to_record
from memfit.estimators.base.units import parse_share, parse_size
from memfit.estimators.base.workload import MAX_TOKENS, Recipe, Workload
from memfit.estimators.checkpoint.opening import HUB
from memfit.estimators.gate.figures import RUN_ALONE, OtherRuns
from memfit.estimators.gate.limit_values import parse_tokens
from memfit.estimators.gate.limits import LIMITS, BasisLimit, PolicyLimit, RequiredBasis
from memfit.estimators.gate.policy_file import (
    NAME,
    SCHEMA,
    GrowthKeys,
    LimitKeys,
    PolicyKeys,
    TargetKeys,
    WorkloadKeys,
)
from memfit.estimators.images.sizes import read_image, read_video
from memfit.estimators.machine.device import DEFAULT_REGIME, Device, OsRegime
from memfit.estimators.machine.devices import find_device, memory_device, working_set_device
from memfit.estimators.mlx.versions import Version, parse_version
from memfit.estimators.plans.offload.session_cache import STORED_BITS
from memfit.estimators.questions.question import WorkloadQuestion, integer
from memfit.estimators.questions.target import (
    MARGIN_BYTES,
    OWN_SETTINGS,
    Draft,
    ModelQuestion,
    Ranks,
    RuntimeQuestion,
)
from memfit.estimators.runtimes.registry import DEFAULT_RUNTIME, get_runtime
from memfit.estimators.runtimes.runtime import Runtime
from memfit.estimators.sizing.resolved import TargetQuestion

RUNTIME_KEYS = tuple(key for key in OWN_SETTINGS if key != "gpu_memory_utilization")
"""Keys that one runtime has, which reads them itself."""
Item = TypeVar("Item")
MAX_POLICY_BYTES = 1_000_000
_MACHINE_KEYS = ("device", "memory", "working_set")
_LIMITED = (
    ("training", "training", "a recipe of mlx_lm.lora"),
    ("routing", "routing", "a file of memfit tune experts --record"),
    ("stored_bits", "restore", None),
)
"""Keys of a target that only limits read: the limits by what they are of, and what the key is."""
_IMAGE_KEYS = ("image", "video")


class PolicyTarget(Struct, frozen=True, kw_only=True):
    """A model on a machine at a workload, and its limits."""

    name: str
    line: int
    question: TargetQuestion
    """What is resolved; without a reference where the command line names the models."""
    device: Device
    margin_bytes: int | None = None
    """The margin that the policy names; None for the default."""
    limits: tuple[PolicyLimit, ...]
    basis: BasisLimit | None = None
    allow_stale: bool = False
    allow_beyond_context: bool = False
    training: Recipe | None = None
    """None where it is not fine-tuned."""
    others: OtherRuns = RUN_ALONE


class Policy(Struct, frozen=True):
    """The targets of one file, in its order."""

    path: Path
    targets: tuple[PolicyTarget, ...]


def read_policy(path: Path) -> Policy:
    """Return the policy of a file.

    Raises:
        CheckpointError: when the file is missing or unreadable.
        ConfigError: when it is not YAML.
        PolicyError: with every mistake in it.
    """
    top = read_yaml(
        path, ("schema", *PolicyKeys.__struct_fields__), limit=MAX_POLICY_BYTES, collect=True
    )
    if top.values.get("schema") != SCHEMA:
        top.add_error(f"expected {SCHEMA}", "schema" if "schema" in top else None)
    targets = top.mapping("targets", None)
    if not targets.values:
        targets.add_error("name at least one target: a gate that checks nothing does not pass")
    read = [
        _target(targets.mapping(name, TargetKeys.__struct_fields__), name, path.parent)
        for name in targets.values
    ]
    top.reading.finish()
    return Policy(path, tuple(filter(None, read)))


def _target(section: Section, name: str, directory: Path) -> PolicyTarget | None:
    if not re.fullmatch(NAME, name):
        section.add_error("a target's name is made of letters, digits, and . _ + -, at most 80")
    runtime = section.take("runtime", _runtime)
    runtime = section.take("gpu_memory_utilization", partial(_with_share, runtime)) or runtime
    for key in RUNTIME_KEYS:
        runtime = section.take(key, partial(_with_setting, runtime, key)) or runtime
    device = _device(section)
    workload = _workload(section)
    limits, basis = _limits(section, device)
    model = _model(section)
    adapter = section.take("adapter", lambda value: Path(path_near(directory, _text(value))))
    draft = _draft(section)
    stale, beyond = (
        section.take(key, _flag) or False for key in ("allow_stale", "allow_beyond_context")
    )
    quantize = section.take("quantize", _quantization)
    margin_bytes = section.take("margin", _size)
    ranks = _ranks(section)
    training = section.take("training", _recipe)
    others = _other_runs(section, limits, directory)
    for key, of, what in _LIMITED:
        _check_limited(section, limits, key, of, what)
    mlx, mlx_lm = (section.take(key, _version) for key in ("mlx_version", "mlx_lm_version"))
    if device is None or workload is None:
        return None
    question = TargetQuestion(
        reference=model or "",
        workload=workload,
        device=device,
        runtime=runtime,
        mlx_version=mlx,
        mlx_lm_version=mlx_lm,
        quantize=quantize,
        adapter=adapter,
        draft=draft,
        margin_bytes=MARGIN_BYTES if margin_bytes is None else margin_bytes,
        ranks=ranks,
    )
    return PolicyTarget(
        name=name,
        line=section.line(),
        question=question,
        device=device,
        margin_bytes=margin_bytes,
        limits=limits,
        basis=basis,
        allow_stale=stale,
        allow_beyond_context=beyond,
        training=training,
        others=others,
    )


def _check_limited(
    section: Section, limits: tuple[PolicyLimit, ...], key: str, of: str, what: str | None
) -> None:
    """Require a limit for a key, and the key for a limit that needs it: ``what`` it is."""
    limited = next((limit.rule.key for limit in limits if limit.rule.of == of), None)
    if key in section and not limited:
        first = next(rule.key for rule in LIMITS.values() if rule.of == of)
        section.add_error(f"nothing limits it: add limits.{first}", key)
    elif limited and what and key not in section:
        section.add_error(f"limits.{limited} needs {key}, {what}")


def _other_runs(section: Section, limits: tuple[PolicyLimit, ...], directory: Path) -> OtherRuns:
    return OtherRuns(
        routing=section.take("routing", lambda value: Path(path_near(directory, _text(value)))),
        restores=any(limit.rule.of == "restore" for limit in limits),
        stored_bits=section.take("stored_bits", one_of(STORED_BITS)),
    )


def _draft(section: Section) -> Draft | None:
    if "num_draft_tokens" in section and "draft" not in section:
        section.add_error("needs draft, the model that drafts", "num_draft_tokens")

    def tokens(value: Any) -> Draft | None:
        return ModelQuestion(draft="", num_draft_tokens=integer(value)).drafting()

    settings = section.take("num_draft_tokens", tokens) or Draft("")
    return section.take("draft", lambda value: replace(settings, reference=_text(value)))


def _ranks(section: Section) -> Ranks | None:
    if "ranks" not in section:
        for key in ("parallel", "split"):
            if key in section:
                section.add_error("is of several ranks: add ranks", key)
        return None
    parallel = section.take("parallel", one_of(("tensor", "pipeline")))
    split = section.take("split", _split)
    how = cast(Parallel | None, parallel)
    return section.take("ranks", lambda value: Ranks(parse_tokens(value), how, split))


def _split(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise InputError(f"expected a list of layers such as [20, 12], got {short(value)}")
    return tuple(map(parse_tokens, value))


def _model(section: Section) -> str | None:
    makers = {"model": _text, "hub": lambda value: f"{HUB}{_text(value)}", "path": _path}
    given = [key for key in makers if key in section]
    if len(given) > 1:
        section.add_error(f"give one of {', '.join(makers)}", given[1])
    return section.take(given[0], makers[given[0]]) if given else None


def _device(section: Section) -> Device | None:
    regime = OsRegime(
        section.take("os_regime", one_of(tuple(regime.value for regime in OsRegime)))
        or DEFAULT_REGIME
    )
    given = [key for key in _MACHINE_KEYS if key in section]
    if len(given) != 1:
        section.add_error(f"give one of {', '.join(_MACHINE_KEYS)}", given[1] if given else None)
        return None
    makers = {
        "device": lambda value: find_device(_text(value), os_regime=regime),
        "memory": lambda value: memory_device(_size(value), os_regime=regime),
        "working_set": lambda value: working_set_device(_size(value)),
    }
    return section.take(given[0], makers[given[0]])


def _workload(target: Section) -> WorkloadQuestion | None:
    section = target.mapping("workload", WorkloadKeys.__struct_fields__)
    given = [key for key in ("context", "prompt_tokens") if key in section]
    if len(given) != 1:
        section.add_error("give either context or prompt_tokens", given[1] if given else None)
        return None
    if "context" in section and "max_tokens" in section:
        section.add_error("context excludes max_tokens: use prompt_tokens", "max_tokens")
    settings: dict[str, Any] = {}
    known = len(section.reading.mistakes)
    for key in (key for key in WorkloadKeys.__struct_fields__ if key not in _IMAGE_KEYS):
        name = "prompt_tokens" if key == "context" else key
        if (value := section.take(key, partial(_setting, name))) is not None:
            settings[name] = value
    images = section.take("image", partial(_each, read_image))
    videos = section.take("video", partial(_each, read_video))
    if len(section.reading.mistakes) > known:
        return None
    try:
        return WorkloadQuestion(**settings, image=images or (), video=videos or ())
    except InputError as error:  # of two settings together
        section.add_error(str(error), "cached_tokens")
        return None


def _each(read: Callable[[str], Item], value: Any) -> tuple[Item, ...]:
    if not isinstance(value, list):
        raise InputError(f"expected a list such as [1024x768], got {short(value)}")
    return tuple(read(_text(text)) for text in value)


def _setting(name: str, value: Any) -> int:
    """One number of a workload, checked alone: each mistake has its own line."""
    count = parse_tokens(value)
    alone: dict[str, Any] = {"prompt_tokens": MAX_TOKENS, name: count}
    Workload(**alone)
    return count


def _limits(
    target: Section, device: Device | None
) -> tuple[tuple[PolicyLimit, ...], BasisLimit | None]:
    section = target.mapping("limits", LimitKeys.__struct_fields__)
    growth = section.mapping("growth", GrowthKeys.__struct_fields__)
    limits, is_named = [], bool(growth.values)
    for rule in LIMITS.values():
        place, key = growth if rule.kind.is_growth else section, rule.key.rpartition(".")[2]
        if key in place:
            is_named = True
            amount = place.take(key, partial(rule.kind.parse, device))
            limits += [PolicyLimit(rule, place.line(key), amount)] if amount else []
    if not is_named and section.values.get("basis", "bound") == "bound":
        section.add_error(
            "name at least one limit that can break: a target that checks nothing does not pass"
        )
    if device and device.backend != "metal" and "wired_limit" in section:
        section.add_error(
            f"{device.name} has no wired limit; it is a setting of Macs", "wired_limit"
        )
    basis = section.take("basis", one_of(get_args(RequiredBasis)))
    return tuple(limits), BasisLimit(basis, section.line("basis")) if basis else None


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise InputError(f"expected a string, got {short(value)}")
    return value


def _path(value: Any) -> str:
    path = _text(value)
    return path if path.startswith(("/", "./", "../", "~")) else f"./{path}"


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"expected true or false, got {short(value)}")
    return value


def _size(value: Any) -> int:
    if not isinstance(value, str):
        raise InputError(f"expected a size such as 24GB, got {short(value)}")
    return parse_size(value)


def _quantization(value: Any) -> Quantization:
    if type(value) is int:
        return converted(value)
    if isinstance(value, str) and value in FLOAT_MODES:
        return converted(FLOAT_MODES[value][0], mode=value)
    raise InputError(f"expected bits such as 4, or {', '.join(FLOAT_MODES)}, got {short(value)}")


def _version(value: Any) -> Version:
    return parse_version(value if isinstance(value, str) else short(value))


def _recipe(value: Any) -> Recipe:
    if not isinstance(value, dict):
        raise InputError(f"expected a mapping such as {{batch_size: 1}}, got {short(value)}")
    return to_record(Recipe, value, Reading("recipe"))


def _runtime(value: Any) -> Runtime:
    return get_runtime(_text(value))


def _with_share(runtime: Runtime | None, value: Any) -> Runtime:
    share = parse_share(str(value))
    return (runtime or get_runtime(DEFAULT_RUNTIME)).with_setting("gpu_memory_utilization", share)


def _with_setting(runtime: Runtime | None, key: str, value: Any) -> Runtime:
    """Return the runtime with a setting of its own, as the command line reads it."""
    if runtime is None:
        raise InputError("name the runtime that it is of, such as runtime: llama.cpp")
    read, *_ = RuntimeQuestion.__annotations__[key].__metadata__
    return runtime.with_setting(key, read(value))
