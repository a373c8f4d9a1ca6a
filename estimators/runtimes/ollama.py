"""Ollama: llama-server with a context and a batch that Ollama chooses.

Source: Ollama at commit fb3076099, server/routes.go, server/sched.go and llm/llama_server.go.
"""

import shlex
from collections.abc import Iterator, Mapping

from msgspec.structs import asdict, replace

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.units import parse_count
from memfit.estimators.base.workload import MAX_TOKENS, ServerSettings, Workload
from memfit.estimators.machine.device import GIB, Device
from memfit.estimators.results.estimate import Note
from memfit.estimators.runtimes.interface import MemoryFigures, Subject
from memfit.estimators.runtimes.llama_cpp.runtime import LlamaCpp
from memfit.estimators.runtimes.llama_cpp.settings import (
    LLAMA_CPP,
    LlamaCppRuntime,
    parse_cache_types,
)
from memfit.estimators.runtimes.runtime import Runtime

# server/routes.go, Serve: the memory of all GPUs, and the context from it on.
_CONTEXTS = ((47 * GIB, 262_144), (23 * GIB, 32_768), (0, 4096))
# server/sched.go, generationBatchForContext: tokens above which a batch is taken.
_BATCHES = ((32_768, 2048), (4096, 1024), (0, 512))
# The same, generationBatchHasHeadroom and generationBatchSurcharge: for a batch from this size on,
# the percentage of the memory that the prediction may be, and what the batch takes in addition.
_HEADROOM = {2048: (60, 2 * GIB), 1024: (75, 768 * 2**20)}
_THRESHOLD = 80  # generationBatchFits, percent
_LEAST, _LEAST_VISION = 4, 2048  # server/sched.go, getRunner
# server/sched.go, load: families that run one request at a time, by their names in GGUF.
_ONE_AT_A_TIME = (
    "mllama qwen3vl qwen3vlmoe qwen35 qwen35moe qwen3next lfm2 lfm2moe nemotron_h nemotron_h_moe"
    " nemotron_h_omni"
).split()
_FALSE = ("0", "f", "false")  # strconv.ParseBool
_BUILD = "ollama fb3076099 builds llama.cpp b10488; the figures are those of b11549"


class OllamaRuntime(LlamaCppRuntime, frozen=True, kw_only=True):
    """Ollama with the settings of its environment."""

    default_context: int | None = None
    """OLLAMA_CONTEXT_LENGTH; None: by the memory of the GPU."""

    def configured(self, environ: Mapping[str, str]) -> "OllamaRuntime":
        """Return Ollama with the settings of its variables.

        Raises:
            InputError: when one cannot be read.
        """
        runtime = self
        if types := environ.get("OLLAMA_KV_CACHE_TYPE"):
            runtime = replace(runtime, types=parse_cache_types(types))
        if environ.get("OLLAMA_FLASH_ATTENTION", "").lower() in _FALSE:
            runtime = replace(runtime, flash=False)
        tokens = parse_count(environ.get("OLLAMA_CONTEXT_LENGTH") or "0")
        return replace(runtime, default_context=tokens or None)


OLLAMA = OllamaRuntime(
    **{
        **asdict(LLAMA_CPP),
        "name": "ollama",
        "version": "fb3076099",
        "automatic": True,  # llm/llama_server.go: without num_gpu no -ngl is given
        "allocates": "what llama-server does, whose context and batch it chooses",
        "source": "https://github.com/ollama/ollama, server and llm",
    }
)


