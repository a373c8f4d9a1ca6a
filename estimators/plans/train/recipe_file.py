"""The YAML file of mlx_lm.lora (-c, --config): the settings that memory depends on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from memfit.estimators.base.reading.section import Section, read_yaml, to_record
from memfit.estimators.base.workload import ADAPTER, Recipe

MAX_RECIPE_BYTES = 2**20
_READ = (
    *("fine_tune_type", "optimizer", "num_layers", "batch_size", "max_seq_length"),
    *("grad_checkpoint", "grad_accumulation_steps", "mask_prompt"),
)
# mlx_lm/lora.py, CONFIG_DEFAULTS, and the keys of datasets: a recipe does not depend on them.
_IGNORED = (
    *("model", "train", "test", "data", "seed", "iters", "val_batches", "learning_rate"),
    *("steps_per_report", "steps_per_eval", "resume_adapter_file", "adapter_path", "save_every"),
    *("test_batches", "config", "clear_cache_threshold", "lr_schedule", "optimizer_config"),
    *("report_to", "project_name", "trust_remote_code", "hf_dataset", "prompt_feature"),
    *("text_feature", "completion_feature", "chat_feature", "lora_layers"),
)


def read_name(path: Path | None, key: Literal["model", "data"]) -> str | None:
    """Return the model or the data that a file names, None without one.

    Raises:
        InputError: naming the file, the line and the key.
    """
    value = None if path is None else _read(path).values.get(key)
    return value if isinstance(value, str) else None


def read_recipe(path: Path | None, given: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a file and of options, which come before the file's values.

    Raises:
        InputError: naming the file, the line and the key, or the option.
    """
    values = {key: value for key, value in given.items() if value is not None}
    if path is None:
        return Recipe(**values)
    top = _read(path)
    if "lora_layers" in top:
        raise top.reading.fail(("lora_layers",), "mlx-lm calls it num_layers since 0.19")
    found = {key: top.values[key] for key in _READ if top.has(key)}
    if top.has("lora_parameters"):
        place = ("lora_parameters",)
        adapter = top.reading.section(top.values["lora_parameters"], place, ADAPTER)
        # mlx_lm/tuner/utils.py looks each of them up.
        for key in ADAPTER[:3]:
            if not adapter.has(key):
                raise top.reading.fail((*place, key), "missing")
        found |= {key: value for key, value in adapter.values.items() if value is not None}
    to_record(Recipe, found, top.reading)
    return to_record(Recipe, found | values, top.reading)


def _read(path: Path) -> Section:
    return read_yaml(path, (*_READ, "lora_parameters", *_IGNORED), limit=MAX_RECIPE_BYTES)
