"""The policy of a gate: named targets, each a model, a machine, a workload and its limits.

docs/gate.md lists every key; tests/gate/test_docs.py compares it with the tables here.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from msgspec import Struct

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import path_near, short
from memfit.estimators.base.images import Images
from memfit.estimators.base.quantization import FLOAT_MODES, Quantization, converted
from memfit.estimators.base.ranks import Parallel
from memfit.estimators.base.reading.section import Reading, Section, read_yaml, to_record
from memfit.estimators.base.reading.values import one_of
from memfit.estimators.base.recipe import Recipe
from memfit.estimators.base.units import MAX_COUNT, parse_count, parse_share, parse_size
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.opening import HUB
from memfit.estimators.gate.limit_value import LimitValue, parse_experts, parse_limit_value
from memfit.estimators.gate.policy_file import (
    NAME,
    SCHEMA,
    GrowthKeys,
    LimitKeys,
    PolicyKeys,
    RequiredBasis,
    TargetKeys,
    WorkloadKeys,
)
from memfit.estimators.images.sizes import read_image, read_video
from memfit.estimators.machine.device import Device
from memfit.estimators.machine.devices import find_device, memory_device, working_set_device
from memfit.estimators.machine.working_set import DEFAULT_REGIME, OsRegime
from memfit.estimators.mlx.versions import Version, format_version, parse_version
from memfit.estimators.runtimes.registry import DEFAULT_RUNTIME, get_runtime
from memfit.estimators.runtimes.runtime import Runtime
from memfit.estimators.sizing.ranks import Ranks
from memfit.estimators.sizing.workload import PartialWorkload

Found = TypeVar("Found")
MAX_POLICY_BYTES = 1_000_000
_MOST_GROWTH = 10  # times the baseline: a model that grows more is another class of model

MACHINE_KEYS = ("device", "memory", "working_set")
ALLOWED_KEYS = ("allow_stale", "allow_beyond_context")
VERSION_KEYS = ("mlx_version", "mlx_lm_version")
RUN_LIMITS = ("peak", "wired_limit", "growth.peak")
TRAINING_LIMITS = ("training_peak", "growth.training_peak")
IMAGE_KEYS = ("image", "video")
BASES = get_args(RequiredBasis)
OS_REGIMES = tuple(regime.value for regime in OsRegime)


class PolicyLimit(Struct, frozen=True):
    """One limit of a target."""

    name: str
    """Its key, such as ``peak`` or ``growth.peak``."""
    line: int
    amount: LimitValue
    """A share of the experts a layer has for ``expert_capacity``, of the baseline's figure for
    ``growth``, else of the working set."""


class BasisLimit(Struct, frozen=True):
    """A limit on the basis of the weights."""

    least: RequiredBasis
    """The weakest that passes; ``bound`` accepts an upper bound."""
    line: int


class PolicyTarget(Struct, frozen=True, kw_only=True):
    """A model on a machine at a workload, and its limits."""

    name: str
    line: int
    model: str | None
    """A reference that is not guessed; None where the command line names the models."""
    adapter: Path | None
    """The directory of a LoRA adapter that is loaded with the model."""
    quantize: Quantization | None
    """What mlx_lm.convert would make of the model; None for the model as it is."""
    margin_bytes: int | None
    """Memory to keep free above the peak; None for the default of memfit estimate."""
    device: Device
    runtime: Runtime | None
    """None for the native runtime of the model's checkpoint."""
    workload: PartialWorkload
    limits: tuple[PolicyLimit, ...]
    basis: BasisLimit | None = None
    allow_stale: bool = False
    allow_beyond_context: bool = False
    mlx_version: Version | None = None
    """None for the newest that is described."""
    mlx_lm_version: Version | None = None
    ranks: Ranks | None = None
    """None for one rank, the model itself."""
    training: Recipe | None = None
    """None where it is not fine-tuned."""

    def versions(self) -> dict[str, str]:
        """Return the versions that it names, by key."""
        named = zip(VERSION_KEYS, (self.mlx_version, self.mlx_lm_version), strict=True)
        return {key: format_version(version) for key, version in named if version}

    @property
    def needs_baseline(self) -> bool:
        """Whether a limit is on growth."""
        return any(limit.name.startswith("growth.") for limit in self.limits)


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
    found = [
        _target(targets.mapping(name, TargetKeys.__struct_fields__), name, path.parent)
        for name in targets.values
    ]
    top.reading.finish()
    return Policy(path, tuple(target for target in found if target is not None))


