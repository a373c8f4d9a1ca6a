"""The memory card of a model: what an evaluator in any language needs for its peak."""

from hashlib import sha256

from msgspec import Struct
from msgspec.json import encode
from msgspec.structs import replace

from memfit.estimators.base.units import Bytes, Count, Number, Positive, Tokens
from memfit.estimators.results.result import Result

Knot = tuple[Tokens, int]
"""Keys, and units of bytes; straight lines between knots, rounded up."""


class CardRow(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Chunks of a range of lengths."""

    tokens: Positive
    """The longest chunk that the row is of; the row before has the shorter ones."""
    scores: Count
    """Bytes for each token and key, where attention holds its scores."""
    first: tuple[Knot, ...]
    """Of the first chunk, which leaves a stored cache as it is."""
    later: tuple[Knot, ...]


class CardGpu(Struct, frozen=True, kw_only=True):
    """What of a GPU the figures depend on; the limits of a machine are not the card's."""

    backend: str
    gpu_class: str | None
    """Metal's: s for Pro and Max, g for a base chip, d for an Ultra."""
    has_matrix_units: bool


class CardCheck(Struct, frozen=True, kw_only=True):
    """How far the card is above memfit's own figures, on random questions."""

    questions: Positive
    below: Count
    """Of the questions that were not used for the pad, how many got less than memfit's figure."""
    pad_bytes: Bytes
    """Added everywhere, so that no question that was used got less."""
    excess_bytes: tuple[int, int, int]
    """Median, 95th percentile and most."""
    excess_percent: tuple[Number, Number, Number]
    error_percent: Count
    """How far memfit's own workspace may be off."""


class MemoryCard(Result, frozen=True, kw_only=True, tag="memfit.card/1"):
    """One sequence with a 16-bit cache under mlx-lm; docs/card.md says how it is evaluated."""

    model: str
    revision: str | None
    config_sha256: str
    weight_bits: Number
    runtime: str
    runtime_version: str
    mlx_version: str
    gpu: CardGpu
    max_tokens: Positive
    """Of a prompt with its cached tokens and its reply."""
    steps: tuple[Positive, ...]
    unit: Positive
    weights_bytes: Bytes
    load_bytes: Bytes
    """While the model is loaded."""
    state_bytes: Bytes
    """Of recurrent states."""
    caches: tuple[tuple[Tokens, Bytes], ...]
    """Tokens of a window, 0 for all, and bytes for a token."""
    view_bytes: Bytes
    """That states keep of each token of a chunk, as slices of it."""
    decode_view_bytes: Bytes
    """The same, in a decode step."""
    window_shares: tuple[Count, Count]
    """Of 1024 parts of what windows hold beyond their limits after the prompt, those that are in
    use in the decode step that takes the most: where no cache grew, and where one did."""
    logits_bytes: Bytes
    """Of the logits of a token; a batch keeps those of two steps for each row."""
    rows: tuple[CardRow, ...]
    decode: tuple[Knot, ...]
    """The last token, where there is room for it."""
    growing: tuple[Knot, ...]
    """The last token, where a cache grew for the reply."""
    check: CardCheck
    vectors: tuple[tuple[int, int, int, int, int], ...]
    """New tokens, cached tokens, prefill step, reply, and the peak in bytes."""

    sha256: str = ""
    """Of the JSON of everything else: a card that was altered is refused."""

    def digest(self) -> str:
        """Return what ``sha256`` must be."""
        return sha256(encode(replace(self, sha256=""))).hexdigest()

    def to_json(self) -> str:
        """Return it as JSON without spaces: a card is read by programs, and carried around."""
        return encode(self).decode()
