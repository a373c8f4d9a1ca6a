"""Programs of mlx-lm 0.32.2 and mlx-vlm 0.7.10, as their argument parsers read them."""

from typing import Any

from memfit.estimators.base.errors import InputError
from memfit.estimators.questions.programs.program import (
    Given,
    Program,
    Settings,
    Undescribed,
    count_of,
    present,
)

_DEFAULT_MODEL = "mlx-community/Llama-3.2-3B-Instruct-4bit"  # mlx_lm/generate.py, DEFAULT_MODEL
_ACTIVATIONS = Undescribed("quantised activations are not described")
_DRAFT = Undescribed("drafts are not described for it")
_CACHE = {
    "--kv-bits": "kv_bits",
    "--kv-group-size": "kv_group_size",
    "--quantized-kv-start": "quantized_kv_start",
}
_COMMON = {
    "--model": "model",
    "--adapter-path": "adapter",
    "--max-tokens": "max_tokens",
    "--prefill-step-size": "prefill_step",
    **_CACHE,
}
_DRAFTED = {"--draft-model": "draft", "--num-draft-tokens": "num_draft_tokens"}
_SERVED = {
    "--prompt-concurrency": "prompt_concurrency",
    "--decode-concurrency": "decode_concurrency",
    "--prompt-cache-size": "prompt_cache_size",
    "--prompt-cache-bytes": "prompt_cache_bytes",
}
_TURBO = "only uniform quantisation of the cache is described"
_VISION = {
    "--kv-key-bits": Undescribed(_TURBO),
    "--kv-value-bits": Undescribed(_TURBO),
    "--kv-key-scheme": Undescribed(_TURBO, ("uniform",)),
    "--kv-value-scheme": Undescribed(_TURBO, ("uniform",)),
    "--kv-quant-scheme": Undescribed(_TURBO, ("uniform",)),
    "--expert-cache-gb": Undescribed("checkpoints of mlx_vlm.moe_offload are not described"),
    "--draft-model": _DRAFT,
}
_OTHER_MODEL = Undescribed("models that are loaded beside the language model are not described")
_TEXTS = dict.fromkeys(
    ("--prompt", "--system-prompt", "--prefill-response"),
    "its tokens are not counted: --context says how many there are",
)
_SEEN = dict.fromkeys(("--prompt", "--system"), _TEXTS["--prompt"])
_PROMPT = "the line does not say how long prompts are: 4096 tokens, or --context of memfit"


def _counts(given: Given, *names: str) -> dict[str, int]:
    flags = {"prefill_step": "--prefill-step-size"}
    read = {
        name: count_of(given, name, flags.get(name, f"--{name.replace('_', '-')}"))
        for name in names
    }
    return {name: count for name, count in read.items() if count is not None}


def _kv_bits(given: Given) -> dict[str, int]:
    """The bits of the cache, which mlx-vlm reads as a number with decimals.

    Raises:
        InputError: when they are no whole number: uniform quantisation takes no other.
    """
    text = str(given.get("kv_bits", "0")).removesuffix(".0")
    bits = count_of({"kv_bits": text}, "kv_bits", "--kv-bits")
    return {"kv_bits": bits} if bits else {}


def _generate(given: Given) -> Settings:
    model = given.get("model", _DEFAULT_MODEL)
    values: dict[str, Any] = {
        **_run(given, default_tokens=100),
        **present(given, "draft"),
        **_counts(given, "num_draft_tokens"),
    }
    return Settings({**values, "model": model, "prompt_tokens": "4096"}, (_PROMPT,))


def _see(given: Given) -> Settings:
    values = _run(given, default_tokens=2048)
    media = present(given, "image", "video")
    return Settings(
        {**values, **media, **_model(given), "runtime": "mlx-vlm", "prompt_tokens": "4096"},
        (_PROMPT,),
    )