def _target(section: Section, name: str, directory: Path) -> PolicyTarget | None:
    if not re.fullmatch(NAME, name):
        section.add_error("a target's name is made of letters, digits, and . _ + -, at most 80")
    runtime = section.take("runtime", _runtime)
    runtime = section.take("gpu_memory_utilization", partial(_with_share, runtime)) or runtime
    device = _device(section)
    workload = _workload(section)
    limits, basis = _limits(section, device)
    model = _model(section)
    adapter = section.take("adapter", lambda value: Path(path_near(directory, _text(value))))
    stale, beyond = (section.take(key, _flag) or False for key in ALLOWED_KEYS)
    quantize = section.take("quantize", _quantization)
    margin_bytes = section.take("margin", _size)
    ranks = _ranks(section)
    training = _training(section, limits)
    mlx, mlx_lm = (section.take(key, _version) for key in VERSION_KEYS)
    if device is None or workload is None:
        return None
    return PolicyTarget(
        name=name,
        line=section.line(),
        model=model,
        adapter=adapter,
        quantize=quantize,
        margin_bytes=margin_bytes,
        device=device,
        runtime=runtime,
        workload=workload,
        limits=limits,
        basis=basis,
        allow_stale=stale,
        allow_beyond_context=beyond,
        mlx_version=mlx,
        mlx_lm_version=mlx_lm,
        ranks=ranks,
        training=training,
    )


def _training(section: Section, limits: tuple[PolicyLimit, ...]) -> Recipe | None:
    limited = next((limit.name for limit in limits if limit.name in TRAINING_LIMITS), None)
    if "training" not in section:
        if limited:
            section.add_error(f"limits.{limited} needs training, a recipe of mlx_lm.lora")
        return None
    if not limited:
        section.add_error(f"nothing limits it: add limits.{TRAINING_LIMITS[0]}", "training")
    return section.take("training", _recipe)


def _ranks(section: Section) -> Ranks | None:
    if "ranks" not in section:
        for key in ("parallel", "split"):
            if key in section:
                section.add_error("is of several ranks: add ranks", key)
        return None
    parallel = section.take("parallel", one_of(("tensor", "pipeline")))
    split = section.take("split", _split)
    how: Parallel | None = None if parallel is None else cast(Parallel, parallel)
    return section.take("ranks", lambda value: Ranks(_count(value), how, split))


