"""Small checkpoints that really run: random weights and a trained tokenizer, saved as by mlx-lm.

The configs are those of tests/arch/cases. Mixtures of experts are in 4 bits: MLX's CPU backend
has no 16-bit `gather_mm`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CASES = Path(__file__).parent / "arch" / "cases"
UNDESCRIBED: dict[str, dict[str, Any]] = {
    config["model_type"]: config
    for config in json.loads((CASES.parents[1] / "trace" / "cases.json").read_text())
}
SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "A model's memory is its weights, its cache and what is in flight.",
    "Every figure here is counted in bytes, and every byte has a reason.",
)
VOCABULARY = 320  # at least the tokenizer's
BEGINNING, END = "<s>", "</s>"
# Two marks around each message, as in most templates.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to create: a case by name, its bits (None: bf16), shard files and tokenizer.

    As published: with the names and shapes of the Hub, in place of mlx-lm's. ``changes`` are keys
    of the config in place of the case's. Routers that some classes create as zeros choose the same
    experts for every token, unless they are planted.
    """

    case: str
    bits: int | None = None
    shards: int = 1
    has_tokenizer: bool = True
    has_chat_template: bool = False
    is_published: bool = False
    plants_routers: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)


RECIPES = {
    "dense": Recipe("qwen3"),
    "dense-4bit": Recipe("qwen3", bits=4),
    "chat": Recipe("llama", bits=4, has_chat_template=True),
    "sharded": Recipe("llama", shards=3),
    "sliding": Recipe("gemma3_text"),
    "moe": Recipe("qwen3_moe", bits=4),
    "hybrid": Recipe("falcon_h1"),
    "delta-net": Recipe("qwen3_next", bits=4),
    "mla": Recipe("deepseek_v3", bits=4),
    "state": Recipe("mamba2"),
    "no-tokenizer": Recipe("qwen3", has_tokenizer=False),
}


class Checkpoints:
    """Creates each checkpoint at its first use; tests must not write into one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(self, name: str) -> Path:
        """Return the directory of a recipe's checkpoint."""
        path = self._directory / name
        if not path.exists():
            save_checkpoint(path, RECIPES[name])
        return path


def save_checkpoint(path: Path, recipe: Recipe) -> None:
    """Create a checkpoint; the same recipe gives the same weights."""
    mx = pytest.importorskip("mlx.core", reason="the weights are MLX's")
    pytest.importorskip("mlx_lm", reason="the classes are mlx-lm's")
    from mlx_lm.utils import quantize_model, save_config

    from tests.oracle import Oracle

    config = config_of(recipe.case)
    config |= {"torch_dtype": "bfloat16", "eos_token_id": 1, "vocab_size": VOCABULARY}
    config |= recipe.changes
    mx.random.seed(0)
    oracle = Oracle(config)
    if recipe.plants_routers:
        plant_routers(oracle)
    if recipe.bits:
        oracle.model, config = quantize_model(oracle.model, config, 32, recipe.bits)
    tensors = oracle.tensors()
    if recipe.is_published:
        from tests.weights.hub_layout import hub_layout

        tensors = hub_layout(tensors, config)
    save_weights(path, tensors, recipe.shards)
    save_config(config, path / "config.json")
    if recipe.has_tokenizer:
        save_tokenizer(path, recipe.has_chat_template)


def config_of(case: str) -> dict[str, Any]:
    """Return the config of a case, or of a class that is not described by its model type."""
    described = CASES / f"{case}.json"
    if not described.exists():
        return UNDESCRIBED[case]
    config: dict[str, Any] = json.loads(described.read_text())
    return config


def plant_routers(oracle: Any) -> None:
    """Give the first experts larger router weights, so that they are chosen more often."""
    import mlx.core as mx

    planted = []
    for name, tensor in oracle.tensors().items():
        if name.endswith((".gate.weight", ".router.weight")):
            order = mx.arange(tensor.shape[0])
            strength = 4 / (1 + order / 6)
            fresh = mx.random.normal(tensor.shape) * strength[:, None] / tensor.shape[1] ** 0.5
            planted.append((name, fresh.astype(tensor.dtype)))
    oracle.model.load_weights(planted, strict=False)


def save_weights(path: Path, tensors: dict[str, Any], shards: int = 1) -> None:
    """Save tensors under the names of mlx-lm's save_model, which uses shards of 5 GB."""
    mx = pytest.importorskip("mlx.core")
    path.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    weight_map = {}
    for index in range(shards):
        part = names[index::shards]
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        file = file if shards > 1 else "model.safetensors"
        arrays = {name: tensors[name] for name in part}
        mx.save_safetensors(str(path / file), arrays, metadata={"format": "mlx"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    (path / "model.safetensors.index.json").write_text(index_text)


def save_tokenizer(path: Path, has_chat_template: bool) -> None:
    """Train a byte-level BPE on a few sentences, and save it like transformers."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BEGINNING, END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGINNING,
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    if has_chat_template:
        (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
