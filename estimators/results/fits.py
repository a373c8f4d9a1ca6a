"""The models that fit a machine, as data: renderers show it and compute nothing."""

from typing import Literal

from msgspec import Struct

from memfit.estimators.base.units import Bytes, Count, Positive, Tokens
from memfit.estimators.results.advice import FirstToken, ImageAdvice
from memfit.estimators.results.comparison import Unavailable
from memfit.estimators.results.estimate import (
    DecodeSpeed,
    DeviceSummary,
    ModelSummary,
    Note,
    RuntimeSummary,
)
from memfit.estimators.results.result import Result
from memfit.estimators.results.terms import LimitName, Verdict

Store = Literal["sample", "index", "hub", "lm-studio", "ollama", "folder"]
Sort = Literal["size", "context", "speed"]
Use = Literal["chat", "agents", "images"]


class Fit(Struct, frozen=True, kw_only=True):
    """One model with the most weight bits that fit, as an estimate with these settings says."""

    name: str
    store: Store
    reference: str
    """What opens it: a path, or a name in Ollama's store."""
    model: ModelSummary
    runtime: RuntimeSummary
    weights: str
    """What the weights are: their bits, or as they are."""
    weight_bits: Positive | None
    """What mlx_lm.convert has to make of the weights; None: they stay as they are."""
    prefill_step: Positive
    verdict: Verdict
    """On the machine asked for."""
    exceeded: tuple[LimitName, ...]
    peak_bytes: Bytes
    peak_range_bytes: tuple[Bytes, Bytes]
    needed_bytes: Bytes
    """The peak with the margin, which the verdict is about."""
    weights_bytes: Bytes
    """Of the weights in memory."""
    context_tokens: Tokens
    """The longest prompt that fits with these weights; 0 when none does.

    Weights of more bits are taken only where they leave room for the same prompt.
    """
    context_step: Positive
    """The largest prefill step it fits with."""
    context_verdict: Verdict
    """Of that prompt: tight where something else than its bytes may end it."""
    images: ImageAdvice | None = None
    """How large images may be, and how many fit, with these weights and this prefill step."""
    decode_speed: DecodeSpeed | None
    """None: the memory bandwidth of the machine is not known."""
    first_token: FirstToken | None = None
    """Of the prompt; None: the chip is not known, or what it computes is not described."""
    smallest_memory_bytes: Bytes | None
    """Of the smallest Mac that fits, with the settings of this row; None: it fits this machine,
    no Mac is large enough, or the machine is no Mac."""
    warnings: tuple[Note, ...]


class NotSized(Struct, frozen=True):
    """A model without figures."""

    name: str
    store: Store
    reference: str
    why: Unavailable


class Fits(Result, frozen=True, kw_only=True, tag="memfit.fits/1"):
    """The answer of ``memfit fits``."""

    device: DeviceSummary
    prompt_tokens: Tokens
    max_tokens: Tokens
    margin_bytes: Bytes
    fitting: Count
    """How many models of this list fit, tightly or not."""
    left_out: Count = 0
    """Models that are not in this list: fewer are asked for, or they were not looked at."""
    least_context: Tokens = 0
    """Models with room for less than this are not in this list."""
    without_room: Count = 0
    """Models that fit, but with room for less than that: they are in no list."""
    models: tuple[Fit, ...]
    """What fits, then what fits tightly, the largest first; then the rest, by the smallest Mac."""
    not_sized: tuple[NotSized, ...]
    without_images: tuple[str, ...] = ()
    """Names of models that take no images, where the prompt has some: they are not counted."""
    of_other_adapters: tuple[str, ...] = ()
    """Names of models that the adapter was not trained on: they are not counted."""
