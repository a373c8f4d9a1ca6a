"""Small checkpoints with real data, loaded by mlx-lm itself: the reference for loaded weights."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from memfit.estimators.arch.registry import build_model
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.weights.footprint import WeightFootprint, load_footprint
from memfit.estimators.weights.quantization_plan import declared
from memfit.estimators.weights.sanitize import with_own_head
from tests.oracle import Oracle
from tests.weights.hub_layout import Tensors

CASES_DIRECTORY = Path(__file__).parents[1] / "arch" / "cases"
CASES = sorted(CASES_DIRECTORY.glob("*.json"))


def config_of(case: str | Path, **changes: Any) -> dict[str, Any]:
    """Return a case's config with some keys changed."""
    path = case if isinstance(case, Path) else CASES_DIRECTORY / f"{case}.json"
    return {**json.loads(path.read_text()), **changes}


def plain(config: Mapping[str, Any], dtype: str = "BF16") -> Tensors:
    """Return zeros of the model class's own names and shapes."""
    return _zeros(Oracle(config, dtype))


def converted(
    config: dict[str, Any], bits: int, group_size: int, mode: str = "affine", predicate: Any = None
) -> tuple[dict[str, Any], Tensors]:
    """Return config and tensors as written by mlx_lm.convert."""
    from mlx_lm.utils import quantize_model

    oracle = Oracle(config)
    oracle.model, written = quantize_model(
        oracle.model, config, group_size, bits, mode=mode, quant_predicate=predicate
    )
    return written, _zeros(oracle)


def _zeros(oracle: Oracle) -> Tensors:
    return {name: mx.zeros(v.shape, v.dtype) for name, v in oracle.tensors().items()}


def save(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Tensors,
    dtypes: Mapping[str, str] | None = None,
) -> Path:
    """Write a checkpoint; ``dtypes`` replace the types of some of its tensors."""
    (directory / "config.json").write_text(json.dumps(config))
    path = directory / "model.safetensors"
    mx.save_safetensors(str(path), dict(tensors), {"format": "mlx"})
    if dtypes:
        _retype(path, dtypes)
    return directory


def _retype(path: Path, dtypes: Mapping[str, str]) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for name, dtype in dtypes.items():
        header[name]["dtype"] = dtype
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def loaded_arrays(directory: Path) -> Counter[int] | None:
    """Return the number of arrays of each size that mlx-lm loads, None when it rejects them."""
    from mlx_lm.utils import load_model

    try:
        model, _ = load_model(directory)
    except Exception:  # noqa: BLE001 - with any error mlx-lm rejects the checkpoint
        return None
    return Counter(array.nbytes for _, array in tree_flatten(model.parameters()))


def predicted_weights(directory: Path) -> WeightFootprint:
    checkpoint = open_checkpoint(str(directory))
    model = build_model(checkpoint.config, checkpoint.config_name)
    model = with_own_head(model, checkpoint.tensors)
    return load_footprint(
        checkpoint, model, declared(checkpoint.config, model, checkpoint.config_name)
    )


def check(directory: Path) -> WeightFootprint:
    """Compare memfit with a real load: equal array by array, or rejected by both."""
    predicted, loaded = predicted_weights(directory), loaded_arrays(directory)
    if loaded is None:
        assert predicted.refusal
        assert predicted.basis == "bound"
        assert [note.level for note in predicted.notes] == ["warning"]
    else:
        assert (predicted.refusal, predicted.basis, predicted.sizes) == ("", "exact", loaded)
    tensors = open_checkpoint(str(directory)).tensors
    assert tensors is not None
    assert predicted.nbytes == sum(predicted.by_part.values()) == sum(t.nbytes for t in tensors)
    return predicted
