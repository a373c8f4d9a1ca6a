"""`memfit.tune`: run a model on this machine, and compare its memory with the estimate."""

import os
from functools import partial
from typing import TYPE_CHECKING

from memfit.estimators.base.progress import NULL_PROGRESS, Progress
from memfit.estimators.questions.target import model_reference
from memfit.settings import WorkloadSettings, with_keywords

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from memfit.probes.result import TuneResult


def tune(
    model: str | os.PathLike[str],
    *,
    prompt: str | None = None,
    memory_limit: int | None = None,
    margin: int = 0,
    timeout: float = 600.0,
    force: bool = False,
    download: bool = False,
    progress: Progress = NULL_PROGRESS,
    **settings: "Unpack[WorkloadSettings]",
) -> "TuneResult":
    """Return what a model takes on this machine, beside its estimate; needs `memfit[mlx]`.

    The model runs in a process of its own, with a prompt or ``prompt_tokens`` (2048). ``wired`` of
    the result has the figures of mlx-swift-lm's measurement, ``tickets()`` those to reserve.
    ``memory_limit`` and ``margin`` are bytes, ``timeout`` seconds without progress.

    Raises:
        InputError: when a setting is wrong, or a file of the model, or it is not downloaded.
        UnsupportedError: when mlx-lm cannot run the model or the workload.
        MachineError: when MLX is not installed, or there is too little memory.
    """
    from memfit.probes.download import local_model
    from memfit.probes.experiments.generate import TuneRequest, require_startable
    from memfit.probes.experiments.generate import tune as answer
    from memfit.probes.experiments.sweep import user_sweeps
    from memfit.probes.process import ModelProcess
    from memfit.settings import workload

    work = workload(None, {"prompt_tokens": 2048, "max_tokens": 32, **settings}).under(None)
    request = partial(
        TuneRequest,
        workload=work,
        prompt=prompt,
        memory_limit_bytes=memory_limit,
        margin_bytes=margin,
        force=force,
    )
    checkpoint, path = local_model(
        model_reference(model),
        before_download=(lambda found: require_startable(request(checkpoint=found, model=found.id)))
        if download
        else None,
        progress=progress,
    )
    start = partial(
        ModelProcess, path, memory_limit_bytes=memory_limit, timeout_seconds=float(timeout)
    )
    return answer(
        request(checkpoint=checkpoint, model=checkpoint.id),
        start=start,
        sweeps=user_sweeps(),
        progress=progress,
    )


with_keywords(tune, WorkloadSettings)
