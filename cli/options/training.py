"""Options of fine-tuning, by the names of mlx_lm.lora."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from memfit.cli.options.groups import OptionGroup, option
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import printable
from memfit.estimators.base.workload import ADAPTER, FineTuneType, OptimizerName
from memfit.estimators.questions.target import ModelQuestion

if TYPE_CHECKING:
    from memfit.estimators.base.workload import Recipe


class TrainingOptions(OptionGroup, frozen=True, kw_only=True):
    """The recipe; what is not given has the file's value, else mlx_lm.lora's default."""

    panel = "Training options"
    fine_tune_type: FineTuneType | None = option(help="lora, dora or full. Default: lora.")
    num_layers: int | None = option(help="Layers to train, from the last; -1 for all. Default: 16.")
    batch_size: int | None = option(help="Sequences in a step. Default: 4.")
    max_seq_length: int | None = option(help="Longer examples are cut. Default: 2048.")
    grad_checkpoint: bool | None = option(
        "--grad-checkpoint", help="Compute activations again in the backward pass."
    )
    grad_accumulation_steps: int | None = option(help="Steps for each update. Default: 1.")
    optimizer: OptimizerName | None = option(
        help="adam, adamw, muon, sgd or adafactor. Default: adam."
    )
    mask_prompt: bool | None = option("--mask-prompt", help="Leave the prompt out of the loss.")
    rank: int | None = option(help="Of the adapters. Default: 8.")
    scale: float | None = option(help="Of the adapters. Default: 20.")
    dropout: float | None = option(help="Of the adapters. Default: 0.")
    keys: str | None = option(
        metavar="A,B", help="Modules with an adapter. Default: all linear layers and experts."
    )
    config: Path | None = option("--config", "-c", metavar="FILE", help="mlx_lm.lora's YAML file.")
    data: Path | None = option(
        metavar="DIR", help="train.jsonl and valid.jsonl: the lengths to train on."
    )

    def recipe(self) -> "Recipe":
        """Return the recipe.

        Raises:
            InputError: when the file or a value cannot be read.
        """
        from memfit.estimators.plans.train.recipe_file import read_recipe

        names = set(self.__struct_fields__) - {"config", "data"}
        given = {name: getattr(self, name) for name in names}
        if self.keys is not None:
            given["keys"] = tuple(key.strip() for key in self.keys.split(",") if key.strip())
            if not given["keys"]:
                raise InputError("--keys: name at least one module, such as self_attn.q_proj")
        return read_recipe(self.config, given)

    def of_file(self, model: ModelQuestion) -> ModelQuestion:
        """Return a model, by the name that the file has where no other is given."""
        from memfit.estimators.plans.train.recipe_file import read_name

        if model.model is None:
            return replace(model, model=read_name(self.config, "model"))
        return model

    def data_directory(self) -> Path | None:
        """Return the directory of --data, or of the file where that is one."""
        from memfit.estimators.plans.train.recipe_file import read_name

        name = read_name(self.config, "data") if self.data is None else None
        return Path(name) if name and os.path.isdir(name) else self.data

    def adapter_file(self) -> str | None:
        """Return the file where it has the adapter's settings, and no option changes them."""
        is_changed = any(getattr(self, name) is not None for name in ADAPTER)
        return None if self.config is None or is_changed else printable(self.config)
