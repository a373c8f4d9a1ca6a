"""Settings that make a broken limit pass, each one tried."""

from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.quantization import AFFINE_BITS, Quantization, converted
from memfit.estimators.base.recipe import SHORTEST, Recipe
from memfit.estimators.base.workload import Workload
from memfit.estimators.results.gate import Remedy, RemedySetting
from memfit.estimators.sizing.search import (
    KV_BITS,
    PREFILL_STEPS,
    context_lengths,
    first_fitting,
    halves,
    with_kv_bits,
)

_UNQUANTISED_BITS = 16

# Which settings change which figure.
_ON_MEMORY: tuple[RemedySetting, ...] = ("context", "kv_bits", "prefill_step", "quantize")
_ON_TRAINING: tuple[RemedySetting, ...] = (
    "grad_checkpoint",
    "batch_size",
    "quantize",
    "num_layers",
    "max_seq_length",
)
# Where a value passes, all smaller ones do.
_MONOTONE = ("context", "batch_size", "num_layers", "max_seq_length")
SETTINGS: dict[str, tuple[RemedySetting, ...]] = {
    "peak": _ON_MEMORY,
    "wired_limit": _ON_MEMORY,
    "growth.peak": _ON_MEMORY,
    "load_peak": ("quantize",),
    "context": ("kv_bits", "prefill_step", "quantize"),
    "expert_capacity": ("quantize",),
    "growth.weights": ("quantize",),
    "growth.kv_per_token": ("kv_bits",),
    "training_peak": _ON_TRAINING,
    "growth.training_peak": _ON_TRAINING,
    "basis": (),
}


class Question(Struct, frozen=True):
    """A workload, the format of its weights, and how it is trained."""

    workload: Workload
    quantize: Quantization | None
    """What the model is converted to, None when it is taken as it is."""
    recipe: Recipe
    """All layers of the model are counted where it trains all."""


def remedies(
    limit: str, asked: Question, bits_per_weight: int, passes: Callable[[Question], bool]
) -> Iterator[Remedy]:
    """Yield the settings that make a broken limit pass; ``passes`` judges it at a question.

    ``bits_per_weight`` is what the weights have now, rounded up: only fewer are tried.
    """

    def largest(setting: RemedySetting) -> int | None:
        return first_fitting(
            _smaller(setting, asked, bits_per_weight),
            lambda value: passes(_changed(asked, setting, value)),
            monotone=setting in _MONOTONE,
        )

    for setting in SETTINGS[limit]:
        if (value := largest(setting)) is not None:
            yield Remedy(setting, value)


def _smaller(setting: RemedySetting, asked: Question, bits_per_weight: int) -> Sequence[int]:
    """The values of a setting that take less than what it is now, those that take most first."""
    now, recipe = asked.workload, asked.recipe
    match setting:
        case "context":
            return context_lengths(now.prompt_tokens - now.image_tokens - 1)
        case "kv_bits":
            return [bits for bits in KV_BITS if bits and bits < (now.kv_bits or _UNQUANTISED_BITS)]
        case "prefill_step":
            return [step for step in PREFILL_STEPS if step < now.prefill_step]
        case "quantize":
            return [bits for bits in reversed(AFFINE_BITS) if bits < bits_per_weight]
        case "grad_checkpoint":
            return [] if recipe.grad_checkpoint else [1]
        case "batch_size":
            return list(halves(recipe.batch_size, 1))
        case "num_layers":
            return list(halves(recipe.num_layers, 1))
        case "max_seq_length":
            return list(halves(recipe.max_seq_length, SHORTEST))


def _changed(asked: Question, setting: RemedySetting, value: int) -> Question:
    """The question with one setting changed.

    Raises:
        InputError: when no workload may have the value.
    """
    workload = asked.workload
    match setting:
        case "context":
            tokens = value + workload.image_tokens
            return replace(asked, workload=replace(workload, prompt_tokens=tokens))
        case "kv_bits":
            return replace(asked, workload=with_kv_bits(workload, value))
        case "prefill_step":
            return replace(asked, workload=replace(workload, prefill_step=value))
        case "quantize":
            return replace(asked, quantize=converted(value))
        case "batch_size":
            return replace(asked, recipe=asked.recipe.in_batches(value))
        case "grad_checkpoint":
            return replace(asked, recipe=replace(asked.recipe, grad_checkpoint=True))
        case "num_layers":
            return replace(asked, recipe=replace(asked.recipe, num_layers=value))
        case "max_seq_length":
            return replace(asked, recipe=replace(asked.recipe, max_seq_length=value))
