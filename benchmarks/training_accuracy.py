"""Compare traced training steps with MLX's own peak on the CPU backend; see docs/accuracy.md.

Run from the checkout with mlx and mlx-lm installed: ``python -m benchmarks.training_accuracy``.
Small models of tests/arch/cases get random weights and are trained by mlx-lm's own trainer for a
few steps, each case in a process of its own. The largest step counts.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.child import output_of
from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.workload import Recipe
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.versions import MLX_VERSION
from memfit.estimators.trace.kernel_stubs import TraceTarget
from memfit.estimators.trace.libraries import changed
from memfit.estimators.trace.traced_model import TracedModel
from memfit.estimators.trace.training_peak import training_peak

CASES = Path(__file__).parents[1] / "tests" / "arch" / "cases"
HOST = Device("this host", "cpu", 0, 0, None, "flag")
TIMEOUT_SECONDS = 300
GROUP = 32
DENSE = (
    *("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "mistral", "olmo2"),
    *("granite", "cohere", "starcoder2", "stablelm", "gpt_neox", "glm4", "smollm3", "exaone4"),
    *("internlm3", "helium", "seed_oss", "lfm2", "minicpm", "gpt2", "olmo3", "ministral3"),
)
# The first six loop over tokens when they are trained.
RECURRENT = (
    *("qwen3_5", "qwen3_next", "kimi_linear", "mamba", "jamba", "rwkv7"),
    *("falcon_h1", "mamba2", "nemotron_h", "granitemoehybrid"),
)
EXPERTS = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v2_lite", "gpt_oss", "granitemoe", "glm4_moe")


class Case(NamedTuple):
    """A model, how it is stored and how it is trained."""

    name: str
    recipe: dict[str, Any]
    bits: int | None = None
    dtype: str = "BF16"
    tokens: int = 129

    def __str__(self) -> str:
        stored = f"{self.bits} bits" if self.bits else self.dtype
        recipe = ", ".join(f"{key} {value}" for key, value in self.recipe.items())
        return f"{self.name} | {stored}, {self.tokens} tokens | {recipe or 'defaults'}"


def cases() -> Iterator[Case]:
    """Yield the cases: every class with and without checkpointing, then one setting each."""
    for name in (*DENSE, *EXPERTS):
        for checkpointed in (False, True):
            # MLX multiplies gathered matrices on the CPU in float32 only.
            dtype = "F32" if name in EXPERTS else "BF16"
            yield Case(name, {"grad_checkpoint": True} if checkpointed else {}, dtype=dtype)
    settings: tuple[dict[str, Any], ...] = (
        {"fine_tune_type": "dora"},
        {"fine_tune_type": "full"},
        {"optimizer": "adamw", "grad_accumulation_steps": 3},
        {"optimizer": "adafactor", "fine_tune_type": "full"},
        {"optimizer": "muon"},
        {"optimizer": "sgd", "num_layers": 1, "batch_size": 1},
        {"dropout": 0.1, "rank": 32},
    )
    for index, recipe in enumerate(settings * 2):
        yield Case(("llama", "gemma3_text", "qwen3", "olmo2")[index % 4], recipe)
    for name in RECURRENT:
        for checkpointed in (False, True):
            yield Case(name, {"grad_checkpoint": True} if checkpointed else {}, dtype="F32")
    for name in ("qwen3", "gemma2", "mistral", "qwen3_moe"):
        yield Case(name, {"grad_checkpoint": True}, bits=4, dtype="F32", tokens=257)
        yield Case(name, {}, bits=4, dtype="F32")


def main() -> None:
    """Print one row per case, and the distribution."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    every = list(cases())
    if arguments.measure is not None:
        print(measure(every[arguments.measure]))
        return
    ratios = []
    for index, case in enumerate(every):
        if arguments.only not in case.name:
            continue
        if (measured := measured_apart(index)) is None:
            continue
        predicted = predict(case)
        ratios.append(predicted / measured)
        print(f"| {case} | {measured:,} | {predicted:,} | {ratios[-1]:.3f} |", flush=True)
    summarise(sorted(ratios))


def summarise(ratios: list[float]) -> None:
    """Print how many ratios are near 1, and the range."""
    near = sum(0.95 <= ratio <= 1.05 for ratio in ratios)
    print(f"{len(ratios)} cases: {near} within 5 %, {ratios[0]:.3f} to {ratios[-1]:.3f}")


def measured_apart(index: int) -> int | None:
    """Return the measured peak of a case, None where mlx-lm cannot train it."""
    name, asked = str(list(cases())[index]), ("--measure", str(index))
    measured = output_of(name, "training_accuracy", *asked, seconds=TIMEOUT_SECONDS)
    return None if measured is None else int(measured)


def _recipe(case: Case) -> Recipe:
    return Recipe(**{"num_layers": -1, "batch_size": 2, **case.recipe})


def predict(case: Case) -> int:
    """Return the traced peak of the largest step."""
    built = TracedModel(
        _config(case),
        "cpu",
        dtype=case.dtype,
        quantize=Quantization(case.bits, GROUP) if case.bits else None,
    )
    run = built.record_training(
        _recipe(case), case.tokens, TraceTarget(backend="cpu"), validated=None
    )
    return max(moment.nbytes for moment in training_peak(run, HOST, MLX_VERSION).moments)


def measure(case: Case) -> int:
    """Return MLX's peak over the steps of the trainer."""
    import mlx.core as mx
    import numpy as np
    from mlx_lm.tuner import trainer
    from mlx_lm.tuner.utils import linear_to_lora_layers

    from memfit.estimators.trace.training_recorder import OPTIMIZERS
    from tests.oracle import Oracle

    recipe, oracle = _recipe(case), Oracle(_config(case), case.dtype)
    model = (oracle.quantize(case.bits, GROUP) if case.bits else oracle).model
    mx.eval(model.parameters())
    model.freeze()
    if recipe.fine_tune_type == "full":
        for layer in model.layers[-max(recipe.num_layers, 0) :]:
            layer.unfreeze()
    else:
        settings = {"rank": recipe.rank, "scale": recipe.scale, "dropout": recipe.dropout}
        is_dora = recipe.fine_tune_type == "dora"
        linear_to_lora_layers(model, recipe.num_layers, settings, use_dora=is_dora)
    import mlx.optimizers

    optimizer = getattr(mlx.optimizers, OPTIMIZERS[recipe.optimizer])(learning_rate=1e-5)
    shape = recipe.batch_size, case.tokens

    def batches(**_: Any) -> Iterator[Any]:
        numbers = np.random.default_rng(0)
        while True:
            tokens = numbers.integers(1, 50, shape).astype(np.int32)
            yield mx.array(tokens), mx.array([[0, case.tokens]] * recipe.batch_size)

    steps = 2 * recipe.grad_accumulation_steps + 1
    arguments = trainer.TrainingArgs(
        iters=steps,
        steps_per_save=10**9,
        adapter_file="/dev/null",
        grad_checkpoint=recipe.grad_checkpoint,
        grad_accumulation_steps=recipe.grad_accumulation_steps,
    )
    with changed(mx, {"save_safetensors": lambda *_: None}):
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        trainer.train(model, optimizer, [], None, arguments, iterate_batches=batches)
    return int(mx.get_peak_memory())


def _config(case: Case) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CASES / f"{case.name}.json").read_text())
    return config


if __name__ == "__main__":
    main()
