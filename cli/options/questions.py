"""The options of the four questions: names, help, and what other programs call them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from memfit.cli.options.completion import (
    complete_device,
    complete_model,
    complete_runtime,
    complete_type,
)
from memfit.cli.options.groups import Only, Options, argument, option
from memfit.estimators.base.dtypes import DEFAULTS
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.setting_names import setting
from memfit.estimators.base.units import ceil_div, parse_count
from memfit.estimators.machine.device import OsRegime
from memfit.estimators.questions.programs.vllm import vllm_count
from memfit.estimators.questions.question import WorkloadQuestion, read_setting
from memfit.estimators.questions.target import (
    MARGIN_BYTES,
    MachineQuestion,
    ModelQuestion,
    RuntimeQuestion,
)

CONTEXT = ("context", "ctx_size", "max_model_len")
"""The options that set the context, by the names of three programs."""
BATCH = ("batch", "prefill_batch", "decode_batch")
"""The options of several sequences."""
IMAGES = ("image", "video")
"""The options of what a prompt has in addition to text."""
_FORMATS = "BITS|mxfp4|nvfp4|mxfp8"


def _model(given: dict[str, Any]) -> dict[str, Any]:
    if "model_option" in given:
        if "model" in given:
            raise InputError("MODEL and --model both name the model: give one of them")
        given["model"] = given.pop("model_option")
    if given.pop("quantises", False) and "quantize" not in given:
        given["quantize"] = DEFAULTS.get(given.get("quant_mode", "affine"), (4,))[0]
    return given


_TURN = re.compile(r"([^()+]+?)\s*(?:\(([^()+]+?)\s+cached\))?\s*\+\s*([^()+]+)")


def _turn(given: dict[str, Any]) -> dict[str, Any]:
    """Read ``--turn``, a short form of the three options that it sets."""
    if "turn" not in given:
        return given
    text, names = given.pop("turn"), ("prompt_tokens", "cached_tokens", "max_tokens")
    if stated := [name for name in (*names, *CONTEXT) if name in given]:
        raise InputError(f"--turn sets the tokens: leave out {setting(stated[0])}")
    if not (found := _TURN.fullmatch(text.strip())):
        raise InputError(
            "--turn: expected a prompt and a reply, such as 20k+800 or '20k(18k cached)+800', got"
            f" {text[:40]!r}"
        )
    counts = zip(names, found.groups(), strict=True)
    return given | {name: read_setting("turn", parse_count, part) for name, part in counts if part}


def _workload(given: dict[str, Any]) -> dict[str, Any]:
    given = _turn(given)
    readers: dict[str, Callable[[str], Any]] = {
        "context": str,
        "ctx_size": lambda text: _of_each(text, given.get("batch", 1)),
        "max_model_len": _model_len,
    }
    stated = [name for name in readers if name in given]
    contexts = [read_setting(name, readers[name], given.pop(name)) for name in stated]
    if len(stated) > 1:
        first, second = map(setting, stated[:2])
        raise InputError(f"{first} and {second} both set the context: give one")
    if not contexts:
        return given
    if "prompt_tokens" in given or "max_tokens" in given:
        raise InputError(
            f"{setting(stated[0])} excludes --prompt-tokens and --max-tokens: use those two"
        )
    return {**given, "context": contexts[0]}


def _of_each(text: str, batch: int) -> int | str:
    """The part of each sequence, as without a unified cache (llama-context.cpp, n_ctx_seq)."""
    tokens = parse_count(text)
    return ceil_div(tokens, max(1, batch)) if tokens else "model"


def _model_len(text: str) -> int | str:
    return "auto" if text.strip() in ("auto", "-1") else vllm_count(text)


def _kv_bits(text: str) -> int:
    """Bits, 0 for none. Without the option the value is None: the runtime's default."""
    if text == "none":
        return 0
    try:
        bits = int(text)
    except ValueError:
        bits = 0
    if not bits:
        raise InputError(f"--kv-bits: expected a number of bits or none, got {text[:40]!r}")
    return bits


def _machine(given: dict[str, Any]) -> dict[str, Any]:
    size = given.pop("tensor_parallel_size", 1)
    if size == 1:
        return given
    if given.keys() & {"ranks", "parallel", "split"}:
        raise InputError("--tensor-parallel-size sets the ranks: leave out their options")
    return {**given, "ranks": size, "parallel": "tensor"}


