"""Checkpoints that several targets share: each is opened, read and weighed once."""

import os
from pathlib import Path
from typing import TypeVar

from memfit.estimators.base.errors import MemfitError
from memfit.estimators.base.progress import NULL_PROGRESS, Progress
from memfit.estimators.base.quantization import Quantization
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.checkpoint.opening import open_checkpoint
from memfit.estimators.gate.figures import MARGIN_BYTES
from memfit.estimators.machine.device import Device
from memfit.estimators.sizing.sized_model import SizedModel, size

Found = TypeVar("Found", Checkpoint, SizedModel)

GROUP_SIZE = 64  # of --quantize BITS: mlx-lm utils.py, defaults_for_mode


class Shelf:
    """Sizings by model, bits and device; a relative model is first looked for in ``directory``."""

    def __init__(self, directory: Path, progress: Progress = NULL_PROGRESS) -> None:
        """Start empty; ``sink`` hears of models that are fetched."""
        self._directory = directory
        self._sink = progress
        self._checkpoints: dict[str, Checkpoint | MemfitError] = {}
        self._weighed: dict[tuple[str, int | None], SizedModel | MemfitError] = {}
        self._sizings: dict[tuple[str, int | None, Device], SizedModel] = {}

    def checkpoint(self, model: str) -> Checkpoint:
        """Return a checkpoint.

        Raises:
            MemfitError: as `open_checkpoint`, the same each time.
        """
        if model not in self._checkpoints:
            beside = os.path.join(self._directory, model)
            try:
                reference = beside if os.path.lexists(beside) else model
                found = open_checkpoint(reference, progress=self._sink)
                self._checkpoints[model] = found
            except MemfitError as error:
                self._checkpoints[model] = error
        return _or_raise(self._checkpoints[model])

    def sized(self, model: str, quantize: int | None, device: Device) -> SizedModel:
        """Return a sizing.

        Raises:
            MemfitError: as `open_checkpoint` and `size`, the same each time.
        """
        key = (model, quantize, device)
        if key not in self._sizings:
            self._sizings[key] = self._weigh(model, quantize).on(device)
        return self._sizings[key]

    def _weigh(self, model: str, quantize: int | None) -> SizedModel:
        key = (model, quantize)
        if key not in self._weighed:
            bits = Quantization(quantize, GROUP_SIZE) if quantize else None
            try:
                self._weighed[key] = size(
                    self.checkpoint(model), device=None, margin_bytes=MARGIN_BYTES, quantize=bits
                )
            except MemfitError as error:
                self._weighed[key] = error
        return _or_raise(self._weighed[key])


def _or_raise(found: Found | MemfitError) -> Found:
    if isinstance(found, MemfitError):
        raise found
    return found
