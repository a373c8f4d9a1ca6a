"""A model as an older version of mlx-lm runs it: mlx/data/changes.py has what changed."""

from msgspec.structs import replace

from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.arch.registry import class_row
from memfit.estimators.arch.specs import (
    Attention,
    GatedDelta,
    LatentAttention,
    Mixer,
    Recurrent,
    TracedMixer,
)
from memfit.estimators.base.dispatch import assert_never
from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.mlx.data.changes import ADDED, OLDEST_MLX_LM, REWRITTEN
from memfit.estimators.mlx.versions import MlxVersions, Version, format_version


def check_class(model_type: str, mlx_lm: Version) -> None:
    """Do nothing when a version's class for a type is like that of the newest.

    Raises:
        UnsupportedError: when it is not, or the version is older than the oldest rules.
    """
    version = format_version(mlx_lm)
    if mlx_lm < OLDEST_MLX_LM:
        oldest = format_version(OLDEST_MLX_LM)
        raise UnsupportedError(f"mlx-lm {version}: its rules are described from {oldest} on")
    row = class_row(model_type)
    added = (row.since if row else ADDED.get(model_type)) or OLDEST_MLX_LM
    if mlx_lm < added:
        raise UnsupportedError(
            f"{model_type}: mlx-lm {version} has no class for it; the first is in"
            f" {format_version(added)}"
        )
    rewritten = row.rewritten if row else REWRITTEN.get(model_type)
    first, commit = rewritten or (OLDEST_MLX_LM, "")
    if mlx_lm < first:
        raise UnsupportedError(
            f"{model_type} in mlx-lm {version}: its class is described from {format_version(first)}"
            f" on ({commit}); older ones cache keys and values of every head"
        )


def as_of(model: Model, versions: MlxVersions) -> Model:
    """Return a model as its class in a version of mlx-lm has it.

    Raises:
        UnsupportedError: as `check_class`.
    """
    check_class(model.model_type, versions.mlx_lm)
    layers = model.layers
    if versions.has("narrow_states"):
        layers = tuple(
            replace(layer, mixers=tuple(map(_narrowed, layer.mixers))) for layer in layers
        )
    if versions.has("unused_projections"):
        layers = tuple(map(_with_unused, layers))
    return model if layers == model.layers else replace(model, layers=layers)


def _narrowed(mixer: Mixer) -> Mixer:
    """States of the model's type, as the kernels wrote them."""
    match mixer:
        case GatedDelta():
            return replace(mixer, float32=False)
        case Recurrent() if mixer.kind == "mamba2":
            return replace(mixer, state=tuple(replace(s, float32=False) for s in mixer.state))
        case Attention() | LatentAttention() | Recurrent() | TracedMixer():
            return mixer
        case _:
            assert_never(mixer)


def _with_unused(layer: Layer) -> Layer:
    """Keys and values of a layer that reads another's: a linear layer can be quantised."""
    return replace(
        layer,
        modules=tuple(
            module
            if module.loaded
            else replace(module, loaded=True, quantizable=len(module.shape) > 1)
            for module in layer.modules
        ),
    )
