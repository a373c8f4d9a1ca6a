"""How mlx_lm.lora fine-tunes a model: the settings that its memory depends on."""

from math import isfinite
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import Positive, ceil_div

FineTuneType = Literal["lora", "dora", "full"]
ADAPTER = ("rank", "scale", "dropout", "keys")
"""What mlx_lm.lora reads from its file alone, under ``lora_parameters``."""
OptimizerName = Literal["adam", "adamw", "muon", "sgd", "adafactor"]
# mlx_lm/tuner/trainer.py, iterate_batches: batches are padded to one more than a multiple of it.
PAD_TO = 32
SHORTEST = 128
"""Tokens of the shortest sequences that are searched and recommended."""
_MOST = 2**20  # of a setting; a run with more fits no machine


class Recipe(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one run, with the defaults of mlx_lm/lora.py.

    Raises:
        InputError: when a count is out of range.
    """

    fine_tune_type: FineTuneType = "lora"
    optimizer: OptimizerName = "adam"
    num_layers: int = 16
    """From the last one; not above 0 means all."""
    batch_size: Positive = 4
    max_seq_length: Positive = 2048
    grad_checkpoint: bool = False
    grad_accumulation_steps: Positive = 1
    mask_prompt: bool = False
    rank: Positive = 8
    scale: float = 20.0
    dropout: float = 0.0
    keys: tuple[str, ...] | None = None
    """Modules that get an adapter; None is every linear layer of the trained layers."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_seq_length", "grad_accumulation_steps", "rank"):
            if not 1 <= getattr(self, name) <= _MOST:
                raise InputError(f"{name} {getattr(self, name)}: must be from 1 to {_MOST}")
        if self.max_seq_length < 2:
            raise InputError("max_seq_length 1: the trainer predicts the second token at least")
        if not isfinite(self.scale):
            raise InputError(f"scale {self.scale}: must be a finite number")
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout {self.dropout}: must be from 0 to below 1")

    def in_batches(self, size: int) -> "Recipe":
        """Return it with smaller batches, and as many more of them for each update.

        >>> Recipe(batch_size=4).in_batches(1).grad_accumulation_steps
        4
        """
        steps = self.grad_accumulation_steps * ceil_div(self.batch_size, size)
        return replace(self, batch_size=size, grad_accumulation_steps=steps)

    def padded(self, longest: int) -> int:
        """Return the tokens of a batch with a sequence of ``longest`` tokens.

        >>> Recipe().padded(100), Recipe().padded(5000)
        (129, 2048)
        """
        return min(1 + PAD_TO * ceil_div(longest, PAD_TO), self.max_seq_length)
