"""Which models fit a machine at once, as data: renderers show it and compute nothing."""

from msgspec import Struct

from memfit.estimators.base.units import Bytes, Count, Positive
from memfit.estimators.results.estimate import DeviceSummary, Limit, Note
from memfit.estimators.results.result import Result
from memfit.estimators.results.terms import Verdict


class ServedModel(Struct, frozen=True, kw_only=True):
    """A model in a server process of its own."""

    name: str
    runtime: str
    weights_bytes: Bytes
    peak_bytes: Bytes
    """Most bytes in use, whatever the order of its requests."""
    held_bytes: Bytes | None
    """Most bytes that its process holds, with freed ones that it keeps; null where not known."""
    needed_bytes: Bytes
    """What the others leave to it: what it holds or, where that is not known, its peak, with the
    margin."""
    fits_alone: bool
    limits: tuple[Limit, ...]
    """What else ends its run, or may."""
    commands: tuple[str, ...]
    """To paste into a shell: what the figures are of."""


class Unloading(Struct, frozen=True):
    """What makes room for another model, with the fewest bytes to load again."""

    to_load: str
    unload: tuple[str, ...]


class ModelSet(Struct, frozen=True, kw_only=True):
    """Models that fit at once; with any other it would not fit."""

    models: tuple[str, ...]
    needed_bytes: Bytes
    free_bytes: Bytes
    verdict: Verdict
    longest_prompt: Count
    """Tokens of a prompt for each of them, all at once, that still fit."""
    swaps: tuple[Unloading, ...]
    """For each other model that fits alone."""


class TogetherPlan(Result, frozen=True, kw_only=True, tag="memfit.plan-together/1"):
    """The result of ``memfit plan together``."""

    device: DeviceSummary
    prompt_tokens: Count
    max_tokens: Count
    models: tuple[ServedModel, ...]
    sets: tuple[ModelSet, ...]
    """Those with most models first."""
    verdict: Verdict
    """Of all models at once."""
    needed_bytes: Positive
    matrix: str
    """A routing section of llama-swap with these sets, YAML."""
    notes: tuple[Note, ...] = ()
