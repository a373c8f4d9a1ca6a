"""A first policy for a model, with comments, from the figures it has today."""

import json
import os
import re
from importlib import resources
from pathlib import Path
from string import Template

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.checkpoint.index.records import PREFIX as INDEX_PREFIX
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.checkpoint.opening import HUB
from memfit.estimators.gate.figures import figures_of
from memfit.estimators.machine.device import GIB, Device
from memfit.estimators.questions.question import WorkloadQuestion
from memfit.estimators.sizing.catalog import Catalog

PROMPT_TOKENS = 4096
MAX_TOKENS = 256
_BOUND = """\
      # The workspace is a bound on this machine, which decides only where it is accepted.
      basis: bound"""
_NO_BOUND = """\
      # How well the weights must be known: exact, derived or bound.
      # basis: derived"""


def init_policy(catalog: Catalog, model: str, devices: tuple[Device, ...]) -> str:
    """Return the text of a policy with one target for each device.

    Raises:
        MemfitError: when the model cannot be opened or sized.
        UnsupportedError: when its weights are only bounded.
    """
    blocks = (_block(catalog, model, device) for device in dict.fromkeys(devices))
    return _template("policy").substitute() + "\n".join(blocks)


def _block(catalog: Catalog, model: str, device: Device) -> str:
    sized = catalog.sized(model, device=device)
    if sized.footprint.basis == "bound":
        reason = next((note.message for note in sized.footprint.notes), model)
        raise UnsupportedError(f"{model}: its weights are only bounded: {reason}")
    most = sized.model.max_context or PROMPT_TOKENS + MAX_TOKENS
    prompt = max(1, min(PROMPT_TOKENS, most - MAX_TOKENS))
    work = WorkloadQuestion(prompt_tokens=prompt, max_tokens=MAX_TOKENS)
    workload = work.under(catalog.native_runtime(model))
    figures = figures_of(sized, workload)
    return _template("target").substitute(
        name=_name(model, device),
        reference=_reference(sized.checkpoint, model),
        machine=_machine(device),
        prompt_tokens=prompt,
        max_tokens=MAX_TOKENS,
        context=_context_line(figures.context_tokens),
        basis=_BOUND if figures.workspace_basis == "bound" else _NO_BOUND,
    )


def _reference(checkpoint: Checkpoint, model: str) -> str:
    """The line that names a model, which no other model can take the place of."""
    key, name = "model", model
    if checkpoint.revision is not None:
        place, colon, file = checkpoint.id.partition(":")
        pinned = place if "@" in place else f"{place}@{checkpoint.revision}"
        key, name = "hub", f"{pinned}{colon}{file}"
    elif checkpoint.source == "index":
        name = f"{INDEX_PREFIX}{checkpoint.id}"
    elif os.path.lexists(os.path.expanduser(model)):
        key, name = "path", model if model[0] in "./~" else f"./{model}"
    return f"{key}: {json.dumps(name, ensure_ascii=False)}"


def _machine(device: Device) -> str:
    """The line that names a machine: by its memory where no table has it."""
    if device.source == "table":
        return f"device: {device.name}"
    gib, rest = divmod(device.memory_bytes, GIB)
    return f"memory: {device.memory_bytes}" if rest else f"memory: {gib}GB"


def _context_line(tokens: int | None) -> str:
    if tokens is None:
        return "      # context: nothing fits this machine today: this gate will not pass"
    return f"      context: {tokens}"


def _name(model: str, device: Device) -> str:
    """A target's name, from the last part of the model's."""
    path = Path(model.removeprefix(HUB))
    last = path.stem if path.suffix in (".yaml", ".yml", ".safetensors") else path.name
    last = path.parent.name if last == "config.json" else last
    plain = re.sub(r"[^A-Za-z0-9._+-]+", "-", last).strip("-.")[:50]
    return f"{plain or 'model'}-on-{_machine(device).partition(': ')[2]}"


def _template(name: str) -> Template:
    file = resources.files("memfit.estimators.gate") / "data" / f"{name}.yaml"
    return Template(file.read_text(encoding="utf-8"))
