"""Options of the workload: tokens, batch, and the KV cache."""

import re
from decimal import Decimal
from typing import Annotated, Any, ClassVar

from msgspec import UNSET

from memfit.cli.options.groups import Option, OptionGroup, parsed
from memfit.estimators.base.errors import InputError
from memfit.estimators.base.images import Images
from memfit.estimators.base.units import MAX_COUNT, ceil_div, parse_count
from memfit.estimators.base.workload import Workload
from memfit.estimators.sizing.workload import RUNTIME_DEFAULTS, PartialWorkload

CacheBudget = Annotated[
    str | None,
    Option(
        metavar="SIZE",
        help="Memory for them; by default 90 % of the working set minus the active peak.",
    ),
]
DEFAULT_CONTEXT = 4096
CONTEXT = ("context", "ctx_size", "max_model_len")
"""The options that set the context, by the names of three programs."""
BATCH = ("batch", "prefill_batch", "decode_batch")
"""The options of several sequences."""
IMAGES = ("image", "video")
"""The options of what a prompt has in addition to text."""
_MODEL_LEN = r"([0-9]{1,12})([kKmM]?)|([0-9]{1,12}\.[0-9]{1,6})([km])"
_MODEL_LEN_UNITS = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}


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


def _model_len(text: str) -> int:
    """Tokens as vLLM reads them (engine/arg_utils.py, human_readable_int): k is 1000, K is 1024."""
    match = re.fullmatch(_MODEL_LEN, text.strip())
    if match is None:
        raise InputError(f"{text[:40]!r} is no number of tokens; write 32768, 32K or --context 32k")
    number, unit = match[1] or match[3], match[2] or match[4] or ""
    tokens = Decimal(number) * _MODEL_LEN_UNITS[unit]
    if tokens != int(tokens) or tokens > MAX_COUNT:
        raise InputError(f"{text[:40]!r} is no whole number of tokens up to {MAX_COUNT}")
    return int(tokens)


class WorkloadOptions(OptionGroup, frozen=True, kw_only=True):
    """What a model is asked to do."""

    panel = "Workload options"
    pasted: ClassVar[tuple[str, ...]] = ("ctx_size", "max_model_len")
    context: Annotated[
        str | None, Option(help="Prompt tokens, with no generation, such as 32k.")
    ] = None
    ctx_size: Annotated[
        str | None,
        Option(
            "--ctx-size", "-c", help="The same as llama.cpp takes it: for all sequences together."
        ),
    ] = None
    max_model_len: Annotated[
        str | None,
        Option("--max-model-len", help="The same as vLLM takes it: 32k is 32000 tokens."),
    ] = None
    prompt_tokens: Annotated[str | None, Option(help="Tokens in the prompt.")] = None
    max_tokens: Annotated[str | None, Option(help="Tokens to generate.")] = None
    batch: Annotated[
        int, Option(*("--batch", "-np", "--max-num-seqs"), help="Sequences that run together.")
    ] = 1
    prefill_batch: Annotated[
        int,
        Option(
            *("--prefill-batch", "--prompt-concurrency"),
            help="Sequences of a batch that mlx-lm prefills together.",
        ),
    ] = 8
    decode_batch: Annotated[
        int,
        Option(
            *("--decode-batch", "--decode-concurrency"),
            help="Sequences of a batch that mlx-lm decodes together.",
        ),
    ] = 32
    prefill_step: Annotated[
        int | None,
        Option(
            *("--prefill-step", "--prefill-step-size", "-ub", "--ubatch-size"),
            "--max-num-batched-tokens",
            help="Tokens computed at once: a chunk of mlx-lm, a micro-batch of llama.cpp.",
        ),
    ] = None
    kv_bits: Annotated[
        int | None,
        Option(parser=_kv_bits, metavar="BITS|none", help="Bits of a quantised KV cache."),
    ] = None
    kv_group_size: Annotated[int | None, Option(help="Group size of a quantised KV cache.")] = None
    quantized_kv_start: Annotated[
        int | None, Option(help="Tokens in the KV cache before it is quantised.")
    ] = None
    max_kv_size: Annotated[
        int | None, Option(help="Size of a rotating KV cache, if the model supports one.")
    ] = None
    image: Annotated[
        list[str] | None,
        Option(
            metavar="WxH[xN]|FILE",
            help="An image in the prompt, such as 1024x768, three of them 1024x768x3, or a file;"
            " can be repeated. Its tokens come on top of the context.",
        ),
    ] = None
    video: Annotated[
        list[str] | None,
        Option(
            metavar="FxWxH|FILE|DIR",
            help="A video as FRAMESxWIDTHxHEIGHT, such as 16x448x448, a file, or a folder of its"
            " frames.",
        ),
    ] = None

    def partial(self) -> PartialWorkload:
        """Return the workload; settings that are not given follow the runtime.

        Raises:
            InputError: when a value cannot be read or is out of range, or options exclude each
                other.
        """
        prompt, generated = self.tokens()
        given = {
            name: value for name in RUNTIME_DEFAULTS if (value := getattr(self, name)) is not None
        }
        values: dict[str, Any] = {**given, "kv_bits": self.kv_bits or None}  # 0: none anywhere
        workload = Workload(
            prompt_tokens=prompt,
            max_tokens=generated,
            batch=self.batch,
            prefill_batch=self.prefill_batch,
            decode_batch=self.decode_batch,
            max_kv_size=self.max_kv_size,
            images=self.images() or UNSET,
            **values,
        )
        return PartialWorkload(workload, frozenset(given))

    def images(self) -> Images | None:
        """Return the images and videos of the prompt, None where there are none.

        Raises:
            InputError: as `read_image` and `read_video`, or when there are too many.
        """
        if not self.image and not self.video:
            return None
        from memfit.estimators.images.sizes import read_image, read_video

        images = [parsed("--image", read_image, text) for text in self.image or ()]
        videos = [parsed("--video", read_video, text) for text in self.video or ()]
        return Images(tuple(filter(None, images)), tuple(filter(None, videos)))

    def tokens(self) -> tuple[int, int]:
        """Return the tokens of the prompt and of the generation.

        Raises:
            InputError: when a value cannot be read, or options exclude each other.
        """
        option, whole = self._whole()
        prompt = parsed("--prompt-tokens", parse_count, self.prompt_tokens)
        generated = parsed("--max-tokens", parse_count, self.max_tokens)
        if whole is not None and (prompt is not None or generated is not None):
            raise InputError(f"{option} excludes --prompt-tokens and --max-tokens: use those two")
        if whole is None:
            whole = DEFAULT_CONTEXT
        return (whole if prompt is None else prompt), generated or 0

    def _whole(self) -> tuple[str, int | None]:
        """The option that sets the context, and its tokens."""
        values = {
            "--context": parsed("--context", parse_count, self.context),
            "--ctx-size": parsed("--ctx-size", self._of_each, self.ctx_size),
            "--max-model-len": parsed("--max-model-len", _model_len, self.max_model_len),
        }
        given = [(option, value) for option, value in values.items() if value is not None]
        if len(given) > 1:
            raise InputError(f"{given[0][0]} and {given[1][0]} both set the context: give one")
        return given[0] if given else ("--context", None)

    def _of_each(self, text: str) -> int:
        """The part of each sequence, as without a unified cache (llama-context.cpp, n_ctx_seq)."""
        tokens = parse_count(text)
        if not tokens:
            raise InputError("0 is the model's own limit; write its tokens, such as 40960")
        return ceil_div(tokens, max(1, self.batch))
