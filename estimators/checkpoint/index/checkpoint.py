"""A published model of the index as a checkpoint: its config, without weight files."""

from memfit.estimators.checkpoint.index.records import IndexedModel
from memfit.estimators.checkpoint.manifest import Checkpoint


def indexed_checkpoint(model: IndexedModel, meaning: str = "") -> Checkpoint:
    """Return a checkpoint of a model whose config the index has."""
    return Checkpoint(
        id=model.name,
        source="index",
        config=model.config or {},
        config_name=f"{model.name} in the index",
        hub=model.name,
        meaning=meaning,
    )
