"""Settings that make a broken limit pass, each one tried."""

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.dtypes import AFFINE_BITS, Quantization, converted
from memfit.estimators.base.units import Positive, one_of
from memfit.estimators.base.workload import SHORTEST, Recipe, Workload
from memfit.estimators.sizing.search import (
    KV_BITS,
    PREFILL_STEPS,
    context_lengths,
    first_fitting,
    halves,
    with_kv_bits,
)

_UNQUANTISED_BITS = 16


class Candidate(Struct, frozen=True):
    """What a remedy changes: a workload, the format of the weights, and how they are trained."""

    workload: Workload
    quantize: Quantization | None
    """What the model is converted to, None when it is taken as it is."""
    recipe: Recipe
    """All layers of the model are counted where it trains all."""
    weight_bits: int
    """The bits of a weight as the model is, rounded up: only fewer are tried."""


class Setting(Struct, frozen=True, kw_only=True):
    """A setting that takes less memory with other values."""

    tried: str
    """What a report calls smaller values."""
    text: str
    """What it calls one value."""
    smaller: Callable[[Candidate], Sequence[int]]
    """The values that take less than the candidate's, those that take most first."""
    changed: Callable[[Candidate, int], Candidate]
    """The candidate with a value; InputError where no workload may have it."""
    is_monotone: bool = False
    """Whether all smaller values pass where one does."""


def _workload(name: str) -> Callable[[Candidate, int], Candidate]:
    return lambda now, value: replace(now, workload=replace(now.workload, **{name: value}))


def _recipe(name: str, tried: str, *, least: int = 1) -> Setting:
    """A number of a recipe, which is halved."""
    return Setting(
        tried=tried,
        text=f"{name} {{}}",
        smaller=lambda now: list(halves(getattr(now.recipe, name), least)),
        changed=lambda now, value: replace(now, recipe=replace(now.recipe, **{name: value})),
        is_monotone=True,
    )


SETTINGS = {
    "context": Setting(
        tried="shorter prompts",
        text="prompts of at most {} tokens",
        smaller=lambda now: context_lengths(
            now.workload.prompt_tokens - now.workload.image_tokens - 1
        ),
        changed=lambda now, value: _workload("prompt_tokens")(
            now, value + now.workload.image_tokens
        ),
        is_monotone=True,
    ),
    "kv_bits": Setting(
        tried="KV bits",
        text="kv_bits {} from the first token on",
        smaller=lambda now: [
            bits for bits in KV_BITS if bits and bits < (now.workload.kv_bits or _UNQUANTISED_BITS)
        ],
        changed=lambda now, value: replace(now, workload=with_kv_bits(now.workload, value)),
    ),
    "prefill_step": Setting(
        tried="a smaller prefill step",
        text="prefill_step {}",
        smaller=lambda now: [step for step in PREFILL_STEPS if step < now.workload.prefill_step],
        changed=_workload("prefill_step"),
    ),
    "batch": Setting(
        tried="fewer sequences",
        text="batch {}",
        smaller=lambda now: list(halves(now.workload.batch, 1)),
        changed=_workload("batch"),
    ),
    "quantize": Setting(
        tried="fewer bits of the weights",
        text="weights of {} bits",
        smaller=lambda now: [bits for bits in reversed(AFFINE_BITS) if bits < now.weight_bits],
        changed=lambda now, value: replace(now, quantize=converted(value)),
    ),
    "grad_checkpoint": Setting(
        tried="checkpointing",
        text="grad_checkpoint",
        smaller=lambda now: [] if now.recipe.grad_checkpoint else [1],
        changed=lambda now, _: replace(now, recipe=replace(now.recipe, grad_checkpoint=True)),
    ),
    "batch_size": Setting(
        tried="smaller batches",
        text="batch_size {} and more accumulated steps",
        smaller=lambda now: list(halves(now.recipe.batch_size, 1)),
        changed=lambda now, value: replace(now, recipe=now.recipe.in_batches(value)),
        is_monotone=True,
    ),
    "num_layers": _recipe("num_layers", "fewer layers"),
    "max_seq_length": _recipe("max_seq_length", "shorter sequences", least=SHORTEST),
}


class Remedy(Struct, frozen=True):
    """One setting that alone makes a limit pass."""

    setting: Annotated[str, one_of(*SETTINGS)]
    value: Positive
    """The largest that passes: of ``context`` a multiple of 256 tokens, of ``kv_bits`` from the
    first token on, of ``batch`` and a recipe's numbers one of their halves; 1 turns
    ``grad_checkpoint`` on."""


def remedies(
    settings: Sequence[str], now: Candidate, passes: Callable[[Candidate], bool]
) -> Iterator[Remedy]:
    """Yield the settings that alone make a broken limit pass, as ``passes`` judges candidates."""
    for name in settings:
        setting = SETTINGS[name]

        def is_enough(value: int, setting: Setting = setting) -> bool:
            return passes(setting.changed(now, value))

        value = first_fitting(setting.smaller(now), is_enough, monotone=setting.is_monotone)
        if value is not None:
            yield Remedy(name, value)
