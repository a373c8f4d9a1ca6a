"""Questions over all samples, machines, runtimes and settings, which come equally often."""

import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from msgspec.structs import replace

from memfit.estimators.base.dtypes import converted
from memfit.estimators.base.workload import ServerSettings, Workload
from memfit.estimators.machine.device import GIB, Device
from memfit.estimators.machine.devices import find_device, memory_device
from memfit.estimators.runtimes.registry import get_runtime
from memfit.estimators.sizing.catalog import Catalog
from memfit.estimators.sizing.sized_model import SizedModel
from tests.gguf.writing import recorded, write

SAMPLES = Path(__file__).parents[2] / "sample_configs"
NAMES = tuple(sorted(path.stem for path in SAMPLES.glob("*.yaml")))
# Few kinds of models and lengths: their figures are computed once for many machines.
QUICK_NAMES = ("qwen3-4b-4bit", "qwen3-30b-a3b-4bit", "llama-3.1-8b", "lfm2-1.2b", "qwen3-14b-4bit")
SEEING = ("gemma-3-4b", "gemma-3-27b", "qwen3-vl-4b")
FILES = ("qwen3moe", "qwen3", "gemma3", "falcon-h1", "lfm2", "gpt-oss")
MACS = (8, 16, 18, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)
DEVICES = ("m1-8", "m2-max-64", "m3-ultra-96", "m4-pro-24", "m5-max-64", "rtx-4090", "h100-80")
MACHINES: tuple[int | str, ...] = (*MACS, *DEVICES)
OTHERS = ("mlx-swift-lm", "mlx-moe", "vllm", "zinc", "agent-memory", "llama.cpp")
PROMPTS = (100, 1000, 4096, 5000, 8192, 16_384, 32_768, 65_536)
SEED = 35

Kind = Literal["mlx-lm", "gguf", "mlx-vlm", "other runtime", "plan server"]
_KINDS: tuple[Kind, ...] = (
    *(("mlx-lm",) * 13),
    *("gguf", "gguf", "gguf", "mlx-vlm", "mlx-vlm", "other runtime", "plan server"),
)
Value = TypeVar("Value")


class Question(NamedTuple):
    """One question; of a GGUF file ``machine`` is a percentage of its weights on a card."""

    kind: Kind
    model: str
    bits: int | None
    machine: int | str
    runtime: str | None
    workload: Workload
    server: ServerSettings
    clients: int

    @property
    def given(self) -> dict[str, Any]:
        """The settings of its workload; a runtime may have KV bits where none are given."""
        names = ("prompt_tokens", "max_tokens", "batch", "prefill_step", "kv_bits")
        given = {name: getattr(self.workload, name) for name in (*names, "quantized_kv_start")}
        return {name: value for name, value in given.items() if value is not None}


def drawn(count: int, *, is_quick: bool = False) -> Iterator[Question]:
    """Yield questions, the same ones each time; the first of them come in every number."""
    draw = random.Random(SEED)

    def cycled(values: Sequence[Value]) -> Iterator[Value]:
        while True:
            yield from draw.sample(values, len(values))

    kinds, names = cycled(_KINDS), cycled(QUICK_NAMES if is_quick else NAMES)
    files, others = cycled(FILES), cycled(OTHERS)
    seeing = cycled(SEEING[-1:] if is_quick else SEEING)
    machines, percents = cycled(MACHINES), cycled((40, 60, 90, 110, 130, 300))
    prompts = cycled((1000, 8192) if is_quick else PROMPTS)
    replies, bits = cycled((0, 0, 0, 1, 500, 2000)), cycled((None, None, 4, 8))
    batches, steps = cycled((1, 1, 1, 1, 2, 4, 16)), cycled((2048, 2048, 2048, 512, 4096, 300))
    all_kv_bits = cycled((None, None, None, 8, 4))
    flags = cycled(((8, 32, 10), (1, 4, 4), (1, 1, 2), (2, 3, 0)))
    for _ in range(count):
        kind, kv_bits = next(kinds), next(all_kv_bits)
        models = {"gguf": files, "mlx-vlm": seeing}.get(kind, names)
        together, decoding, caches = next(flags)
        step = next(steps)
        yield Question(
            kind,
            next(models),
            None if kind == "gguf" else next(bits),
            next(percents) if kind == "gguf" else next(machines),
            next(others) if kind == "other runtime" else None,
            Workload(
                prompt_tokens=next(prompts),
                max_tokens=next(replies),
                batch=1 if kv_bits else next(batches),
                prefill_step=step,
                kv_bits=kv_bits,
                quantized_kv_start=0 if kv_bits else 5000,
            ),
            ServerSettings(
                prefill_step=step,
                prompt_concurrency=together,
                decode_concurrency=decoding,
                prompt_cache_size=caches,
            ),
            draw.choice((1, 2, 4)),
        )


class Models:
    """The models of all questions, each read once; GGUF files are written into a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._catalog = folder, Catalog()
        self.model = cache(self._model)

    def path(self, name: str, kind: Kind) -> Path:
        """Return the file of a model."""
        if kind != "gguf":
            return SAMPLES / f"{name}.yaml"
        path = self._folder / f"{name}.gguf"
        if not path.exists():
            entry = recorded()[name]
            write(path, entry.metadata, entry.tensors)
        return path

    def sized(self, question: Question, bits: int | None = None) -> SizedModel:
        """Return the model on the machine, converted to other bits than those of the question."""
        runtime = "mlx-vlm" if question.kind == "mlx-vlm" else question.runtime
        model = self.model(question.model, question.kind, bits or question.bits, runtime)
        return model.on(self.device(question))

    def device(self, question: Question) -> Device:
        """Return the machine: a Mac of so many GiB, one of the table, or a card for a file."""
        machine = question.machine
        if isinstance(machine, str):
            return find_device(machine)
        if question.kind != "gguf":
            return memory_device(machine * GIB)
        weights = self.model(question.model, "gguf", None, None).resident_bytes
        size = weights * machine // 100 + GIB
        card = find_device("rtx-4090")
        return replace(card, memory_bytes=size, working_set_bytes=size, host_memory_bytes=size)

    def _model(self, name: str, kind: Kind, bits: int | None, runtime: str | None) -> SizedModel:
        return self._catalog.sized(
            str(self.path(name, kind)),
            quantize=converted(bits) if bits else None,
            runtime=get_runtime(runtime) if runtime else None,
        )