_MODEL = Options(
    ModelQuestion,
    "Model options",
    {
        "quantize": option(
            *("--quantize", "--q-bits"),
            metavar=_FORMATS,
            help="Size the model as mlx_lm.convert would quantise it, such as 4 or 4bit.",
        ),
        "group_size": option(
            *("--group-size", "--q-group-size"), kind=int, help="Group size for --quantize."
        ),
        "quant_mode": option(
            *("--quant-mode", "--q-mode"),
            help="Mode for --quantize: affine, mxfp4, nvfp4 or mxfp8.",
        ),
        "quantises": option(
            "-q",
            kind=bool,
            default=False,
            help="Quantise to the default bits of the mode, as mlx_lm.convert -q.",
        ),
        "model": argument(
            metavar="MODEL",
            help="A directory, a file (.safetensors, .gguf, config.json, a sample), a sample's"
            " name, or on the Hub org/name, org/name:Q4_K_M or a URL.",
            show_default=False,
            autocompletion=complete_model,
        ),
        "model_option": option(
            *("--model", "-m", "--hf-path", "-hf"),
            metavar="MODEL",
            help="The same, as an option.",
            autocompletion=complete_model,
        ),
        "adapter": option(
            *("--adapter", "--adapter-path"),
            kind=Path,
            help="Include the LoRA adapter in this directory.",
        ),
        "draft": option(
            *("--draft", "--draft-model", "--model-draft", "-md"),
            metavar="MODEL",
            help="Include this draft model.",
        ),
        "draft_quantize": option(
            metavar=_FORMATS, help="Size the draft model as mlx_lm.convert quantises it."
        ),
        "num_draft_tokens": option(
            kind=int, help="Tokens that the draft proposes in a step. Default: 3; MTP: its config."
        ),
        "as_type": option(
            "--as",
            metavar="TYPE",
            help="Assume this model_type, such as llama, for an architecture that is not known.",
            autocompletion=complete_type,
        ),
        "mmproj": option(
            *("--mmproj", "-mm"),
            kind=Path,
            metavar="FILE",
            help="Include this vision projector of a GGUF model.",
        ),
    },
    _model,
)
_CONVERSION = ("quantize", "group_size", "quant_mode", "quantises")
_NAMED = (*_CONVERSION, "model", "model_option")
EstimatedModel = Annotated[ModelQuestion, _MODEL]
NamedModel = Annotated[ModelQuestion, _MODEL, Only(*_NAMED)]
AdaptedModel = Annotated[ModelQuestion, _MODEL, Only(*_NAMED, "adapter")]
AssumableModel = Annotated[ModelQuestion, _MODEL, Only(*_NAMED, "adapter", "as_type")]
_DRAFT = ("draft", "draft_quantize", "num_draft_tokens")
PlannedModel = Annotated[ModelQuestion, _MODEL, Only(*_NAMED, "adapter", "as_type", *_DRAFT)]
Conversion = Annotated[ModelQuestion, _MODEL, Only(*_CONVERSION, "as_type", "adapter", *_DRAFT)]
"""How models are read and converted that are named elsewhere."""

