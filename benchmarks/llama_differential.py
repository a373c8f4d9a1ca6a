"""Compare memfit with llama.cpp's allocations for models and settings that are drawn at random.

A draw is an architecture of tests/gguf/allocations.json with another vocabulary and other widths of
its feed-forward, and settings of a context. llama.cpp (xllamacpp, as in
benchmarks/llama_allocations.py) makes the context without allocating; caches and states have to be
equal, the compute buffers are compared in percent. In an environment with memfit and xllamacpp:

    python -m benchmarks.llama_differential          # 5,000 draws; 1 where a cache differs
    python -m benchmarks.llama_differential 200 7    # 200 draws of seed 7
"""

import random
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.llama_allocations import Llama
from memfit.estimators.arch.gguf.model import build_gguf_model
from memfit.estimators.arch.model import Model
from memfit.estimators.runtimes.llama_cpp.builder import Context
from memfit.estimators.runtimes.llama_cpp.caches import (
    CacheTypes,
    buffers,
    can_be_fused,
    recurrent_bytes,
)
from memfit.estimators.runtimes.llama_cpp.compute import compute_buffers
from memfit.estimators.runtimes.llama_cpp.placement import file_weights
from memfit.estimators.runtimes.llama_cpp.settings import cells
from tests.gguf.test_allocations import (
    MIB,
    ROUNDING,
    counted,
    logged,
    placement_of,
    runtime_of,
    workload_of,
)
from tests.gguf.writing import Allocation, Recorded, recorded, tensor, write

_FFN = r"\.(ffn|channel_mix)_"
_OVERRIDES = (r"\.ffn_.*_exps\.", r"blk\.[01]\.ffn_", r"attn_output", r"ffn_(up|gate)")
_WIDTHS = ("feed_forward_length", "expert_feed_forward_length")


class Outcome(NamedTuple):
    """What one draw gave; percent is None where there is no buffer."""

    name: str
    run: Allocation
    is_equal: bool
    percent: float | None
    is_whole: bool
    """Whether all of it is in one memory."""


def draws(count: int, seed: int) -> Iterator[tuple[Recorded, Allocation]]:
    """Yield models with the settings of a context, the same ones for a seed."""
    rng, models = random.Random(seed), list(recorded().values())
    for _ in range(count):
        entry = _resized(rng.choice(models), rng)
        yield entry, _drawn(entry, rng)


