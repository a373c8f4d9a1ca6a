"""Compare the traced peak with MLX's own on the CPU backend, and with published peaks on Metal.

Run from the checkout with mlx and mlx-lm installed: ``python -m benchmarks.accuracy`` for every
case of tests/arch/cases, varied by a seed, in bfloat16 or 4 bits and with random weights, run by
mlx-lm's generate_step three times in a separate process. ``--metal CONFIG`` traces the published
configuration instead. docs/accuracy.md sums up the result.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from benchmarks.child import output_of
from memfit.estimators.base.dtypes import Quantization
from memfit.estimators.base.workload import CallPhase, Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.mlx.versions import MlxVersions
from memfit.estimators.trace.kernel_stubs import TraceTarget, library_for
from memfit.estimators.trace.libraries import changed
from memfit.estimators.trace.peak import RunPeak, peak
from memfit.estimators.trace.traced_model import TracedModel

CASES = Path(__file__).parents[1] / "tests" / "arch" / "cases"
PACKED = Quantization(4, 32)
RUNS = 3
TIMEOUT_SECONDS = 150
HOST = Device("this host", "cpu", 0, 0, None, "flag")
M4_MAX = Device("M4 Max 64 GB", "metal", 0, 0, None, "flag", "s", 16)
# Without Metal, mlx-lm runs these token by token in Python.
TOKEN_LOOPS = ("rwkv7", "mamba", "jamba", "qwen3_next", "qwen3_5", "kimi_linear", "plamo2")
WIDTHS = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "vocab_size",
)
# mlx_lm.benchmark -p 2048 -g 128 on an M4 Max with 64 GB, mlx 0.29.2.dev (85a8824a8), mlx-lm
# 0.28.2: bits (16: not quantised), group, peak in GB; source: mlx-lm, BENCHMARKS.md.
PUBLISHED_WITH_MLX = (0, 29, 2)
PUBLISHED = {
    "qwen3": (
        (16, 64, 9.02),
        (8, 64, 5.254),
        (6, 64, 4.25),
        (5, 32, 4.00),
        (5, 64, 3.86),
        (4, 32, 3.603),
        (4, 64, 3.35),
    ),
    "qwen3_moe": ((8, 64, 33.46), (6, 64, 25.82), (5, 64, 22.01), (4, 64, 18.20)),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One model and how it is run; ``dtype`` is BF16, F32 or Q4."""

    name: str
    config: dict[str, Any]
    dtype: str
    tokens: int
    step: int
    generated: int = 2

    @property
    def workload(self) -> Workload:
        """The prompt and the tokens generated after it."""
        return Workload(
            prompt_tokens=self.tokens, max_tokens=self.generated, prefill_step=self.step
        )

    @property
    def floating(self) -> str:
        """The type of parameters that are not packed."""
        return "F32" if self.dtype == "F32" else "BF16"

    @property
    def packing(self) -> Quantization | None:
        """How the other parameters are packed."""
        return PACKED if self.dtype == "Q4" else None


@dataclass(frozen=True, slots=True)
class Figures:
    """Bytes above the weights at the peak, one for each run, and of the caches at the end."""

    peaks: tuple[int, ...]
    caches: int
    held: tuple[int, ...]
    """The most in use and kept for reuse together."""


