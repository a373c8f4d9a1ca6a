"""Which of the measurements that are kept holds for a workload, and what to say of it."""

import shlex
from collections.abc import Sequence
from typing import NamedTuple

from memfit.estimators.base.units import ceil_div
from memfit.estimators.base.workload import Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.results.estimate import Note
from memfit.estimators.runtimes.measurement import Measurement

_NAMED = 3  # workloads of measurements that hold for others


class Versions(NamedTuple):
    """Of what runs a model here; None where it is not installed."""

    mlx: str | None
    mlx_lm: str | None
    mlx_vlm: str | None = None
    """Of a prompt with images; None for one that mlx-lm runs."""

    def __str__(self) -> str:
        """Return them in words."""
        text = f"mlx {self.mlx or 'none'} and mlx-lm {self.mlx_lm or 'none'}"
        return f"{text} and mlx-vlm {self.mlx_vlm}" if self.mlx_vlm else text


class Remembered(NamedTuple):
    """The measurement that holds for a workload, if there is one, and what to say of the others."""

    measurement: Measurement | None
    notes: tuple[Note, ...]


def recall(
    measurements: Sequence[Measurement],
    *,
    device: Device,
    versions: Versions,
    workload: Workload,
    model: str,
) -> Remembered:
    """Return which of a checkpoint's measurements holds for a workload on a device.

    It is of this device, these versions and this workload, the newest of those; without one the
    notes say what was measured, and how ``model`` would be. Runs with a part of the experts, of the
    trainer, or by a loop that is not mlx-lm's, say nothing about it.
    """
    is_of_vlm = versions.mlx_vlm is not None
    measurements = [
        m for m in measurements if m.is_usual and (m.mlx_vlm_version is not None) == is_of_vlm
    ]
    holding = [m for m in measurements if not _obstacles(m, device, versions)]
    same = [m for m in holding if m.workload == workload]
    if same:
        return Remembered(max(same, key=lambda m: (m.wired_limit_bytes is None, m.measured_at)), ())
    if holding:
        nearest = sorted(holding, key=lambda m: _distance(m.workload, workload))
        text = (
            f"measured on {nearest[0].device}: {_listed(nearest)}; {tune_command(model, workload)}"
        )
        note = Note("info", "measured-otherwise", f"{text} would measure this workload")
        return Remembered(None, (note,))
    if not measurements:
        return Remembered(None, ())
    newest = max(measurements, key=lambda m: m.measured_at)
    text = (
        f"the measurement {newest.id} is not used:"
        f" {' and '.join(_obstacles(newest, device, versions))};"
        f" {tune_command(model, workload)} would measure this one"
    )
    return Remembered(None, (Note("info", "measurement-not-used", text),))


def is_of(measurement: Measurement, device: Device, versions: Versions) -> bool:
    """Whether a measurement is of a device and of these versions."""
    return not _obstacles(measurement, device, versions)


def machine_name(device: Device) -> str:
    """Return what a measurement calls a machine: bytes are equal where this is.

    Memory is in whole GiB: what a kernel keeps of it changes with every update.
    """
    return f"{device.name}, {ceil_div(device.memory_bytes, 2**30)} GiB"


def tune_command(model: str, workload: Workload) -> str:
    """Return the command that measures a workload, ready for a shell.

    >>> tune_command("org/my model", Workload(prompt_tokens=500, max_tokens=8, kv_bits=4))
    "memfit tune 'org/my model' --prompt-tokens 500 --max-tokens 8 --kv-bits 4"
    """
    usual = Workload(prompt_tokens=workload.prompt_tokens)
    words = ["memfit", "tune", model, "--prompt-tokens", str(workload.prompt_tokens)]
    if workload.images:
        words[3:] = ["--prompt", "TEXT"]
        words += ["--image", "FILE"] * len(workload.images.each_image())
        words += ["--video", "FILE"] * len(workload.images.videos)
    words += ["--max-tokens", str(workload.max_tokens)]
    for name in (
        "batch",
        "prefill_step",
        "kv_bits",
        "kv_group_size",
        "quantized_kv_start",
        "max_kv_size",
    ):
        if (value := getattr(workload, name)) != getattr(usual, name):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def _obstacles(measurement: Measurement, device: Device, versions: Versions) -> list[str]:
    """Why a measurement does not hold here, in words."""
    reasons = []
    here = machine_name(device)
    if (measurement.device, measurement.backend) != (here, device.backend):
        reasons.append(f"it is of {measurement.device}, this is {here}")
    was = Versions(measurement.mlx_version, measurement.mlx_lm_version, measurement.mlx_vlm_version)
    if was != versions:
        reasons.append(f"it is of {was}, here is {versions}")
    return reasons


def _listed(measurements: Sequence[Measurement]) -> str:
    named = [workload_words(m.workload) for m in measurements[:_NAMED]]
    if (more := len(measurements) - _NAMED) > 0:
        named.append(f"and {more} more")
    return ", ".join(named)


def workload_words(workload: Workload) -> str:
    """Return a workload's tokens, and its other settings where they are not the usual ones."""
    usual = Workload(prompt_tokens=1)
    text = f"{workload.prompt_tokens} + {workload.max_tokens} tokens"
    if workload.images:
        text += f" with {workload.images}"
    if workload.batch > 1:
        text += f" in a batch of {workload.batch}"
    if workload.prefill_step != usual.prefill_step:
        text += f" by steps of {workload.prefill_step}"
    if workload.kv_bits:
        text += f" with {workload.kv_bits}-bit KV"
    if workload.max_kv_size:
        text += f" with at most {workload.max_kv_size} kept"
    return text


def _distance(one: Workload, other: Workload) -> tuple[bool, int, int]:
    """How far two workloads are apart, the cache's kind first."""
    return (
        (one.kv_bits, one.batch) != (other.kv_bits, other.batch),
        abs(one.total_tokens - other.total_tokens),
        abs(one.prefill_step - other.prefill_step),
    )
