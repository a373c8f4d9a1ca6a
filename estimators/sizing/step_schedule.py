"""A falling schedule of prefill steps: large ones while the cache is small, smaller ones later.

mlx_lm's commands take one step for a whole prompt; a program that calls the model itself can change
it after each chunk, for which nothing but the cache is kept (mlx_lm/generate.py, generate_step).
"""

from collections.abc import Iterator
from itertools import pairwise

from msgspec.structs import replace

from memfit.estimators.arch.specs import Growth
from memfit.estimators.base.units import ceil_div, round_down
from memfit.estimators.base.workload import Workload
from memfit.estimators.mlx.kv_cache import buffer_counts, buffer_token_bytes
from memfit.estimators.results.advice import StepSchedule
from memfit.estimators.runtimes.facets import MlxLmPrograms
from memfit.estimators.runtimes.runtime import Need
from memfit.estimators.runtimes.source import Formula
from memfit.estimators.sizing.prefill_speed import first_tokens
from memfit.estimators.sizing.search import PREFILL_STEPS, longest_context
from memfit.estimators.sizing.sized_model import SizedModel


def step_schedule(sized: SizedModel, workload: Workload, most: int) -> StepSchedule | None:
    """Return the largest step for each part of the longest prompt that fits, up to ``most`` tokens.

    None where one step runs as long a prompt, where no device is known, and where the calls are not
    those of one prompt under mlx-lm by formula.

    Every call of the schedule is one of a run with its step alone, up to the same position, and
    fits as that does; what a window keeps of a larger chunk before is added to all of it.
    """
    runtime_model = sized.runtime_model
    is_one_prompt = workload.batch == 1 and not (workload.images or workload.cached_tokens)
    is_one_prompt = is_one_prompt and runtime_model.subject.rank is None and sized.draft is None
    is_described = runtime_model.facet(MlxLmPrograms) and isinstance(runtime_model.source, Formula)
    if sized.device is None or not (is_one_prompt and is_described):
        return None
    steps = [step for step in PREFILL_STEPS if step <= workload.prefill_step]
    reaches = tuple(_reaches(sized, workload, steps, most))
    if len(reaches) < 2:
        return None
    parts = tuple((end, step) for end, step, _ in reaches)
    context, last = parts[-1]
    return StepSchedule(
        steps=parts,
        context_tokens=context,
        context_with_first_step=reaches[0][2],
        needed_bytes=max(
            _need(sized, workload, step, min(tokens + 1, context)).peak_bytes
            for tokens, step in parts
        ),
        chunks=sum(ceil_div(end - start, step) for start, (end, step) in _spans(parts)),
        chunks_with_last_step=ceil_div(context, last),
        seconds=_seconds(sized, workload, parts),
        seconds_with_last_step=_seconds(sized, workload, ((context, last),)),
    )


def _reaches(
    sized: SizedModel, workload: Workload, steps: list[int], most: int
) -> Iterator[tuple[int, int, int]]:
    """Yield where each step ends that reaches further than the larger ones, the step, and the
    longest prompt with it alone."""
    reached = 0
    for step in steps:

        def needed(prompt: Workload, step: int = step) -> Need:
            return _need(sized, workload, step, prompt.prompt_tokens)

        longest = longest_context(sized, workload, most, requirement=needed) or 0
        is_last = longest == most or step == steps[-1]
        # The last chunk of a prompt lacks its last token: before another step a whole one must fit.
        end = longest if is_last else round_down(longest - 1, step)
        if end > reached:
            reached = end
            yield end, step, longest
        if longest == most:
            return


def _need(sized: SizedModel, workload: Workload, step: int, tokens: int) -> Need:
    """What a run with the step alone needs, after a window that larger chunks left longer."""
    run = replace(workload.prompt_only(tokens), prefill_step=step)
    need = sized.requirement(run)
    longer = max(0, workload.prefill_step - step)
    windows = (
        layers * buffer_token_bytes(sized.model, buffer, run, tokens)
        for buffer, layers in buffer_counts(sized.model, workload.max_kv_size).items()
        if buffer.growth in (Growth.ROTATING, Growth.CHUNKED)
    )
    return replace(need, peak_bytes=need.peak_bytes + longer * sum(windows))


def _spans(parts: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield each part with where it starts."""
    yield 0, parts[0]
    yield from ((before[0], part) for before, part in pairwise(parts))


def _seconds(
    sized: SizedModel, workload: Workload, parts: tuple[tuple[int, int], ...]
) -> float | None:
    """Return the seconds to the first token, None where they are not described."""
    total = 0.0
    for start, (end, step) in _spans(parts):
        run = replace(workload.prompt_only(end), prefill_step=step)
        found = first_tokens(sized, run, (start,) if start else ())
        if not found:
            return None
        # Both have the start of a run and its last token.
        total += found[0].seconds - (found[1].seconds if start else 0)
    return round(total, 1)
