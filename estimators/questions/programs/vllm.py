"""``vllm serve`` (vLLM 0.33.0, engine/arg_utils.py and entrypoints/common/cli_args.py)."""

import re
from decimal import Decimal
from typing import Any

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.units import MAX_COUNT
from memfit.estimators.questions.programs.program import (
    Given,
    Program,
    Settings,
    Undescribed,
    count_of,
    present,
)

_COUNT = r"([0-9]{1,12})([kKmM]?)|([0-9]{1,12}\.[0-9]{1,6})([km])"
_COUNT_UNITS = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
_ONE = "one GPU is described"
_BEYOND = "it changes the model or its memory in a way that is not described"
_LESS = "the figures are those without it, and it takes less"
_HOST = "what is kept in the host's memory is not counted"
_GRAPHS = "the figures are of the CUDA graphs that vllm captures by default"
_PACKED = ("gptq", "gptq_marlin", "awq", "awq_marlin", "compressed-tensors", "modelopt", "mxfp4")
_UNDESCRIBED = {
    **dict.fromkeys(
        (
            *("--pipeline-parallel-size", "--data-parallel-size", "--nnodes"),
            *("--decode-context-parallel-size", "--prefill-context-parallel-size"),
        ),
        Undescribed(_ONE, ("1",)),
    ),
    **dict.fromkeys(
        (
            *("--speculative-config", "--spec-method", "--spec-model", "--spec-tokens"),
            *("--kv-cache-memory-bytes", "--num-gpu-blocks-override", "--hf-overrides"),
            *("--enable-lora", "--cpu-offload-gb", "--offload-backend", "--pooler-config"),
            *("--kv-transfer-config", "--config", "--diffusion-config", "--mamba-cache-dtype"),
            *("--mamba-ssm-cache-dtype", "--mamba-block-size", "--additional-config"),
            *("--enable-dbo", "--quantization-config", "--disable-hybrid-kv-cache-manager"),
        ),
        Undescribed(_BEYOND),
    ),
    "--quantization": Undescribed("only what a config declares is described", _PACKED),
    "--dtype": Undescribed("16 bits are described", ("auto", "half", "float16", "bfloat16")),
    "--block-size": Undescribed("blocks of 16 tokens are described", ("16",)),
    "--runner": Undescribed("generators are described", ("auto", "generate")),
    "--convert": Undescribed("generators are described", ("auto", "none")),
    "--load-format": Undescribed(
        "the format of the files is described", ("auto", "hf", "safetensors")
    ),
}
_NOTED = {
    "--enforce-eager": f"{_LESS}: no CUDA graphs",
    "--language-model-only": f"{_LESS}: no vision tower",
    "--compilation-config": _GRAPHS,
    "--cudagraph-capture-sizes": _GRAPHS,
    "--max-cudagraph-capture-size": _GRAPHS,
    "--optimization-level": _GRAPHS,
    "--kv-offloading-size": _HOST,
    "--mm-processor-cache-gb": _HOST,
    "--limit-mm-per-prompt": "what images and videos take while vllm profiles is not counted",
}


def _serve(given: Given) -> Settings:
    if "model" not in given:
        raise InputError("the line names no model: vllm serve org/name")
    length = given.get("max_model_len", "model")
    is_word = length in ("auto", "-1", "model")
    context = {"context": "model" if length == "model" else "auto"}
    counts = {
        "tensor_parallel_size": count_of(given, "tensor_parallel_size", "-tp", least=1),
        "max_requests": count_of(given, "max_requests", "--max-num-seqs", least=1),
    }
    values: dict[str, Any] = {
        "model": given["model"],
        "runtime": "vllm",
        **(context if is_word else {"max_model_len": length}),
        **present(given, "gpu_memory_utilization", "kv_cache_dtype"),
        **({"prefill_step": vllm_count(given["step"])} if "step" in given else {}),
        **{name: count for name, count in counts.items() if count is not None},
    }
    notes = [] if "max_model_len" in given else ["--max-model-len is not given: the model's own"]
    return Settings(values, notes)


def vllm_count(text: str) -> int:
    """Return a count as vLLM reads it (utils/argparse_utils.py): k is 1000, K is 1024.

    Raises:
        InputError: when it is none.
    """
    match = re.fullmatch(_COUNT, text.strip())
    if match is None:
        raise InputError(
            f"{text[:40]!r} is not a number of tokens; write 32768, 32K or --context 32k"
        )
    number, unit = match[1] or match[3], match[2] or match[4] or ""
    tokens = Decimal(number) * _COUNT_UNITS[unit]
    if tokens != int(tokens) or tokens > MAX_COUNT:
        raise InputError(f"{text[:40]!r} is not a whole number of tokens up to {MAX_COUNT}")
    return int(tokens)


PROGRAMS = (
    Program(
        name="vllm serve",
        table="vllm",
        modules=("vllm.entrypoints.openai.api_server",),
        source="vLLM 0.33.0",
        taken={
            "--model": "model",
            "--max-model-len": "max_model_len",
            "--max-num-seqs": "max_requests",
            "--max-num-batched-tokens": "step",
            "--gpu-memory-utilization": "gpu_memory_utilization",
            "--kv-cache-dtype": "kv_cache_dtype",
            "--tensor-parallel-size": "tensor_parallel_size",
        },
        undescribed=_UNDESCRIBED,
        noted=_NOTED,
        settings=_serve,
        operand="model",
        has_dashes=True,
    ),
)
