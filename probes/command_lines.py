"""mlx_lm's own programs told the recommended settings: lines to paste into a shell.

    recommended_workload(sizing, asked, recommendation) -> Workload | None
    command_lines(sizing, workload, model=..., prompt=...) -> tuple[str, ...]

Only flags that the programs have: mlx_lm/generate.py and mlx_lm/server.py, argument parsers.
"""

import shlex
from collections.abc import Iterator
from dataclasses import replace

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.results.estimate import Recommendation
from memfit.estimators.runtimes.budget import COMFORTABLE, judge
from memfit.estimators.sizing.sized_model import SizedModel

_SERVER_KEEPS = 10  # prompts whose caches mlx_lm.server keeps unless told (server.py)
_STDIN = "-"


def recommended_workload(
    sized: SizedModel, asked: Workload, recommendation: Recommendation
) -> Workload | None:
    """Return what was asked with the recommended settings, as many of them as fit together.

    None when it does not fit with any of them. ``sizing`` is by measurement.
    """
    bits, step = recommendation.kv_bits, recommendation.prefill_step or asked.prefill_step
    start = asked.quantized_kv_start if bits in (None, asked.kv_bits) else 0
    cached = replace(asked, kv_bits=bits, quantized_kv_start=start)
    candidates = (replace(cached, prefill_step=step), replace(asked, prefill_step=step), cached)
    return next((each for each in candidates if _fits(sized, each)), None)


def command_lines(
    sized: SizedModel,
    workload: Workload,
    *,
    model: str,
    prompt: str | None,
    prompt_file: str | None = None,
) -> tuple[str, ...]:
    """Return the lines of mlx_lm.generate and mlx_lm.server, quoted for a shell.

    Without a ``prompt`` it is read from ``prompt_file``, else from standard input; a line of no
    tokens to generate would be refused by mlx-lm. The server takes one request at a time, as was
    measured, and keeps the caches of as many prompts as there is room for; how many tokens to
    generate is each request's to say, and it cannot limit a cache's tokens, so with such a limit
    it has no line.
    """
    named = _option("--model", model)
    settings = [str(each) for each in _settings(workload)]
    generate = ["mlx_lm.generate", *named]
    if workload.max_tokens:
        generate += ["--max-tokens", str(workload.max_tokens)]
    generate += [*_option("--prompt", prompt or _STDIN), *settings]
    limit = workload.max_kv_size
    if limit is not None:
        generate += ["--max-kv-size", str(limit)]
    line = shlex.join(generate)
    if prompt is None and prompt_file is not None:
        line += f" < {shlex.quote(prompt_file)}"
    if limit is not None:
        return (line,)
    kept = ["--prompt-cache-size", str(_prompts_to_keep(sized, workload))]
    alone = ["--prompt-concurrency", "1", "--decode-concurrency", "1"]
    return (line, shlex.join(["mlx_lm.server", *named, *settings, *alone, *kept]))


def _settings(workload: Workload) -> Iterator[str | int]:
    yield from ("--prefill-step-size", workload.prefill_step)
    if workload.kv_bits:
        yield from ("--kv-bits", workload.kv_bits, "--kv-group-size", workload.kv_group_size)
        yield from ("--quantized-kv-start", workload.quantized_kv_start)


def _option(name: str, value: str) -> list[str]:
    """An option's words: a value like an option's name must be joined to its own."""
    return [f"{name}={value}"] if value.startswith("-") and value != _STDIN else [name, value]


def _prompts_to_keep(sized: SizedModel, workload: Workload) -> int:
    """How many prompts as long as this one can be remembered beside the one that runs."""
    device, figures = sized.device, sized.figures_for(workload)
    caches = figures.kv.nbytes + figures.ssm_bytes
    if device is None or not caches:
        return _SERVER_KEEPS
    share, whole = COMFORTABLE
    room = device.working_set_bytes * share // whole - sized.requirement(workload).peak_bytes
    return max(0, min(_SERVER_KEEPS, room // caches))


def _fits(sized: SizedModel, workload: Workload) -> bool:
    try:
        return judge(sized.requirement(workload), sized.device)[0] == "fits"
    except UnsupportedError:
        return False
