"""What a model needs under many settings at once, for a page on which they are changed."""

from collections.abc import Iterator
from itertools import product
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from memfit.estimators.base.errors import InputError, UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.results.terms import Method, Verdict
from memfit.estimators.runtimes.runtime import judge
from memfit.estimators.runtimes.source import Interpolated
from memfit.estimators.sizing.advise import search_of
from memfit.estimators.sizing.grid import weights_label
from memfit.estimators.sizing.joint import JointSearch
from memfit.estimators.sizing.run_limits import run_limits, tightened
from memfit.estimators.sizing.search import KV_BITS, UNBOUNDED_CONTEXT, longest_prompt, with_kv_bits
from memfit.estimators.sizing.sized_model import SizedModel, refusal_of

_PROMPTS = (4096, 16384, 32768, 65536, 131072, 262144)
_BATCHES = (1, 4)
_STEPS = (2048, 512, 128)

Setting = Literal["weight_bits", "prompt_tokens", "batch", "kv_bits", "prefill_step"]


class ExploredPoint(Struct, frozen=True):
    """One combination of the settings; without bytes where the runtime cannot run it."""

    verdict: Verdict
    needed_bytes: int | None
    """The peak with the margin."""
    weights_bytes: int = 0
    cache_bytes: int = 0
    reason: str = ""


class Explored(Struct, frozen=True, kw_only=True):
    """All combinations of the values, the last setting changing fastest."""

    values: dict[Setting, tuple[int | None, ...]]
    requested: dict[Setting, int | None]
    weights: str
    """What the weights are where their bits are not changed."""
    points: tuple[ExploredPoint, ...]
    method: Method


def explore(sized: SizedModel, workload: Workload) -> Explored:
    """Return the points around a workload, at most 5 x 8 x 3 x 4 x 4, which is among them.

    There are none where each of them would be a trace.
    """
    search, view = search_of(sized, workload), sized.formula_view()
    values = _values(view, workload, search.weight_bits)
    is_tried = not (isinstance(view.runtime_model.source, Interpolated) or refusal_of(view))
    requested = _requests(workload, values) if is_tried else ()
    points = tuple(_point(search, *each) for each in requested)
    return Explored(
        values=values,
        requested={name: getattr(workload, name, None) for name in values},
        weights=weights_label(search),
        points=points,
        method=view.runtime_model.source.method,
    )


def _values(
    sized: SizedModel, workload: Workload, weight_bits: tuple[int, ...]
) -> dict[Setting, tuple[int | None, ...]]:
    most = longest_prompt(sized)
    prompts = {tokens for tokens in _PROMPTS if tokens <= most} | {workload.prompt_tokens}
    if most < UNBOUNDED_CONTEXT:
        prompts.add(most)
    bits = {*KV_BITS, workload.kv_bits}
    weights: dict[Setting, tuple[int | None, ...]] = {"weight_bits": (None, *weight_bits)}
    return (weights if weight_bits else {}) | {
        "prompt_tokens": tuple(sorted(prompts)),
        "batch": tuple(sorted({*_BATCHES, workload.batch})),
        "kv_bits": tuple(sorted(bits, key=lambda each: -(each or 99))),
        "prefill_step": tuple(sorted({*_STEPS, workload.prefill_step}, reverse=True)),
    }


def _requests(
    workload: Workload, values: dict[Setting, tuple[int | None, ...]]
) -> Iterator[tuple[int | None, Workload]]:
    """The bits of the weights, and the workload, of each combination."""
    for combination in product(*values.values()):
        settings = dict(zip(values, combination, strict=True))
        weight_bits = settings.pop("weight_bits", None)
        bits = settings.pop("kv_bits")
        base = workload if bits == workload.kv_bits else with_kv_bits(workload, bits)
        yield weight_bits, replace(base, **settings)


def _point(search: JointSearch, weight_bits: int | None, workload: Workload) -> ExploredPoint:
    try:
        sized = search.model(weight_bits).formula_view()
        need, figures = sized.requirement(workload), sized.figures_for(workload)
    except (InputError, UnsupportedError) as error:
        return ExploredPoint("unknown", None, reason=str(error))
    limits = run_limits(sized, workload)
    verdict = tightened(judge(need, sized.device)[0], limits)
    caches = figures.kv.nbytes + figures.ssm_bytes
    return ExploredPoint(verdict, need.peak_bytes, sized.resident_bytes, caches)