_WORKLOAD = Options(
    WorkloadQuestion,
    "Workload options",
    {
        "context": option(
            help="Prompt tokens, with no generation, such as 32k; model: as many as it takes,"
            " auto: as many as the runtime takes by itself."
        ),
        "ctx_size": option(
            *("--ctx-size", "-c"),
            help="The same as llama.cpp takes it: for all sequences together.",
        ),
        "max_model_len": option(help="The same as vLLM takes it: 32k is 32000 tokens."),
        "turn": option(
            metavar="PROMPT[(N cached)]+REPLY",
            help="Prompt and reply, such as 20k+800 or '20k(18k cached)+800'.",
        ),
        "prompt_tokens": option(help="Tokens in the prompt."),
        "max_tokens": option(help="Tokens to generate."),
        "batch": option(
            *("--batch", "-np", "--max-num-seqs"), kind=int, help="Sequences that run together."
        ),
        "prefill_batch": option(
            *("--prefill-batch", "--prompt-concurrency"),
            kind=int,
            help="Sequences of a batch that mlx-lm prefills together.",
        ),
        "decode_batch": option(
            *("--decode-batch", "--decode-concurrency"),
            kind=int,
            help="Sequences of a batch that mlx-lm decodes together.",
        ),
        "prefill_step": option(
            *("--prefill-step", "--prefill-step-size", "-ub", "--ubatch-size"),
            "--max-num-batched-tokens",
            kind=int,
            help="Tokens computed at once: a chunk of mlx-lm, a micro-batch of llama.cpp.",
        ),
        "kv_bits": option(
            kind=int, parser=_kv_bits, metavar="BITS|none", help="Bits of a quantised KV cache."
        ),
        "kv_group_size": option(kind=int, help="Group size of a quantised KV cache."),
        "quantized_kv_start": option(
            kind=int, help="Tokens in the KV cache before it is quantised."
        ),
        "max_kv_size": option(
            kind=int, help="Size of a rotating KV cache, if the model supports one."
        ),
        "cached_tokens": option(
            help="Tokens of the prompt, from its start, that a prompt cache has, such as 18k."
        ),
        "image": option(
            kind=list[str],
            metavar="WxH[xN]|FILE",
            help="An image in the prompt, such as 1024x768, three of them 1024x768x3, or a file;"
            " can be repeated. Its tokens come on top of the context.",
        ),
        "video": option(
            kind=list[str],
            metavar="FxWxH|FILE|DIR",
            help="A video as FRAMESxWIDTHxHEIGHT, such as 16x448x448, a file, or a folder of its"
            " frames.",
        ),
    },
    _workload,
)
WorkloadOptions = Annotated[WorkloadQuestion, _WORKLOAD]

_MACHINE = Options(
    MachineQuestion,
    "Machine options",
    {
        "device": option(
            help="A machine such as m4-max-64 (see memfit devices), or host: what is free of this"
            " one.",
            autocompletion=complete_device,
        ),
        "memory": option(help="A Mac that is sold with this memory, such as 32 or 32GB."),
        "working_set": option(help="A device with this recommended working set, such as 26.8GB."),
        "reserve": option(
            help="Memory for the system and other programs, such as 8GB. Default: what a Mac's"
            " working set leaves them."
        ),
        "os_regime": option(
            kind=OsRegime, help="macOS version that sets a Mac's recommended working set."
        ),
        "gpu_cores": option(
            kind=int, metavar="N", help="Cores of the Mac's GPU, which decide how fast it prefills."
        ),
        "ranks": option(
            kind=int, metavar="N", help="Run the model over N ranks of mlx.launch, one a machine."
        ),
        "parallel": option(
            kind=Literal["tensor", "pipeline"],
            help="How ranks share the model. Default: as mlx_lm's sharded_load chooses.",
        ),
        "tensor_parallel_size": option(
            *("--tensor-parallel-size", "-tp"),
            kind=int,
            default=1,
            min=1,
            help="As --ranks N --parallel tensor.",
        ),
        "split": option(metavar="A,B", help="Layers of each rank of a pipeline, such as 20,12."),
        "hosts": option(
            kind=Path,
            metavar="FILE",
            help="The hostfile of mlx.launch, with a device or memory for each host.",
        ),
    },
    _machine,
)
MachineOptions = Annotated[
    MachineQuestion,
    _MACHINE,
    Only("device", "memory", "working_set", "reserve", "os_regime", "gpu_cores"),
]
RankedMachine = Annotated[MachineQuestion, _MACHINE]
"""The machine, or the machines of several ranks."""