def _run(given: Given, *, default_tokens: int) -> dict[str, Any]:
    """Settings of one run; --max-tokens as the program has it by default."""
    names = ("prefill_step", "max_kv_size", "kv_group_size", "quantized_kv_start")
    tokens = {"max_tokens": str(default_tokens)}
    return {
        **tokens,
        **_kv_bits(given),
        **_counts(given, *names),
        **present(given, "adapter", "max_tokens"),
    }


def _serve(given: Given) -> Settings:
    values = {
        **_model(given),
        **_kv_bits(given),
        **_counts(given, "kv_group_size", "quantized_kv_start"),
        **_counts(given, *(name for name in _SERVED.values() if name != "prompt_cache_bytes")),
        **present(given, "adapter", "max_tokens", "prompt_cache_bytes"),
        **_step(given),
    }
    return Settings(values, (_PROMPT,), "plan server")


def _serve_images(given: Given) -> Settings:
    values = {
        **_model(given),
        "max_tokens": "2048",
        **_counts(given, "max_num_seqs", "vision_cache_size"),
        **present(given, "adapter", "max_tokens"),
        **_step(given),
    }
    return Settings(values, (_PROMPT,), "plan server")


def _step(given: Given) -> dict[str, int]:
    """The prefill step, under the name that the plan of a server has for it."""
    step = _counts(given, "prefill_step")
    return {"prefill_step_size": step["prefill_step"]} if step else {}


def _model(given: Given) -> dict[str, str]:
    if "model" not in given:
        raise InputError("the line names no model: --model")
    return {"model": given["model"]}


PROGRAMS = (
    Program(
        name="mlx_lm.generate",
        modules=("mlx_lm.generate", "mlx_lm generate"),
        source="mlx-lm 0.32.2",
        taken={**_COMMON, **_DRAFTED, "--max-kv-size": "max_kv_size"},
        undescribed={
            "--quantize-activations": _ACTIVATIONS,
            "--prompt-cache-file": Undescribed("a cache from a file is not described"),
            "--image": Undescribed("mlx_lm takes no images: mlx_vlm.generate does"),
        },
        noted=_TEXTS,
        settings=_generate,
    ),
    Program(
        name="mlx_lm.server",
        source="mlx-lm 0.32.2",
        taken={**_COMMON, **_SERVED},
        undescribed={
            "--draft-model": _DRAFT,
            "--pipeline": Undescribed("several ranks are --ranks N --parallel pipeline of memfit"),
        },
        settings=_serve,
    ),
    Program(
        name="mlx_vlm.generate",
        source="mlx-vlm 0.7.10",
        taken={
            **_COMMON,
            "--max-kv-size": "max_kv_size",
            "--image": "image",
            "--video": "video",
        },
        undescribed={
            **_VISION,
            "--quantize-activations": _ACTIVATIONS,
            "--output-modality": Undescribed("only text is described", ("text",)),
            "--audio": Undescribed("audio is not described"),
            "--resize-shape": Undescribed("give the images with this size, as --image WxH"),
            "--block-length": Undescribed("diffusion models are not described"),
        },
        noted=_SEEN,
        settings=_see,
    ),
    Program(
        name="mlx_vlm.server",
        source="mlx-vlm 0.7.10",
        taken={
            "--model": "model",
            "--adapter-path": "adapter",
            "--max-tokens": "max_tokens",
            "--prefill-step-size": "prefill_step",
            "--max-num-seqs": "max_num_seqs",
            "--vision-cache-size": "vision_cache_size",
        },
        undescribed={
            **_VISION,
            **dict.fromkeys(
                (
                    *("--image-model", "--tts-model", "--stt-model", "--embedding-model"),
                    *("--decision-model", "--reranker-model"),
                ),
                _OTHER_MODEL,
            ),
            "--kv-bits": Undescribed("its server's quantised caches are not described"),
            "--max-kv-size": Undescribed("its server's rotating caches are not described"),
            "--min-pixels": Undescribed("give the images with their size, as --image WxH"),
            "--max-pixels": Undescribed("give the images with their size, as --image WxH"),
        },
        settings=_serve_images,
        needs_images=True,
    ),
)
