"""What all runtimes on MLX have: how they load a model, and what to say of MLX's versions."""

from collections.abc import Iterator

from msgspec.structs import replace

from memfit.estimators.arch.model import Model
from memfit.estimators.arch.registry import row_or_default
from memfit.estimators.arch.specs import (
    Attention,
    GatedDelta,
    LatentAttention,
    Recurrent,
    TracedMixer,
)
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import open_size
from memfit.estimators.base.workload import Workload
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.machine.device import ANY_MAC, Device
from memfit.estimators.mlx.kernels import fused_changes
from memfit.estimators.mlx.versions import OLDEST_MLX, MlxVersions, Version, format_version
from memfit.estimators.results.estimate import Note
from memfit.estimators.runtimes.facets import OnMlx, formula_of
from memfit.estimators.runtimes.interface import Bound, MemoryFigures, RuntimeModel


class MlxRuntimeModel(RuntimeModel, OnMlx, frozen=True):
    """A model as a runtime on MLX runs it, which mlx-lm's own function loads (utils.py)."""

    @classmethod
    def loads(cls, checkpoint: Checkpoint) -> None:
        if checkpoint.source == "gguf":
            raise UnsupportedError(
                f"{checkpoint.id}: {cls.defaults.name} loads no GGUF file; size it for llama.cpp,"
                " or convert it first"
            )

    def resident_bytes(self) -> int:
        return self.subject.allocated_bytes

    def load_bytes(self) -> int:
        return self.resident_bytes()

    def refusal(self) -> str:
        """Return why mlx_lm/utils.py, load_model, does not load the checkpoint."""
        checkpoint = self.subject.checkpoint
        # Of an assumed type the class is not known, nor what it takes.
        if checkpoint.assumed_from:
            return ""
        return self._refused_files() or self.subject.footprint.refusal

    def _refused_files(self) -> str:
        checkpoint = self.subject.checkpoint
        if checkpoint.has_other_names:
            return "mlx-lm loads only model*.safetensors, and the weights are in other files"
        if checkpoint.config.get("model_file") is not None:
            return "model_file in the config: mlx-lm runs no code of a model unless it is trusted"
        if key := row_or_default(str(checkpoint.config.get("model_type"))).missing_key(
            checkpoint.config
        ):
            return f"text_config.{key} is missing, which mlx-lm's class needs"
        return ""

    def _premises(self) -> Iterator[str]:
        yield from super()._premises()
        if self.subject.device is None:
            yield (
                "no device is named: the workspace follows MLX's rules for a Metal GPU of Max class"
            )

    def _allocation(self) -> Iterator[str]:
        yield from super()._allocation()
        yield f"the workspace follows the operations of {self._library()}'s class of this model"

    def _library(self) -> str:
        """Return the library with the class of the model."""
        return "mlx-lm"


# Two peaks that differ by more than one part of this many are different answers.
_ONE_PART_OF = 20


def version_notes(
    runtime_model: RuntimeModel, workload: Workload, figures: MemoryFigures
) -> Iterator[Note]:
    """Yield notes on the versions of MLX, mlx-lm and mlx-vlm that figures are for."""
    names = ("MLX", "mlx-lm", "mlx-vlm")
    for name, asked, newest in zip(
        names, runtime_model.runtime.versions, MlxVersions(), strict=True
    ):
        if asked > newest:
            text = (
                f"{name} {format_version(asked)} is newer than the rules, which were read in"
                f" {format_version(newest)}"
            )
            yield Note("warning", "newer-version", text)
    yield from _other_mlx(runtime_model, workload, figures)


def _other_mlx(
    runtime_model: RuntimeModel, workload: Workload, figures: MemoryFigures
) -> Iterator[Note]:
    """Yield the peak on a supported MLX that fuses other attention, where it differs much.

    Where that reverses the verdict, the note has a code of its own, and a headline has it.
    """
    subject, mlx = runtime_model.subject, runtime_model.runtime.versions.mlx
    changes = fused_changes(attention_widths(subject.model), subject.device or ANY_MAC)
    versions = sorted({max(version, OLDEST_MLX) for version in changes} | {min(mlx, OLDEST_MLX)})
    own = max(version for version in versions if version <= mlx)
    # The formula says at once whether a version matters; a trace takes seconds.
    view = formula_of(runtime_model)
    here = view.figures(workload) if len(versions) > 1 else figures

    def matters(one: MemoryFigures, other: MemoryFigures) -> bool:
        return _differ(one, other) or _fits(one, subject.device) != _fits(other, subject.device)

    def differs(version: Version) -> bool:
        return version != own and matters(here, _on(view, version).figures(workload))

    other = next((version for version in (versions[0], versions[-1]) if differs(version)), None)
    if other is None:
        return
    there = _on(runtime_model, other).figures(workload)
    if matters(figures, there):
        older = [version for version in versions if version < own and differs(version)]
        newer = [version for version in versions if version > own and differs(version)]
        since = next(version for version in versions if version > max(older, default=()))
        span = f"{format_version(since)} and newer"
        if newer:
            span = f"before {format_version(newer[0])}"
            span = f"from {format_version(since)} and {span}" if older else span
        peak = open_size(there.moment.nbytes)
        text = f"the peak is for MLX {span}; {peak} on {format_version(other)}"
        is_higher = there.moment.nbytes > figures.moment.nbytes
        yield Note("warning" if is_higher else "info", "mlx-version", text)
        fits = _fits(there, subject.device)
        if fits != _fits(figures, subject.device):
            word = "fits" if fits else "does not fit"
            text = f"on MLX {format_version(other)} it {word}: the peak is {peak}"
            yield Note("warning", "mlx-verdict", text)


def attention_widths(model: Model) -> frozenset[tuple[int, int]]:
    """Return the widths of keys and values that a model's attention has."""
    found = set(model.attention_widths)
    for mixer in model.mixers():
        match mixer:
            case Attention():
                found.add((mixer.key_dim, mixer.value_dim))
            case LatentAttention(caches_expanded=True):
                found.add((mixer.nope_dim + mixer.rope_dim, mixer.value_dim))
            case LatentAttention():
                found |= {(mixer.nope_dim, mixer.value_dim), (mixer.latent_dim, mixer.latent_dim)}
            case GatedDelta() | Recurrent() | TracedMixer():
                pass
            case _:
                assert_never(mixer)
    return frozenset(found)


def _on(runtime_model: Bound, mlx: Version) -> Bound:
    return replace(runtime_model, runtime=replace(runtime_model.runtime, mlx_version=mlx))


def _fits(figures: MemoryFigures, device: Device | None) -> bool:
    return device is None or figures.moment.nbytes <= device.working_set_bytes


def _differ(one: MemoryFigures, other: MemoryFigures) -> bool:
    peak = one.moment.nbytes
    return abs(other.moment.nbytes - peak) * _ONE_PART_OF > peak