def main() -> None:
    """Print one row per case, and the distribution."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--metal", type=Path, help="config.json of a published model")
    parser.add_argument("--child", choices=("predict", "measure"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.metal:
        against_published(json.loads(arguments.metal.read_text()))
    elif arguments.child:
        chosen: Callable[[Case], Figures] = predict if arguments.child == "predict" else measure
        print(json.dumps(asdict(chosen(Case(**json.load(sys.stdin))))))
    else:
        against_measured(arguments.seed, arguments.only)


def against_measured(seed: int, only: str) -> None:
    """Print predicted and measured peaks above the weights, and how often they agree."""
    ratios, held, spreads, wrong_caches = [], [], [], 0
    paths = [path for path in sorted(CASES.glob("*.json")) if only in path.stem]
    if not paths:
        stop(f"--only {only}: no case of tests/arch/cases has this in its name")
    for path in paths:
        case = varied(path.stem, json.loads(path.read_text()), random.Random(f"{path.stem}{seed}"))
        predicted, measured = in_child("predict", case), in_child("measure", case)
        if predicted is None or measured is None:
            continue
        middle = median(measured.peaks)
        ratios.append(predicted.peaks[0] / middle)
        held.append(predicted.held[0] / median(measured.held))
        spreads.append((max(measured.peaks) - min(measured.peaks)) / middle)
        wrong_caches += predicted.caches != measured.caches
        print(
            f"| {case.name} | {case.dtype} | {case.tokens}/{case.step} | {middle:,}"
            f" | {spreads[-1]:.1%} | {predicted.peaks[0]:,} | {ratios[-1]:.3f} | {held[-1]:.3f} |",
            flush=True,
        )
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    if not errors:
        stop("no case has figures; the lines above say why")
    print(
        f"held: median {median(abs(ratio - 1) for ratio in held):.1%}, {min(held) - 1:+.1%} to"
        f" {max(held) - 1:+.1%}"
    )
    print(
        f"{len(errors)} cases: within 5 %: {sum(e <= 0.05 for e in errors)}, within 10 %:"
        f" {sum(e <= 0.1 for e in errors)}, median {median(errors):.1%}, worst {errors[-1]:.1%};"
        f" measured spread: median {median(spreads):.1%}, worst {max(spreads):.1%};"
        f" caches that differ: {wrong_caches}"
    )


def stop(reason: str) -> NoReturn:
    """Print why there is no result, and exit."""
    print(f"benchmarks.accuracy: {reason}", file=sys.stderr)
    raise SystemExit(2)


def varied(name: str, config: dict[str, Any], chance: random.Random) -> Case:
    """Return a case with other widths, layers, lengths and numbers."""
    for part in (config, config.get("text_config", {})):
        for key in WIDTHS:
            if isinstance(part.get(key), int):
                part[key] *= chance.choice((1, 2, 3))
        layers = part.get("num_hidden_layers")
        if layers and not any(isinstance(value, list) for value in part.values()):
            part["num_hidden_layers"] = layers + chance.randint(0, 2)
    dtype = chance.choice(("BF16", "Q4"))
    if dtype == "BF16" and "expert" in json.dumps(config):
        dtype = "F32"  # MLX's CPU backend multiplies experts in float32 only
    looped = name.startswith(TOKEN_LOOPS)
    tokens = chance.randint(200, 300 if looped else 1500 if dtype == "Q4" else 3000)
    return Case(name, config, dtype, tokens, chance.choice((256, 512, 1024, 2048)))


def in_child(task: str, case: Case) -> Figures | None:
    """Return the figures from a separate process, None where mlx-lm cannot run the case."""
    name, text = f"{case.name} ({case.dtype}), {task}", json.dumps(asdict(case))
    line = output_of(name, "accuracy", "--child", task, seconds=TIMEOUT_SECONDS, text=text)
    if line is None:
        return None
    content = json.loads(line)
    return Figures(tuple(content["peaks"]), content["caches"], tuple(content["held"]))


def predict(case: Case) -> Figures:
    options: dict[str, Any] = {"dtype": case.floating, "quantize": case.packing}
    model = TracedModel(case.config, "cpu", **options)
    trace, shapes = model.record(case.workload, TraceTarget(backend="cpu"))
    found = peak(trace, HOST)
    above, caches = found.nbytes - shapes.weight_bytes, shapes.kv_bytes + shapes.ssm_bytes
    return Figures((above,), caches, (max(found.held.values()) - shapes.weight_bytes,))


def measure(case: Case) -> Figures:
    """Return MLX's measurements of generations by mlx-lm."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache

    from tests.oracle import Oracle, cache_bytes

    mx.random.seed(0)
    oracle = Oracle(case.config, case.floating)
    if case.packing:
        oracle.quantize(case.packing.bits, case.packing.group_size)
    mx.eval(oracle.model.parameters())
    peaks, held, most, caches_bytes = [], [], 0, 0

    def clear_cache(clear: Callable[[], None] = mx.clear_cache) -> None:
        # What is in use and kept together only grows until this, so here it is the most.
        nonlocal most
        most = max(most, mx.get_active_memory() + mx.get_cache_memory())
        clear()

    for _ in range(RUNS):
        caches = make_prompt_cache(oracle.model)
        prompt = mx.arange(case.tokens) % 17
        mx.eval(prompt)
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        before, most = mx.get_active_memory(), 0
        with changed(mx, {"clear_cache": clear_cache}):
            for _ in generate_step(
                prompt,
                oracle.model,
                max_tokens=case.generated,
                prompt_cache=caches,
                prefill_step_size=case.step,
            ):
                pass
            clear_cache()
        peaks.append(mx.get_peak_memory() - before)
        held.append(most - before)
        caches_bytes = sum(cache_bytes(caches))
        del caches
    return Figures(tuple(peaks), caches_bytes, tuple(held))


def against_published(config: dict[str, Any]) -> None:
    """Print predicted and published peaks of one model, with and without weights and cache."""
    for bits, group, published in PUBLISHED[config["model_type"]]:
        found = published_run(config, bits, group)
        kept = found.nbytes - found.workspace_bytes
        residual = published * 1e9 - kept
        print(
            f"| {bits} | {group} | {published} | {found.nbytes / 1e9:.3f}"
            f" | {found.nbytes / published / 1e9 - 1:+.1%}"
            f" | {residual / 1e9:.3f} | {found.workspace_bytes / 1e9:.3f}"
            f" | {found.workspace_bytes / residual - 1:+.1%} |"
        )


def published_run(config: dict[str, Any], bits: int, group: int) -> RunPeak[CallPhase]:
    """Return the traced peak of a published run, by the rules of the versions that ran it."""
    with silu_apart():
        model = TracedModel(
            config, "metal", quantize=Quantization(bits, group) if bits < 16 else None
        )
        target = TraceTarget(backend="metal", versions=MlxVersions(mlx=PUBLISHED_WITH_MLX))
        trace, _ = model.record(Workload(prompt_tokens=2048, max_tokens=128), target)
    return peak(trace, M4_MAX)


@contextmanager
def silu_apart() -> Iterator[None]:
    """Give qwen3 the feed-forward block of mlx-lm 0.28.2, which does not compile the product.

    Source: mlx_lm/models/qwen3.py at v0.28.2, MLP; today's compiles both, activations.py, swiglu.
    """
    library = library_for("metal")
    nn, qwen3 = library.load("mlx.nn"), library.load("mlx_lm.models.qwen3")
    with changed(qwen3, {"swiglu": lambda gate, x: nn.silu(gate) * x}):
        yield


if __name__ == "__main__":
    main()