def _split(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise InputError(f"expected a list of layers such as [20, 12], got {short(value)}")
    return tuple(map(_count, value))


def _model(section: Section) -> str | None:
    makers = {"model": _text, "hub": lambda value: f"{HUB}{_text(value)}", "path": _path}
    given = [key for key in makers if key in section]
    if len(given) > 1:
        section.add_error(f"give one of {', '.join(makers)}", given[1])
    return section.take(given[0], makers[given[0]]) if given else None


def _device(section: Section) -> Device | None:
    regime = OsRegime(section.take("os_regime", one_of(OS_REGIMES)) or DEFAULT_REGIME)
    given = [key for key in MACHINE_KEYS if key in section]
    if len(given) != 1:
        section.add_error(f"give one of {', '.join(MACHINE_KEYS)}", given[1] if given else None)
        return None
    makers = {
        "device": lambda value: find_device(_text(value), os_regime=regime),
        "memory": lambda value: memory_device(_size(value), os_regime=regime),
        "working_set": lambda value: working_set_device(_size(value)),
    }
    return section.take(given[0], makers[given[0]])


def _workload(target: Section) -> PartialWorkload | None:
    section = target.mapping("workload", WorkloadKeys.__struct_fields__)
    given = [key for key in ("context", "prompt_tokens") if key in section]
    if len(given) != 1:
        section.add_error("give either context or prompt_tokens", given[1] if given else None)
        return None
    if "context" in section and "max_tokens" in section:
        section.add_error("context excludes max_tokens: use prompt_tokens", "max_tokens")
    settings: dict[str, Any] = {}
    known = len(section.reading.mistakes)
    for key in (key for key in WorkloadKeys.__struct_fields__ if key not in IMAGE_KEYS):
        name = "prompt_tokens" if key == "context" else key
        if (value := section.take(key, partial(_setting, name))) is not None:
            settings[name] = value
    images = section.take("image", partial(_each, read_image))
    videos = section.take("video", partial(_each, read_video))
    if len(section.reading.mistakes) > known:
        return None
    if images or videos:
        settings["images"] = Images(images or (), videos or ())
    return PartialWorkload(Workload(**settings), frozenset(settings))


def _each(read: Callable[[str], Found], value: Any) -> tuple[Found, ...]:
    if not isinstance(value, list):
        raise InputError(f"expected a list such as [1024x768], got {short(value)}")
    return tuple(read(_text(text)) for text in value)


def _setting(name: str, value: Any) -> int:
    """One number of a workload, checked alone: each mistake has its own line."""
    count = _count(value)
    alone: dict[str, Any] = {"prompt_tokens": 1, name: count}
    Workload(**alone)
    return count


def _limits(
    target: Section, device: Device | None
) -> tuple[tuple[PolicyLimit, ...], BasisLimit | None]:
    section = target.mapping("limits", LimitKeys.__struct_fields__)
    growth_keys = GrowthKeys.__struct_fields__
    growth = section.mapping("growth", growth_keys)
    accepts_all = section.values.get("basis", "bound") == "bound"
    if not any(key in section for key in AMOUNTS) and not growth.values and accepts_all:
        section.add_error(
            "name at least one limit that can break: a target that checks nothing does not pass"
        )
    if device and device.backend != "metal" and "wired_limit" in section:
        section.add_error(
            f"{device.name} has no wired limit; it is a setting of Macs", "wired_limit"
        )
    found = [
        _limit(section, key, key, partial(AMOUNTS[key], device))
        for key in AMOUNTS
        if key in section
    ]
    found += [
        _limit(growth, key, f"growth.{key}", partial(_growth, device))
        for key in GrowthKeys.__struct_fields__
        if key in growth
    ]
    basis = section.take("basis", one_of(BASES))
    return (
        tuple(limit for limit in found if limit),
        BasisLimit(basis, section.line("basis")) if basis else None,
    )


def _limit(
    section: Section, key: str, name: str, parse: Callable[[Any], LimitValue]
) -> PolicyLimit | None:
    amount = section.take(key, parse)
    return PolicyLimit(name, section.line(key), amount) if amount else None


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise InputError(f"expected a text, got {short(value)}")
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


def _count(value: Any) -> int:
    if isinstance(value, str):
        return parse_count(value)
    if type(value) is not int:
        raise InputError(f"expected a count such as 4096 or 4k, got {short(value)}")
    return value


def _memory(device: Device | None, value: Any) -> LimitValue:
    """A share or a size that the machine has: a higher limit could not break."""
    return _bounded(device, value, 1, "100% of the working set")


def _growth(device: Device | None, value: Any) -> LimitValue:
    return _bounded(device, value, _MOST_GROWTH, f"{_MOST_GROWTH}00% of the baseline")


def _bounded(device: Device | None, value: Any, most: int, most_text: str) -> LimitValue:
    """An amount of at most ``most`` times what it is a share of, or the machine's memory."""
    amount = parse_limit_value(value)
    if amount.denominator is not None and amount.numerator > most * amount.denominator:
        raise InputError(f"{amount.text}: limits nothing; write at most {most_text}")
    if device and amount.denominator is None and amount.numerator > device.memory_bytes:
        raise InputError(
            f"{amount.text}: limits nothing; the memory of the machine is {device.memory_bytes}B"
        )
    return amount


def _context(device: Device | None, value: Any) -> LimitValue:
    count = _count(value)
    if not 0 < count <= MAX_COUNT:
        raise InputError(f"{short(count)}: must be from 1 to {MAX_COUNT} tokens")
    return LimitValue(str(value), count)


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
    return (runtime or get_runtime(DEFAULT_RUNTIME)).with_memory_share(parse_share(str(value)))


AMOUNTS: dict[str, Callable[[Device | None, Any], LimitValue]] = {
    "peak": _memory,
    "load_peak": _memory,
    "wired_limit": _memory,
    "context": _context,
    "expert_capacity": lambda device, value: parse_experts(value),
    "training_peak": _memory,
}