class Ollama(LlamaCpp, frozen=True):
    """Ollama, which starts llama-server for a model."""

    defaults = OLLAMA

    @classmethod
    def bound(cls, runtime: Runtime, subject: Subject) -> "Ollama":
        """Return the model, with the layers on the GPU that its manifest asks for."""
        layers = subject.checkpoint.run_options.get("num_gpu", -1)
        assert isinstance(runtime, OllamaRuntime)
        if layers >= 0 and runtime.automatic:
            runtime = replace(runtime, gpu_layers=layers, automatic=False)
        model = super().bound(runtime, subject)
        assert isinstance(model, Ollama)
        return model

    def program_context(self, workload: Workload, *, fitted: bool) -> int:
        """Return num_ctx of the manifest, else OLLAMA_CONTEXT_LENGTH, else by the GPU's memory."""
        most, runtime = workload.total_tokens, self.runtime
        assert isinstance(runtime, OllamaRuntime)
        if not fitted:
            return most
        tokens = self.subject.checkpoint.run_options.get("num_ctx") or runtime.default_context
        if not tokens:
            memory = _gpu_memory(self.subject.device)
            tokens = next(context for least, context in _CONTEXTS if memory >= least)
        projectors = [each for each in self.subject.checkpoint.skipped_files if "proj" in each.name]
        least = _LEAST_VISION if projectors or self._projector_bytes != 0 else _LEAST
        return min(max(tokens, least), most)

    def program_workload(self, workload: Workload) -> Workload:
        """Return the workload with the batch that Ollama takes for its length.

        Raises:
            UnsupportedError: for several requests of a family that runs one at a time.
        """
        family = str(self.subject.checkpoint.config.get("general.architecture", ""))
        if workload.batch > 1 and family in _ONE_AT_A_TIME:
            raise UnsupportedError(f"ollama runs one request of {family} at a time")
        batch = self.subject.checkpoint.run_options.get("num_batch")
        return replace(workload, prefill_step=batch or self._batch(workload))

    def _batch(self, workload: Workload) -> int:
        """Source: server/sched.go, automaticGenerationBatch."""
        device, tokens = self.subject.device, workload.batch * workload.total_tokens
        wanted = next(batch for above, batch in _BATCHES if tokens > above or not above)
        if device is None:
            return wanted
        memory, predicted = _gpu_memory(device), self._predicted(tokens)
        for batch in (2048, 1024):
            share, more = _HEADROOM[batch]
            fits = predicted <= memory * share // 100
            if batch <= wanted and fits and predicted + more <= memory * _THRESHOLD // 100:
                return batch
        return 512

    def _predicted(self, tokens: int) -> int:
        """Source: llm/llama_server.go, PredictServerVRAM: the file, and every layer in f16."""
        checkpoint = self.subject.checkpoint
        family, config = checkpoint.config.get("general.architecture"), checkpoint.config
        if not self.is_gguf:
            costs = self.token_costs(Workload(prompt_tokens=1))
            return self.resident_bytes() + tokens * sum(cost.bytes_per_token for cost in costs)

        def counts(key: str) -> list[int]:
            value = config.get(f"{family}.{key}")
            return [each for each in (value if isinstance(value, list) else [value]) if each]

        heads = max(counts("attention.head_count"), default=0)
        shared = min(counts("attention.head_count_kv"), default=1)
        width = sum(counts("embedding_length")) // heads if heads else 0
        cached = 2 * sum(counts("block_count")) * shared * width * tokens * 2
        return checkpoint.file_bytes + cached

    def commands(
        self, workload: Workload, model: str, server: ServerSettings | None
    ) -> tuple[str, ...]:
        """Return ``ollama run`` where it takes this context by itself, else nothing."""
        store, _, name = self.subject.checkpoint.id.partition(":")
        most = self.subject.model.max_context or MAX_TOKENS
        own = self.program_context(Workload(prompt_tokens=most), fitted=True)
        if store != self.runtime.name or workload.batch > 1 or workload.total_tokens != own:
            return ()
        return (shlex.join(["ollama", "run", name]),)

    def _notes(self, workload: Workload, figures: MemoryFigures) -> Iterator[Note]:
        yield from super()._notes(workload, figures)
        yield Note("info", "runtime-build", _BUILD)


def _gpu_memory(device: Device | None) -> int:
    """Memory as Ollama sees it: of a Mac the recommended working set (discover)."""
    if device is None or device.backend == "cpu":
        return 0
    return device.working_set_bytes if device.backend == "metal" else device.memory_bytes
