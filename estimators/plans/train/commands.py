"""Commands of mlx_lm.lora, with flags that its argument parser has. Source: mlx_lm/lora.py."""

import shlex
from collections.abc import Iterator

from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.workload import ADAPTER, Recipe
from memfit.estimators.runtimes.mlx_lm_commands import convert_command, option

CONVERTED = "mlx_model"
# Not the name that a file of the user has.
CONFIG_FILE = "lora_parameters.yaml"


def train_commands(
    model: str,
    recipe: Recipe,
    *,
    data: str | None,
    config: str | None = None,
    quantize: Quantization | None = None,
) -> tuple[str, ...]:
    """Return the commands that run a recipe.

    Settings without a flag go into a file first, unless a file ``config`` has them.
    """
    commands = [] if quantize is None else [convert_command(model, CONVERTED, quantize)]
    flags = ["mlx_lm.lora", "--train", *option("--model", CONVERTED if quantize else model)]
    flags += option("--data", data or "DATA")
    if config is None and (adapter := list(_adapter_lines(recipe))):
        text = "\\n".join(["lora_parameters:", *adapter])
        commands.append(f"printf {shlex.quote(text + chr(92) + 'n')} > {CONFIG_FILE}")
        config = CONFIG_FILE
    if config is not None:
        flags += ["-c", config]
    return (*commands, shlex.join([*flags, *_flags(recipe)]))


def _flags(recipe: Recipe) -> Iterator[str]:
    for name in ("fine_tune_type", "optimizer"):
        yield from (f"--{name.replace('_', '-')}", getattr(recipe, name))
    for name in ("num_layers", "batch_size", "max_seq_length", "grad_accumulation_steps"):
        yield from option(f"--{name.replace('_', '-')}", str(getattr(recipe, name)))
    for name in ("grad_checkpoint", "mask_prompt"):
        if getattr(recipe, name):
            yield f"--{name.replace('_', '-')}"


def _adapter_lines(recipe: Recipe) -> Iterator[str]:
    # mlx_lm.lora has no flags for these, and a file has to name all of them.
    default = Recipe()
    if recipe.fine_tune_type == "full" or all(
        getattr(recipe, name) == getattr(default, name) for name in ADAPTER
    ):
        return
    if recipe.keys is not None:
        yield f"  keys: [{', '.join(recipe.keys)}]"
    for name in ADAPTER[:3]:
        yield f"  {name}: {getattr(recipe, name)}"
