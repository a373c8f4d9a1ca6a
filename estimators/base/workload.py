"""What runs: the workload of a model, the flags of its server, the recipe of its training."""

from collections.abc import Iterator
from math import isfinite
from typing import Annotated, Literal, get_args

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.images import Images
from memfit.estimators.base.units import Bytes, Positive, Tokens, ceil_div, one_of

MAX_TOKENS = 2**30
KV_BITS = (2, 3, 4, 5, 6, 8)
KV_GROUP_SIZES = (32, 64, 128)
KvBits = Annotated[int, one_of(*KV_BITS)]
KvGroupSize = Annotated[int, one_of(*KV_GROUP_SIZES)]
CallPhase = Literal[
    "first_chunk",
    "converting",  # mlx-lm quantises the caches after it
    "full_chunk",  # the last whole chunk before a shorter one
    "growing_chunk",  # the last whole chunk for which a buffer is allocated again
    "last_chunk",
    "last_token",  # of the prompt
    "last_tokens",  # the last chunk of older mlx-lm, from which the first token is sampled
    "growing",  # the last single token for which a buffer may be allocated again
    "decode",  # the last generated token
]
ALL_PHASES: frozenset[CallPhase] = frozenset(get_args(CallPhase))


class Workload(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One generation as mlx-lm runs it; all counts are tokens or sequences.

    Raises:
        InputError: when a count is out of range.
    """

    prompt_tokens: Positive
    max_tokens: Tokens = 0
    batch: Positive = 1
    prefill_batch: Positive = 8
    """Sequences that mlx-lm prefills together (mlx_lm/generate.py, BatchGenerator)."""
    decode_batch: Positive = 32
    """Sequences that mlx-lm decodes together, at least those that it prefills together."""
    prefill_step: Positive = 2048
    kv_bits: KvBits | None = None
    kv_group_size: KvGroupSize = 64
    quantized_kv_start: Tokens = 5000
    max_kv_size: Positive | None = None
    cached_tokens: Tokens = 0
    """Tokens at the start of each prompt whose caches are stored, and stay beside the run's own."""
    images: Images | UnsetType = UNSET
    """The images of each sequence; ``prompt_tokens`` includes their tokens."""

    def __post_init__(self) -> None:
        _require("prompt tokens", self.prompt_tokens, 1)
        _require("max tokens", self.max_tokens, 0)
        _require("batch", self.batch, 1)
        _require("prefill batch", self.prefill_batch, 1)
        _require("decode batch", self.decode_batch, 1)
        _require("prefill step", self.prefill_step, 1)
        _require("quantized KV start", self.quantized_kv_start, 0)
        _require("cached tokens", self.cached_tokens, 0)
        if self.cached_tokens >= self.prompt_tokens:
            raise InputError(
                f"cached tokens {self.cached_tokens}: must be fewer than the"
                f" {self.prompt_tokens} tokens of the prompt, which include them"
            )
        if self.max_kv_size is not None:
            # RotatingKVCache keeps the first 4 tokens and needs room for one more.
            _require("max KV size", self.max_kv_size, 5)
        if self.kv_bits is not None and self.kv_bits not in KV_BITS:
            raise InputError(f"KV bits {self.kv_bits}: MLX quantises to {_one_of(KV_BITS)} bits")
        if self.kv_group_size not in KV_GROUP_SIZES:
            raise InputError(
                f"KV group size {self.kv_group_size}: MLX has groups of {_one_of(KV_GROUP_SIZES)}"
            )

    @property
    def total_tokens(self) -> int:
        """Tokens in the cache when the workload ends."""
        return self.prompt_tokens + self.max_tokens

    @property
    def most_decoding(self) -> int:
        """The most sequences of the batch that mlx-lm decodes together."""
        return min(self.batch, max(self.prefill_batch, self.decode_batch))

    def prompt_only(self, tokens: int) -> "Workload":
        """Return the workload of a prompt of ``tokens`` with nothing generated.

        A prompt has at least its images or its cached tokens, and another token.
        """
        return replace(self, prompt_tokens=max(tokens, self.least_prompt_tokens), max_tokens=0)

    @property
    def image_tokens(self) -> int:
        """Tokens of the prompt that are of its images."""
        return self.images.tokens if self.images else 0

    @property
    def least_prompt_tokens(self) -> int:
        """Tokens of the shortest prompt with the images and the cached tokens."""
        return max(self.image_tokens, self.cached_tokens) + 1

    def prefill_chunks(self) -> Iterator[int]:
        """Yield the tokens of each prefill chunk: what is not cached, but the last token.

        Source: mlx-lm generate.py, generate_step.

        >>> list(Workload(prompt_tokens=5000).prefill_chunks())
        [2048, 2048, 903]
        """
        full, rest = divmod(self.prompt_tokens - 1 - self.cached_tokens, self.prefill_step)
        for _ in range(full):
            yield self.prefill_step
        if rest:
            yield rest


def _require(name: str, value: int, least: int) -> None:
    if not least <= value <= MAX_TOKENS:
        raise InputError(f"{name} {value}: must be from {least} to {MAX_TOKENS}")


def _one_of(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values[:-1])) + f" or {values[-1]}"


