"""Options of fine-tuning, by the names of mlx_lm.lora."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace

from memfit.cli.options.groups import OptionGroup
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import printable
from memfit.estimators.base.recipe import ADAPTER, FineTuneType, OptimizerName
from memfit.estimators.questions.model import ModelQuestion

if TYPE_CHECKING:
    from memfit.estimators.base.recipe import Recipe


class TrainingOptions(OptionGroup, frozen=True, kw_only=True):
    """The recipe; what is not given has the file's value, else mlx_lm.lora's default."""

    panel = "Training options"
    fine_tune_type: Annotated[
        FineTuneType | None, typer.Option(help="lora, dora or full. Default: lora.")
    ] = None
    num_layers: Annotated[
        int | None, typer.Option(help="Layers to train, from the last; -1 for all. Default: 16.")
    ] = None
    batch_size: Annotated[int | None, typer.Option(help="Sequences in a step. Default: 4.")] = None
    max_seq_length: Annotated[
        int | None, typer.Option(help="Longer examples are cut. Default: 2048.")
    ] = None
    grad_checkpoint: Annotated[
        bool | None,
        typer.Option("--grad-checkpoint", help="Compute activations again in the backward pass."),
    ] = None
    grad_accumulation_steps: Annotated[
        int | None, typer.Option(help="Steps for each update. Default: 1.")
    ] = None
    optimizer: Annotated[
        OptimizerName | None,
        typer.Option(help="adam, adamw, muon, sgd or adafactor. Default: adam."),
    ] = None
    mask_prompt: Annotated[
        bool | None, typer.Option("--mask-prompt", help="Leave the prompt out of the loss.")
    ] = None
    rank: Annotated[int | None, typer.Option(help="Of the adapters. Default: 8.")] = None
    scale: Annotated[float | None, typer.Option(help="Of the adapters. Default: 20.")] = None
    dropout: Annotated[float | None, typer.Option(help="Of the adapters. Default: 0.")] = None
    keys: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help="Modules with an adapter. Default: all linear layers and experts."
        ),
    ] = None
    config: Annotated[
        Path | None, typer.Option("--config", "-c", metavar="FILE", help="mlx_lm.lora's YAML file.")
    ] = None
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="train.jsonl and valid.jsonl: the lengths to train on."),
    ] = None

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
