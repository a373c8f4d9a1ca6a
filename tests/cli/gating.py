"""Models and policies for tests of the gate: checkpoints of real size that take no disk space."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.models import QWEN3_4B, quantised_tensors, write_checkpoint, write_config

SAMPLES = Path(__file__).parents[2] / "sample_configs"
WORKLOAD: Mapping[str, Any] = {"prompt_tokens": 4096, "max_tokens": 256}


def write_quantised(directory: Path, config: Mapping[str, Any], bits: int = 4) -> Path:
    """Write a checkpoint as mlx_lm.convert would, with the tensors of mlx-lm's own class."""
    block = {"group_size": 64, "bits": bits}
    tensors = quantised_tensors(config, bits)
    return write_checkpoint(directory, {**config, "quantization": block}, tensors, shards=2)


def write_plain_config(directory: Path, config: Mapping[str, Any] = QWEN3_4B) -> Path:
    """Write only a config; its weights are derived."""
    return write_config(directory, config)


def target(limits: Mapping[str, Any], **keys: Any) -> dict[str, Any]:
    """Return one target of a policy, by default on a Mac with 24 GB."""
    machine = {"memory", "working_set", "device"} & keys.keys()
    place = {} if machine else {"device": "m4-pro-24"}
    model = {} if {"hub", "path"} & keys.keys() else {"model": "model"}
    return {**model, **place, "workload": dict(WORKLOAD), "limits": limits, **keys}


def write_policy(directory: Path, **targets: Mapping[str, Any]) -> Path:
    """Write memfit.yaml with targets; underscores of their names become hyphens."""
    named = {name.replace("_", "-"): dict(value) for name, value in targets.items()}
    path = directory / "memfit.yaml"
    document = {"schema": "memfit.policy/1", "targets": named}
    # JSON is YAML, and without the anchors that a YAML dumper writes for repeated values.
    path.write_text(json.dumps(document, indent=2))
    return path