class ServerSettings(Struct, frozen=True, kw_only=True):
    """The flags of a server that matter for memory, with its defaults.

    mlx_vlm.server has the prefill step and the last two; it prefills 8 prompts together, decodes 32
    requests, and keeps no prompt caches.
    """

    prefill_step: int = 2048
    prompt_concurrency: int = 8
    decode_concurrency: int = 32
    prompt_cache_size: int = 10
    prompt_cache_bytes: Bytes | None = None
    max_num_seqs: int | None = None
    """Requests that mlx_vlm.server takes out of its queue; None: all."""
    vision_cache_size: int = 20
    """Requests for which mlx_vlm.server keeps features of images, where the model's class does."""

    @property
    def rows(self) -> int:
        """The most requests that run together (BatchGenerator, completion_batch_size)."""
        return max(self.prompt_concurrency, self.decode_concurrency)


FineTuneType = Literal["lora", "dora", "full"]
ADAPTER = ("rank", "scale", "dropout", "keys")
"""What mlx_lm.lora reads from its file alone, under ``lora_parameters``."""
OptimizerName = Literal["adam", "adamw", "muon", "sgd", "adafactor"]
# mlx_lm/tuner/trainer.py, iterate_batches: batches are padded to one more than a multiple of it.
PAD_TO = 32
SHORTEST = 128
"""Tokens of the shortest sequences that are searched and recommended."""
_MOST = 2**20  # of a setting; a run with more fits no machine


class Recipe(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one run, with the defaults of mlx_lm/lora.py.

    Raises:
        InputError: when a count is out of range.
    """

    fine_tune_type: FineTuneType = "lora"
    optimizer: OptimizerName = "adam"
    num_layers: int = 16
    """From the last one; not above 0 means all."""
    batch_size: Positive = 4
    max_seq_length: Positive = 2048
    grad_checkpoint: bool = False
    grad_accumulation_steps: Positive = 1
    mask_prompt: bool = False
    rank: Positive = 8
    scale: float = 20.0
    dropout: float = 0.0
    keys: tuple[str, ...] | None = None
    """Modules that get an adapter; None is every linear layer of the trained layers."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_seq_length", "grad_accumulation_steps", "rank"):
            if not 1 <= getattr(self, name) <= _MOST:
                raise InputError(f"{name} {getattr(self, name)}: must be from 1 to {_MOST}")
        if self.max_seq_length < 2:
            raise InputError("max_seq_length 1: the trainer predicts the second token at least")
        if not isfinite(self.scale):
            raise InputError(f"scale {self.scale}: must be a finite number")
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout {self.dropout}: must be from 0 to below 1")

    def in_batches(self, size: int) -> "Recipe":
        """Return it with smaller batches, and as many more of them for each update.

        >>> Recipe(batch_size=4).in_batches(1).grad_accumulation_steps
        4
        """
        steps = self.grad_accumulation_steps * ceil_div(self.batch_size, size)
        return replace(self, batch_size=size, grad_accumulation_steps=steps)

    def padded(self, longest: int) -> int:
        """Return the tokens of a batch with a sequence of ``longest`` tokens.

        >>> Recipe().padded(100), Recipe().padded(5000)
        (129, 2048)
        """
        return min(1 + PAD_TO * ceil_div(longest, PAD_TO), self.max_seq_length)
