"""The baseline: the figures of each target, in memfit.lock.json next to the policy.

The bytes are stable, with sorted names and no dates: a diff of the file is a change of figures.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from msgspec import UNSET, Struct, UnsetType, to_builtins

from memfit.estimators.base.dtypes import FloatMode, Quantization
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import is_there, printable, read_whole
from memfit.estimators.base.ranks import Parallel
from memfit.estimators.base.reading.section import Section, as_object, json_section, to_record
from memfit.estimators.base.units import Bytes, Count, Positive, Sha256
from memfit.estimators.base.version import __version__
from memfit.estimators.base.workload import Recipe, Workload
from memfit.estimators.checkpoint.manifest import Checkpoint, config_sha256
from memfit.estimators.gate.figures import GateFigures
from memfit.estimators.gate.policy import PolicyTarget
from memfit.estimators.mlx.versions import format_version
from memfit.estimators.results.result import Result
from memfit.estimators.runtimes.registry import DEFAULT_RUNTIME
from memfit.estimators.sizing.resolved import ResolvedTarget

NAME = "memfit.lock.json"
VERSION = 1
SCHEMA = f"memfit.lock/{VERSION}"
MAX_LOCK_BYTES = 6_000_000  # a target takes two kilobytes
MAX_LOCK_VALUES = 200_000


class Fingerprint(Struct, frozen=True, forbid_unknown_fields=True):
    """Which checkpoint the figures are of."""

    revision: str | None
    config_sha256: Sha256
    headers_sha256: Mapping[str, Sha256]
    """By file name."""


class BaselineQuestion(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question without its model: figures of different questions do not compare."""

    device: str
    runtime: str = DEFAULT_RUNTIME
    mlx_version: str | UnsetType = UNSET
    """Where the policy names it."""
    mlx_lm_version: str | UnsetType = UNSET
    workload: Workload
    ranks: Positive | UnsetType = UNSET
    parallel: Parallel | UnsetType = UNSET
    split: tuple[Positive, ...] | UnsetType = UNSET
    training: Recipe | UnsetType = UNSET
    margin_bytes: Bytes | UnsetType = UNSET
    draft: str | UnsetType = UNSET
    num_draft_tokens: Positive | UnsetType = UNSET


class BaselineEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """One target as it was."""

    model: str
    quantize: Count | FloatMode | None
    """Bits, or a mode of floating-point numbers."""
    model_type: str
    asked: BaselineQuestion
    checkpoint: Fingerprint
    figures: GateFigures


class Baseline(Result, frozen=True, kw_only=True, tag=SCHEMA):
    """The baseline that ``memfit gate --update`` writes."""

    targets: Mapping[str, BaselineEntry]


def entry_of(target: PolicyTarget, resolved: ResolvedTarget, figures: GateFigures) -> BaselineEntry:
    """Return what a baseline keeps of a target."""
    question, sized = target.question, resolved.sized
    return BaselineEntry(
        model=question.reference,
        quantize=_format_name(question.quantize),
        model_type=sized.model.model_type,
        asked=BaselineQuestion(
            device=target.device.name,
            runtime=sized.runtime,
            workload=resolved.workload,
            **_named_settings(target),
        ),
        checkpoint=_fingerprint(sized.checkpoint),
        figures=figures,
    )


def _format_name(quantize: Quantization | None) -> int | FloatMode | None:
    """The name of a format in a policy: its bits, or a mode of floating-point numbers."""
    if quantize is None:
        return None
    return quantize.bits if quantize.mode == "affine" else cast(FloatMode, quantize.mode)


def _named_settings(target: PolicyTarget) -> dict[str, Any]:
    """The settings that a baseline keeps only where the policy names them."""
    question, ranks = target.question, target.question.ranks
    versions = {"mlx_version": question.mlx_version, "mlx_lm_version": question.mlx_lm_version}
    named = {
        **{key: version and format_version(version) for key, version in versions.items()},
        "ranks": ranks and ranks.size,
        "parallel": ranks and ranks.parallel,
        "split": ranks and ranks.split,
        "training": target.training,
        "margin_bytes": target.margin_bytes,
        "draft": question.draft and question.draft.reference,
        "num_draft_tokens": question.draft and question.draft.tokens,
    }
    return {key: value for key, value in named.items() if value is not None}


