"""Shell commands that run mlx-lm's programs with the recommended settings.

    recommended_workload(sized, requested, recommendation) -> Workload | None
    command_lines(sized, workload, model=..., prompt=...) -> tuple[str, ...]

Only flags that the programs have: the argument parsers of mlx_lm/generate.py and
mlx_lm/server.py.
"""

import shlex
from collections.abc import Iterator

from msgspec.structs import replace

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.results.estimate import Recommendation
from memfit.estimators.runtimes.budget import COMFORTABLE, judge
from memfit.estimators.sizing.sized_model import SizedModel

_SERVER_KEEPS = 10  # prompt caches that mlx_lm.server keeps by default (server.py)
_STDIN = "-"


def recommended_workload(
    sized: SizedModel, requested: Workload, recommendation: Recommendation
) -> Workload | None:
    """Return the requested workload with as many recommended settings as fit together.

    None when none of them fits. ``sized`` carries the measured peaks.
    """
    bits, step = recommendation.kv_bits, recommendation.prefill_step or requested.prefill_step
    start = requested.quantized_kv_start if bits in (None, requested.kv_bits) else 0
    cached = replace(requested, kv_bits=bits, quantized_kv_start=start)
    candidates = (replace(cached, prefill_step=step), replace(requested, prefill_step=step), cached)
    return next((each for each in candidates if _fits(sized, each)), None)


def command_lines(
    sized: SizedModel,
    workload: Workload,
    *,
    model: str,
    prompt: str | None,
    prompt_file: str | None = None,
) -> tuple[str, ...]:
    """Return the commands for mlx_lm.generate and mlx_lm.server, quoted for a shell.

    Without ``prompt`` the command reads ``prompt_file``, else standard input. ``--max-tokens`` is
    left out when it is 0, which mlx-lm rejects.

    The server handles one request at a time, as measured, and keeps as many prompt caches as fit.
    Each request sets its own number of tokens. The server has no ``--max-kv-size``, so with such a
    limit there is no command for it.
    """
    model_option = _option("--model", model)
    settings = [str(each) for each in _settings(workload)]
    generate = ["mlx_lm.generate", *model_option]
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
    caches = ["--prompt-cache-size", str(_prompts_to_keep(sized, workload))]
    one_request = ["--prompt-concurrency", "1", "--decode-concurrency", "1"]
    return (line, shlex.join(["mlx_lm.server", *model_option, *settings, *one_request, *caches]))


def _settings(workload: Workload) -> Iterator[str | int]:
    yield from ("--prefill-step-size", workload.prefill_step)
    if workload.kv_bits:
        yield from ("--kv-bits", workload.kv_bits, "--kv-group-size", workload.kv_group_size)
        yield from ("--quantized-kv-start", workload.quantized_kv_start)


def _option(name: str, value: str) -> list[str]:
    """The arguments of an option; a value that starts with a dash needs the form NAME=VALUE."""
    return [f"{name}={value}"] if value.startswith("-") and value != _STDIN else [name, value]


def _prompts_to_keep(sized: SizedModel, workload: Workload) -> int:
    """How many caches of prompts this long fit in addition to the running one."""
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
