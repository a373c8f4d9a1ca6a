"""Shell commands that run mlx-lm's programs with the recommended settings.

    recommended_workload(sized, requested, recommendation) -> Workload | None
    command_lines(sized, workload, model=..., prompt=...) -> tuple[str, ...]

Only flags that the programs have: the argument parsers of mlx_lm/generate.py and
mlx_lm/server.py.
"""

import shlex

from msgspec.structs import replace

from memfit.estimators.base.errors import UnsupportedError
from memfit.estimators.base.workload import Workload
from memfit.estimators.results.advice import Recommendation
from memfit.estimators.runtimes.budget import judge
from memfit.estimators.runtimes.mlx_lm_commands import STDIN, generate_command, server_command
from memfit.estimators.sizing.search import with_kv_bits
from memfit.estimators.sizing.serving import server_flags
from memfit.estimators.sizing.sized_model import SizedModel


def recommended_workload(
    sized: SizedModel, requested: Workload, recommendation: Recommendation
) -> Workload | None:
    """Return the requested workload with as many recommended settings as fit together.

    None when none of them fits. ``sized`` carries the measured peaks.
    """
    bits, step = recommendation.kv_bits, recommendation.prefill_step.value
    step = step or requested.prefill_step
    cached = with_kv_bits(requested, bits.value) if bits.state == "change" else requested
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

    Without ``prompt`` the command reads ``prompt_file``, else standard input.

    The server handles one request at a time, as measured; there is no command for it where no flags
    of it fit in every order of requests. Each request sets its own number of tokens.
    """
    line = generate_command(model, workload, prompt or STDIN)
    if prompt is None and prompt_file is not None:
        line += f" < {shlex.quote(prompt_file)}"
    flags = server_flags(sized, workload)
    return (line, server_command(model, workload, flags)) if flags else (line,)


def _fits(sized: SizedModel, workload: Workload) -> bool:
    try:
        return judge(sized.requirement(workload), sized.device)[0] == "fits"
    except UnsupportedError:
        return False
