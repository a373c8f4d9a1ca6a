"""mlx-swift-lm: caches and workspace as mlx-lm's, prompts in chunks of 512 tokens."""

from collections.abc import Iterator

from msgspec.structs import replace

from memfit.estimators.arch.specs import GatedDelta
from memfit.estimators.base.units import open_size
from memfit.estimators.base.workload import Workload
from memfit.estimators.mlx.kv_cache import state_bytes
from memfit.estimators.results.estimate import Note
from memfit.estimators.runtimes.held import without_held
from memfit.estimators.runtimes.interface import MemoryFigures
from memfit.estimators.runtimes.mlx_lm import MlxModel
from memfit.estimators.runtimes.runtime import Budget, Runtime

MLX_SWIFT_LM = Runtime(
    name="mlx-swift-lm",
    version="017be476",
    prefill_step=512,  # Libraries/MLXLMCommon/Evaluate.swift, GenerateParameters
    kv_step=256,  # KVCache.swift, KVCacheSimple.step
    kv_group_size=64,  # GenerateParameters
    quantized_kv_start=0,  # GenerateParameters
    growth="steps",
    charges="its own caches",
    # wired-memory.md: clamped to the recommended working set
    budget=Budget("working_set", 100),
    keeps="everything in unified memory",
    allocates="caches as mlx-lm's, of a prompt in chunks of 512 tokens",
    source=(
        "https://github.com/ml-explore/mlx-swift-lm, Libraries/MLXLMCommon, and its wired-memory.md"
    ),
    faults=(
        "its guide takes 8-bit and 4-bit caches for 1 and 0.5 bytes an element, without their"
        " scales",
        "its guide takes recurrent states for 16-bit; they are float32",
        "its guide takes the scores of a chunk for L x L; they are L x all tokens before it",
    ),
)


class MlxSwiftLm(MlxModel, frozen=True):
    """mlx-swift-lm; its notes compare the formulas of its guide with the bytes it allocates."""

    defaults = MLX_SWIFT_LM

    def figures(self, workload: Workload) -> MemoryFigures:
        return without_held(super().figures(workload))

    def _refused_files(self) -> str:
        return ""  # MLXLMCommon/Load.swift, loadWeights, loads them

    def _sanitizes(self) -> bool:
        return False

    def _notes(self, workload: Workload, figures: MemoryFigures) -> Iterator[Note]:
        """Yield where its guide to wired memory is wrong."""
        if workload.kv_bits:
            guide = self._cache_bytes(replace(workload, kv_bits=None)) * workload.kv_bits // 16
            text = (
                f"mlx-swift-lm's guide states {open_size(guide)} of cache at"
                f" {workload.kv_bits} bits; with scales and biases it is"
                f" {open_size(self._cache_bytes(workload))}"
            )
            yield Note("warning", "runtime-fault", text)
        model = self.subject.model
        deltas = [mixer for mixer in model.mixers() if mixer.kind == GatedDelta.kind]
        if deltas:
            guide = 2 * sum(state.elements for mixer in deltas for state in mixer.states())
            text = (
                f"mlx-swift-lm's guide states {open_size(guide)} of recurrent states; in"
                f" float32 they are {open_size(state_bytes(model, 1))}"
            )
            yield Note("warning", "runtime-fault", text)

    def _cache_bytes(self, workload: Workload) -> int:
        costs = self.token_costs(workload)
        return sum(c.allocated_bytes(c.needed_tokens(workload.total_tokens)) for c in costs)
