"""Compare memfit with llama.cpp's allocations for every architecture that memfit describes.

A file of usual sizes is completed until llama.cpp's loader takes it: the error of the loader names
each tensor that is missing or has another shape. Then six contexts are made as in
benchmarks/llama_differential.py, those without a GPU with their buffers; some sizes make llama.cpp
end the process. In an environment with memfit and xllamacpp:

    python -m benchmarks.llama_architectures                 # all that are not recorded
    python -m benchmarks.llama_architectures phi2 cogvlm
"""

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.llama_allocations import Llama
from benchmarks.llama_differential import Outcome, outcome
from memfit.estimators.arch.gguf.rules import RULES
from memfit.estimators.checkpoint.manifest import Tensor
from tests.gguf.writing import Allocation, Recorded, recorded, tensor, write

KEYS: dict[str, Any] = {
    "block_count": 4,
    "context_length": 8192,
    "embedding_length": 1024,
    "feed_forward_length": 2816,
    "vocab_size": 32000,
    "attention.head_count": 8,
    "attention.head_count_kv": 4,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.key_length": 128,
    "attention.value_length": 128,
    "attention.clamp_kqv": 8.0,
    "attention.max_alibi_bias": 8.0,
    "attention.sliding_window": 1024,
    "attention.sliding_window_pattern": 4,
    "rope.dimension_count": 128,
    "rope.dimension_sections": [16, 24, 24, 0],
    "rope.freq_base": 10000.0,
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_feed_forward_length": 512,
    "expert_shared_count": 1,
    "expert_shared_feed_forward_length": 512,
    "expert_chunk_feed_forward_length": 256,
    "expert_group_scale": 0.05,
    "experts_per_group": 2,
    "expert_gating_func": 2,
    "expert_weights_scale": 1.0,
    "expert_weights_norm": True,
    "leading_dense_block_count": 1,
    "interleave_moe_layer_step": 1,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
    "use_parallel_residual": True,
}
# Qwen's joined matrix has as many keys as queries; Refact's graph has no experts.
OWN_KEYS = {
    "qwen": {"attention.head_count_kv": 8},
    "refact": {"expert_count": 0, "expert_used_count": 0},
}
BASE = Allocation(
    context=4096,
    sequences=1,
    microbatch=512,
    cache="f16",
    kv=[],
    states=[],
    compute=0.0,
    output=0.0,
    gpu_layers=5,
    outputs=1,
)
CONTEXTS = (
    BASE,
    BASE._replace(outputs=0),
    BASE._replace(gpu_layers=None),
    BASE._replace(outputs=4, sequences=4, microbatch=256, gpu_layers=None),
    BASE._replace(cache="q8_0"),
    BASE._replace(flash=False),
)
_MISSING = re.compile(r"tensor '([^']+)' not found|missing tensor '([^']+)'")
_SHAPE = re.compile(r"tensor '([^']+)' has wrong shape; expected ([\d, ]+)")


class IncompleteError(Exception):
    """The loader wants something that no error of its names."""


def completed(llama: Llama, name: str) -> Recorded:
    """Return a file of an architecture that llama.cpp loads.

    Raises:
        IncompleteError: when it refuses the file for another reason than a tensor.
    """
    keys = KEYS | OWN_KEYS.get(name, {})
    metadata = {f"{name}.{key}": value for key, value in keys.items()}
    metadata["general.architecture"] = name
    tensors: dict[str, Tensor] = {}
    for _ in range(400):
        entry = Recorded(name, metadata, tuple(tensors.values()), ())
        try:
            _run(llama, entry, BASE)
        except SystemExit:
            made = _wanted(llama.log)
            if made is None:
                raise IncompleteError(llama.log[-300:]) from None
            tensors[made.name] = made
        else:
            return entry
    raise IncompleteError("400 tensors were not enough")


def _wanted(log: str) -> Tensor | None:
    if match := _MISSING.search(log):
        name = match[1] or match[2]
        return tensor(name, (1,), _type(name, 1))
    if match := _SHAPE.search(log):
        shape = [int(extent) for extent in re.findall(r"\d+", match[2])]
        while len(shape) > 1 and shape[-1] == 1:
            shape.pop()
        return tensor(match[1], shape, _type(match[1], len(shape)))
    return None


def _type(name: str, dimensions: int) -> str:
    return "F32" if dimensions == 1 or "norm" in name or "bias" in name else "F16"


def _run(llama: Llama, entry: Recorded, wanted: Allocation) -> Allocation:
    with tempfile.TemporaryDirectory() as folder:
        metadata = {**entry.metadata, "tokenizer.ggml.model": "no_vocab"}
        path = write(Path(folder) / "model.gguf", metadata, entry.tensors)
        (run,) = llama.runs(path, (wanted,), allocates=wanted.gpu_layers is None)
    return run


def compared(llama: Llama, name: str) -> Iterator[Outcome]:
    """Yield how memfit compares in each context.

    Raises:
        IncompleteError: as `completed`.
    """
    entry = completed(llama, name)
    for wanted in CONTEXTS:
        try:
            run = _run(llama, entry, wanted)
        except SystemExit:  # a quantised cache without flash attention
            continue
        yield outcome(entry, run)


def main(names: list[str]) -> int:
    """Print the errors of the compute buffers in percent; 1 where one or a cache differs."""
    llama, different = Llama(), 0
    for name in names or [each for each in RULES if each not in recorded()]:
        try:
            found = list(compared(llama, name))
        except IncompleteError as error:
            print(f"{name}: not loaded: {' '.join(str(error).split())[-100:]}")
            continue
        percents = [round(each.percent or 0.0, 1) for each in found]
        different += not all(each.is_equal for each in found)
        different += not -10 < min(percents) <= max(percents) < 20
        print(name, percents, flush=True)
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
