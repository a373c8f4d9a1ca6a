"""What a conversion starts from: a config and tensors without packed matrices."""

from collections.abc import Iterable, Mapping
from typing import Any

from memfit.estimators.checkpoint.manifest import Tensor
from memfit.estimators.trace.model_builder import PACKS_ITSELF

_QUANTIZATION = ("quantization", "quantization_config")


def unquantised(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without what it says of the format of its weights.

    A class that packs its weights itself is never built without.
    """
    if config.get("model_type") in PACKS_ITSELF:
        return dict(config)
    plain = {key: config[key] for key in config if key not in _QUANTIZATION}
    if isinstance(text := plain.get("text_config"), Mapping):
        plain["text_config"] = {key: text[key] for key in text if key not in _QUANTIZATION}
    return plain


def to_convert(
    config: Mapping[str, Any], tensors: Iterable[Tensor] | None
) -> tuple[dict[str, Any], Iterable[Tensor] | None]:
    """Return config and tensors of what a conversion starts from.

    mlx-lm leaves packed matrices as they are: the figure is of the original ones, of which there
    are no headers.
    """
    plain = unquantised(config)
    return plain, tensors if plain == config else None
