"""``ollama run`` (Ollama at commit fb3076099, cmd/cmd.go and envconfig/config.go)."""

from typing import Any

from memfit.estimators.base.errors import InputError
from memfit.estimators.questions.programs.program import (
    Given,
    Program,
    Settings,
    Undescribed,
    count_of,
)

_HUB = ("hf.co/", "huggingface.co/")
_FALSE = ("0", "f", "false")  # strconv.ParseBool; another text counts as true


def _run(given: Given) -> Settings:
    if "model" not in given:
        raise InputError("the line names no model: ollama run qwen3:8b")
    name: str = given["model"]
    values: dict[str, Any] = {
        "model": name if name.startswith(_HUB) else f"ollama:{name}",
        "runtime": "ollama",
        "context": given.get("context", "auto"),
        "batch": count_of(given, "requests", "OLLAMA_NUM_PARALLEL") or 1,
    }
    if types := given.get("cache_type"):
        values["cache_type"] = types
    if str(given.get("flash", "")).lower() in _FALSE:
        values["flash_attn"] = False
    notes = ["its manifest's own num_ctx comes before this"] if "context" in given else []
    return Settings(values, notes)


PROGRAMS = (
    Program(
        name="ollama run",
        table="ollama",
        source="Ollama fb3076099",
        taken={
            "$OLLAMA_CONTEXT_LENGTH": "context",
            "$OLLAMA_NUM_PARALLEL": "requests",
            "$OLLAMA_KV_CACHE_TYPE": "cache_type",
            "$OLLAMA_FLASH_ATTENTION": "flash",
        },
        undescribed={
            "$OLLAMA_GPU_OVERHEAD": Undescribed("less of the GPU is not described", ("0",)),
            "$LLAMA_ARG_FIT_TARGET": Undescribed("1024 MiB stay free by --fit", ("1024",)),
        },
        settings=_run,
        operand="model",
    ),
)