def _resized(entry: Recorded, rng: random.Random) -> Recorded:
    """The model with other sizes; each is replaced wherever a tensor has it."""
    name, metadata = entry.architecture, dict(entry.metadata)
    words = metadata[f"{name}.vocab_size"]
    metadata[f"{name}.vocab_size"] = rng.choice((words, 32_000, 100_352, 151_936, 262_144))
    outside = {words: metadata[f"{name}.vocab_size"]}
    inside: dict[int, int] = {}
    # Phi-3's gate is in the same matrix, and shared experts are one matrix.
    joined = 2 if name == "phi3" else metadata.get(f"{name}.expert_shared_count", 1)
    # A size that another key has too would change that as well.
    taken = [value for value in metadata.values() if type(value) is int]
    for key in (f"{name}.{width}" for width in _WIDTHS):
        size = metadata.get(key)
        if type(size) is int and size >= 256 and taken.count(size) == 1:
            metadata[key] = 256 * rng.randint(1, size // 128)
            inside |= {joined * size: joined * metadata[key], size: metadata[key]}
    tensors = tuple(
        tensor(each.name, [sizes.get(extent, extent) for extent in each.shape], each.dtype)
        for each in entry.tensors
        for sizes in [inside if re.search(_FFN, each.name) else outside]
    )
    return entry._replace(metadata=metadata, tensors=tensors)


def _drawn(entry: Recorded, rng: random.Random) -> Allocation:
    sequences = rng.choice((1, 1, 1, 2, 3, 4, 8))
    batch = rng.choice((512, 1024, 2048, 2048, 2048, 4096, 8192))
    microbatch = min(batch, rng.choice((16, 64, 256, 512, 512, 512, 1000, 2048, 4096)))
    flash = rng.random() < 0.8
    blocks = entry.metadata[f"{entry.architecture}.block_count"]
    places: list[int | None] = [None, blocks + 1, blocks + 1, rng.randint(0, blocks)]
    outputs = sequences * rng.choice((1, 4)) if rng.random() < 0.6 else 0
    return Allocation(
        context=sequences * rng.choice((256, 1000, 2048, 4096, 8192, 20_000, 32_768, 100_000)),
        sequences=sequences,
        microbatch=microbatch,
        batch=batch,
        cache=rng.choice(("f16", "f16", "q8_0")) if flash else "f16",
        flash=flash,
        unified=rng.random() < 0.3,
        swa_full=rng.random() < 0.2,
        outputs=0 if outputs > microbatch else outputs,
        gpu_layers=rng.choice(places),
        kv_offload=rng.random() < 0.9,
        overrides=rng.choice(_OVERRIDES) if rng.random() < 0.1 else "",
        kv=[],
        states=[],
        compute=0.0,
        output=0.0,
    )


def outcome(entry: Recorded, run: Allocation) -> Outcome:
    """Return how memfit compares with llama.cpp's log of a run."""
    model = build_gguf_model(entry.metadata, entry.tensors, "model.gguf").model
    room = cells(workload_of(run), runtime_of(run))
    weights = file_weights(entry.tensors, len(model.layers))
    placement = placement_of(run, weights.blocks)
    types = CacheTypes(run.cache, run.cache)
    flash = run.flash and all(map(can_be_fused, model.mixers()))
    context = Context(room, types, flash, run.outputs or room.microbatch)
    sizes = compute_buffers(model, context, weights, placement)
    used, theirs = (sizes.gpu, run.gpu) if run.gpu else (sizes.host, run.compute)
    return Outcome(
        entry.architecture,
        run,
        _equal(model, run),
        100 * (used / MIB / theirs - 1) if theirs else None,
        run.gpu_layers in (None, weights.blocks + 1) and run.kv_offload and not run.overrides,
    )


def _equal(model: Model, run: Allocation) -> bool:
    room, types = cells(workload_of(run), runtime_of(run)), CacheTypes(run.cache, run.cache)
    tokens = run.context // run.sequences
    found = counted(list(buffers(model, room, tokens, flash=run.flash)), types, room)
    expected = {cells: rest for cells, rest in logged(run.kv).items() if rest[0]}
    if {count: layers for count, (layers, *_) in found.items()} != {
        count: layers for count, (layers, *_) in expected.items()
    }:
        return False
    states = abs(recurrent_bytes(model, run.sequences) - sum(run.states) * MIB)
    return states <= 2 * ROUNDING and all(
        abs(own - theirs * MIB) <= 2 * ROUNDING
        for count, (_, *sizes) in found.items()
        for own, theirs in zip(sizes, expected[count][1:], strict=True)
    )


def outcomes(count: int, seed: int) -> Iterator[Outcome]:
    """Yield the outcome of each draw; llama.cpp is asked in this process."""
    llama = Llama()
    for entry, wanted in draws(count, seed):
        with tempfile.TemporaryDirectory() as folder:
            metadata = {**entry.metadata, "tokenizer.ggml.model": "no_vocab"}
            path = write(Path(folder) / "model.gguf", metadata, entry.tensors)
            (run,) = llama.runs(path, (wanted,))
        yield outcome(entry, run)


def summary(found: list[Outcome]) -> dict[str, Any]:
    """Return how many caches are equal, and the errors of the compute buffers in percent."""
    compared = sorted(each.percent for each in found if each.percent is not None and each.is_whole)
    near = sum(abs(percent) <= 5 for percent in compared)
    return {
        "draws": len(found),
        "caches and states equal": sum(each.is_equal for each in found),
        "in one memory": len(compared),
        "within 5 %": round(100 * near / len(compared), 1),
        "least and most": (round(compared[0], 1), round(compared[-1], 1)),
    }


def main(count: int = 5000, seed: int = 38) -> int:
    """Print what differs, and the summary; 1 where a cache or a state differs."""
    found = []
    for each in outcomes(count, seed):
        found.append(each)
        if not each.is_equal or (each.percent is not None and abs(each.percent) > 10):
            print(each.name, each.is_equal, each.percent and round(each.percent, 1), each.run)
    print(summary(found))
    return int(not all(each.is_equal for each in found))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