_RUNTIME = Options(
    RuntimeQuestion,
    "Runtime options",
    {
        "mlx_version": option(
            metavar="VERSION",
            help="MLX that runs it, such as 0.32.0. Default: on a Mac the installed one, else the"
            " newest that is described.",
        ),
        "mlx_lm_version": option(metavar="VERSION", help="The same for mlx-lm."),
        "mlx_vlm_version": option(
            metavar="VERSION", help="The same for mlx-vlm, which then runs the model."
        ),
        "runtime": option(
            help="Runtime to estimate for (see memfit runtimes). Default: mlx-lm, for GGUF"
            " llama.cpp.",
            show_default=False,
            autocompletion=complete_runtime,
        ),
        "gpu_memory_utilization": option(
            metavar="SHARE", help="Share of the GPU's memory that vllm takes. Default: 0.92."
        ),
        "capacity": option(metavar="N", help="Experts of each layer that mlx-moe keeps in memory."),
        "margin": option(
            default=f"{MARGIN_BYTES // 10**6}MB", help="Memory to keep free above the peak."
        ),
        "cache_type": option(
            metavar="KEYS[,VALUES]", help="Types of llama.cpp's KV cache, such as q8_0."
        ),
        "cache_type_k": option(
            *("--cache-type-k", "-ctk"),
            metavar="TYPE",
            help="Type of the keys in llama.cpp's cache.",
        ),
        "cache_type_v": option(
            *("--cache-type-v", "-ctv"), metavar="TYPE", help="Type of the values in its cache."
        ),
        "flash_attn": option(
            "--flash-attn/--no-flash-attn",
            kind=bool,
            help="Whether llama.cpp uses flash attention.",
        ),
        "kv_unified": option(
            *("--kv-unified/--no-kv-unified", "-kvu"),
            kind=bool,
            help="Whether llama.cpp's sequences share one cache, as without -np in llama-server.",
        ),
        "swa_full": option(
            "--swa-full",
            kind=bool,
            help="A sliding cache of llama.cpp has room for the whole context.",
        ),
        "all_logits": option(
            "--all-logits",
            kind=bool,
            help="Logits of every token, as llama.cpp's library has room for; llama-server of one.",
        ),
        "gpu_layers": option(
            *("--gpu-layers", "-ngl", "--n-gpu-layers"),
            metavar="N|auto|all",
            help="Layers that llama.cpp has on the GPU, with the head; auto: the most that fit.",
        ),
        "mtp_tokens": option(
            *("--mtp-tokens", "--spec-draft-n-max"),
            kind=int,
            metavar="N",
            help="Tokens that a GGUF file's own prediction layers draft, as llama.cpp's --spec-type"
            " draft-mtp.",
        ),
        "max_requests": option(
            kind=int, help="Requests that vllm runs at once, its --max-num-seqs."
        ),
        "kv_cache_dtype": option(
            metavar="auto|fp8", help="Type of vllm's KV cache; for mlx-lm see --kv-bits."
        ),
        "n_cpu_moe": option(
            *("--n-cpu-moe", "-ncmoe"),
            metavar="N|all",
            help="Layers, from the first, with their experts on llama.cpp's host; or all.",
        ),
        "cpu_moe": option(
            *("--cpu-moe", "-cmoe"), kind=bool, help="All experts are on llama.cpp's host."
        ),
        "override_tensor": option(
            *("--override-tensor", "-ot"),
            metavar="PATTERN=CPU,...",
            help="Where tensors of a GGUF file are whose names match, as in llama.cpp.",
        ),
        "kv_offload": option(
            *("--kv-offload/--no-kv-offload", "-kvo/-nkvo"),
            kind=bool,
            help="Whether llama.cpp's caches are with their layers, or all on the host.",
        ),
        "mmproj_offload": option(
            "--mmproj-offload/--no-mmproj-offload",
            kind=bool,
            help="Whether llama.cpp has a vision projector on the GPU.",
        ),
        "batch_size": option(
            *("--batch-size", "-b"),
            metavar="TOKENS",
            help="Tokens of llama.cpp's batch, which its micro-batch is at most. Default: 2048.",
        ),
        "host_memory": option(
            metavar="SIZE",
            help="Memory of the host of an NVIDIA card, such as 64GB, for what llama.cpp keeps"
            " there. Default with --device host: what there is.",
        ),
        "host_bandwidth": option(
            metavar="RATE",
            help="How fast that memory is read. Default: 89.6GB/s, two channels of DDR5-5600.",
        ),
        "method": option(
            kind=Literal["auto", "formula", "trace"], help="How to compute the figures."
        ),
    },
)
_VERSIONS = ("mlx_version", "mlx_lm_version", "mlx_vlm_version")
_RUN = (*_VERSIONS, "runtime", "gpu_memory_utilization", "capacity", "margin")
VersionOptions = Annotated[RuntimeQuestion, _RUNTIME, Only(*_VERSIONS)]
RuntimeOptions = Annotated[RuntimeQuestion, _RUNTIME, Only(*_RUN)]
ServedRuntime = Annotated[
    RuntimeQuestion, _RUNTIME, Only(*(name for name in _RUNTIME.declared if name != "method"))
]
"""The runtime with settings of its own."""
EstimateRuntime = Annotated[RuntimeQuestion, _RUNTIME]
