"""Assertions on the memory of models, for tests of libraries and of applications.

>>> from memfit.testing import assert_peak
>>> assert_peak("qwen3-4b-4bit", prompt="32k", at_most="8GB", method="formula")
7752890368
"""

from collections.abc import Collection
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import printable
from memfit.estimators.base.units import parse_size
from memfit.estimators.gate import POLICY
from memfit.estimators.gate.baseline import NAME, read_baseline
from memfit.estimators.gate.evaluate import run_gate, select
from memfit.estimators.gate.policy import Policy, read_policy
from memfit.estimators.gate.report import TargetReport
from memfit.model import open

Method = Literal["auto", "formula", "trace"]
# What a new version may not take more of.
_SIZES = ("weights_bytes", "peak_bytes", "training_peak_bytes")


def assert_peak(
    model: str | PathLike[str],
    prompt: str | int,
    *,
    at_most: str | int,
    device: str = "m4-max-64",
    method: Method = "trace",
    **settings: Any,
) -> int:
    """Return the peak of a run in bytes, of a ``prompt`` in tokens; it must be ``at_most`` a size.

    By ``method="trace"`` the classes of the mlx-lm that is installed decide, with the kernels of
    ``device``; nothing is run, so the figure is the same on every machine. ``settings`` are those
    of `memfit.settings.WorkloadSettings`, such as ``max_tokens`` and ``kv_bits``.

    Raises:
        AssertionError: when the peak is higher.
        MemfitError: as `memfit.open` and `OpenModel.peak`.
    """
    __tracebackhide__ = True
    limit = at_most if isinstance(at_most, int) else parse_size(at_most)
    nbytes = open(model, method=method).on(device).peak(prompt, **settings)
    if nbytes > limit:
        raise AssertionError(
            f"{model}: a prompt of {prompt} tokens takes {nbytes:,} bytes on {device},"
            f" {nbytes - limit:,} more than {at_most}"
        )
    return nbytes


def assert_not_above(
    lock: str | PathLike[str] = NAME,
    *,
    targets: Collection[str] = (),
    method: Method = "trace",
) -> None:
    """Require that no target takes more than the lock file says.

    The lock is what ``memfit gate --update`` writes, beside its policy ``memfit.yaml``;
    ``targets`` are names in the policy, by default all.

    Raises:
        AssertionError: when weights or a peak are higher, or a target has no figure to compare.
        InputError: when the lock or the policy cannot be read.
    """
    __tracebackhide__ = True
    path = Path(lock)
    if (baseline := read_baseline(path)) is None:
        raise InputError(f"{printable(path)}: no such file; memfit gate --update writes it")
    policy = select(read_policy(path.with_name(POLICY)), tuple(targets))
    report = run_gate(_by(policy, method), baseline, allow_bounds=True).report
    if problems := [text for target in report.targets for text in _above(target)]:
        raise AssertionError("\n".join(problems))


def _by(policy: Policy, method: Method) -> Policy:
    chosen = (
        replace(each, question=replace(each.question, method=method)) for each in policy.targets
    )
    return replace(policy, targets=tuple(chosen))


def _above(target: TargetReport) -> list[str]:
    if not target.changes:
        return [f"{target.name}: {target.message or 'the lock has no such target'}"]
    return [
        f"{target.name}: {change.figure} is {change.now:,}, {change.by:,} more than in the lock"
        for change in target.changes
        if change.figure in _SIZES and change.now is not None and (change.by or 0) > 0
    ]