def _fingerprint(checkpoint: Checkpoint) -> Fingerprint:
    """The fingerprint of a checkpoint; spacing and order of its config do not matter."""
    # A file's name is any bytes; those that are not text are escaped.
    headers = {
        name.encode("utf-8", "backslashreplace").decode(): digest
        for name, digest in checkpoint.header_sha256
    }
    return Fingerprint(checkpoint.revision, config_sha256(checkpoint), headers)


def require_baseline(before: BaselineEntry | None, differing: tuple[str, ...]) -> None:
    """Require a baseline to grow from, of the same question.

    Raises:
        InputError: when there is none, or one whose question is ``differing``.
    """
    if before is None:
        raise InputError(f"no baseline to grow from; memfit gate --update writes {NAME}")
    if differing:
        raise InputError(
            f"the baseline answers another question ({'; '.join(differing)});"
            " memfit gate --update makes a new one"
        )


def differences(before: BaselineQuestion, now: BaselineQuestion) -> Iterator[str]:
    """Yield how a question differs from the baseline's."""
    for then, today in ((before, now), (before.workload, now.workload)):
        for key in today.__struct_fields__:
            old, new = getattr(then, key), getattr(today, key)
            if old != new and key != "workload":
                yield f"{key} {_named(old)}, now {_named(new)}"


def _named(value: object) -> object:
    return "not named" if value is UNSET else value


def replaced(before: Fingerprint, now: Fingerprint) -> tuple[str, ...]:
    """Return what differs between two checkpoints of one name."""
    parts = []
    if before.revision != now.revision:
        parts.append(f"revision {before.revision}, now {now.revision}")
    if before.config_sha256 != now.config_sha256:
        parts.append("config.json")
    old, new = before.headers_sha256, now.headers_sha256
    changed = [name for name in new if name in old and old[name] != new[name]]
    parts += [f"the header of {name}" for name in changed[:3]]
    if len(changed) > 3:
        parts.append(f"{len(changed) - 3} more headers")
    if old.keys() != new.keys():
        parts.append(f"the set of shards ({len(old)}, now {len(new)})")
    return tuple(parts)


def to_text(baseline: Baseline) -> str:
    """Return the text of the baseline's file."""
    return json.dumps(to_builtins(baseline), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def read_baseline(path: Path) -> Baseline | None:
    """Return the baseline of a file, None where there is none.

    Raises:
        CheckpointError: when the file is unreadable.
        InputError: when it is damaged, or written by a newer memfit.
    """
    if not is_there(path):
        return None
    top = json_section(
        read_whole(path, limit=MAX_LOCK_BYTES),
        path,
        what="the baseline",
        max_values=MAX_LOCK_VALUES,
    )
    _reject_newer(top)
    try:
        top.only(("schema", *Baseline.__struct_fields__))
        entries = {
            name: to_record(BaselineEntry, entry, top.reading, ("targets", name))
            for name, entry in top.need("targets", as_object).items()
        }
        return Baseline(memfit_version=top.text("memfit_version"), targets=entries)
    except InputError as fault:
        raise InputError(
            f"{fault}; the baseline is damaged: restore it from version control, or delete it and"
            " run memfit gate --update"
        ) from None


def _reject_newer(top: Section) -> None:
    schema = re.fullmatch(r"memfit\.lock/([0-9]{1,6})", str(top.values.get("schema")))
    if not schema or int(schema[1]) < 1:
        raise top.fail("schema", f"expected {SCHEMA}; is it a baseline?")
    version = str(top.values.get("memfit_version"))
    if int(schema[1]) > VERSION or _numbers(version) > _numbers(__version__):
        raise top.fail(
            None,
            f"written by a newer memfit ({printable(version)}, {schema[0]});"
            f" this is {__version__} with {SCHEMA}: update memfit",
        )


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"[0-9]{1,6}(\.[0-9]{1,6}){0,3}", version)
    return tuple(map(int, release[0].split("."))) if release else ()
