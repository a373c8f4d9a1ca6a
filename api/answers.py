"""Questions about several models, a server, and the guard in front of one."""

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.progress import NULL_PROGRESS, Progress
from memfit.estimators.base.units import parse_size
from memfit.estimators.machine.device import Device
from memfit.model import OpenModel, open
from memfit.settings import (
    EstimateSettings,
    MachineSettings,
    OpenSettings,
    model_and_runtime,
    parts,
    place,
    with_keywords,
    workload,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from memfit.estimators.guard.guard import Guard
    from memfit.estimators.results.comparison import Comparison
    from memfit.estimators.results.fits import Fits
    from memfit.estimators.results.server import ServerPlan
    from memfit.estimators.sizing.sized_model import SizedModel


def fits(
    device: str | Device | None = None,
    *,
    context: str | int | None = None,
    use: Literal["chat", "agents", "images"] | None = None,
    min_context: int = 0,
    rows: int | None = 20,
    folders: Sequence[str | os.PathLike[str]] = (),
    progress: Progress = NULL_PROGRESS,
    **settings: "Unpack[MachineSettings]",
) -> "Fits":
    """Return the models that fit a machine: those on this one, and the built-in samples.

    ``rows`` of them are listed, None lists all; ``min_context`` is in tokens. ``settings`` are
    those of `memfit.settings.MachineSettings`.

    Raises:
        InputError: when no machine is named and this one has no GPU, or a setting is wrong.
    """
    from memfit.estimators.checkpoint.local.local_models import local_models
    from memfit.estimators.sizing.catalog import Catalog
    from memfit.estimators.sizing.fits import Selection
    from memfit.estimators.sizing.fits import fits as answer

    machine, _ = place(device, settings)
    if machine is None:
        raise InputError("name a machine: device='m4-max-64', or memory='32GB'")
    models = list(local_models([os.fspath(each) for each in folders]))
    selection = Selection(rows=rows, use=use, least_context=min_context)
    question = workload(context, {})
    return answer(Catalog(), models, machine, question, progress, None, selection)


def compare(
    *models: str | os.PathLike[str],
    device: str | Device | None = None,
    context: str | int | None = None,
    progress: Progress = NULL_PROGRESS,
    **settings: "Unpack[EstimateSettings]",
) -> "Comparison":
    """Return models side by side, each compared with the first.

    ``settings`` are those of `memfit.settings.EstimateSettings`. A model that cannot be sized says
    why in its place.

    Raises:
        InputError: for fewer than two models, or when a setting is wrong.
    """
    from memfit.estimators.compare.compare import ComparedModel
    from memfit.estimators.compare.compare import compare as answer
    from memfit.estimators.results.comparison import try_or_reason
    from memfit.estimators.sizing.catalog import Catalog
    from memfit.estimators.sizing.resolved import TargetQuestion

    if len(models) < 2:
        raise InputError("give two or more models to compare")
    of_open, of_machine, of_workload = parts(settings)
    machine, ranks = place(device, of_machine)
    first, runtime = model_and_runtime(models[0], of_open)
    catalog = Catalog(progress=progress, versioned=runtime.versioned)
    references = [os.fspath(each) for each in models]
    for each in references:
        try_or_reason(partial(catalog.checkpoint, each))
    base = TargetQuestion(
        workload=workload(context, of_workload),
        device=machine,
        quantize=first.quantization(),
        margin_bytes=runtime.margin,
        ranks=ranks,
        as_type=first.as_type,
        adapter=first.adapter,
    )
    rules = None if runtime.runtime is None else runtime.chosen()
    return answer(catalog, [ComparedModel(each, each) for each in references], base, runtime=rules)


def plan_server(
    model: str | os.PathLike[str] | OpenModel,
    *,
    device: str | Device | None = None,
    context: str | int | None = None,
    max_tokens: int = 512,
    clients: int | None = None,
    prefill_step_size: int = 2048,
    prompt_concurrency: int = 8,
    decode_concurrency: int = 32,
    prompt_cache_size: int = 10,
    **settings: "Unpack[OpenSettings]",
) -> "ServerPlan":
    """Return the most that mlx_lm.server takes with these flags, and flags that fit.

    Every request has up to ``context`` tokens and a reply of ``max_tokens``; ``clients`` are open
    at a time. ``settings`` are those of `memfit.settings.OpenSettings`.

    Raises:
        InputError: when a setting is wrong, or a file of the model.
        UnsupportedError: when mlx-lm cannot run the workload.
    """
    from memfit.estimators.base.workload import ServerSettings
    from memfit.estimators.plans.server.plan import plan_server as answer

    server = ServerSettings(
        prefill_step=prefill_step_size,
        prompt_concurrency=prompt_concurrency,
        decode_concurrency=decode_concurrency,
        prompt_cache_size=prompt_cache_size,
    )
    opened = model if isinstance(model, OpenModel) else open(model, **settings)
    target = opened.resolved(workload(context, {}), device)
    run = replace(target.workload, max_tokens=max_tokens)
    return answer(target.sized, run, server, clients=clients or 2 * server.rows)


def guard(
    model: str | os.PathLike[str] | OpenModel,
    limit: int | str | None = None,
    *,
    device: str | Device | None = None,
    prefill_step_size: int = 2048,
    prompt_concurrency: int = 8,
    decode_concurrency: int = 32,
    **settings: "Unpack[OpenSettings]",
) -> "Guard":
    """Return what decides which requests of a server start, wait or are refused.

    ``model`` is a model, or the path of a memory card (``.json``). ``limit`` is in bytes; by
    default it is the working set of the machine less the margin. Its methods are pure: `preflight`
    and `admit` for requests, `chunk` before a call, `store` for a finished cache. The types that
    they take are in `memfit.estimators.guard.state`.

    Raises:
        InputError: when a setting is wrong, a card was altered, or the limit is below the weights.
        UnsupportedError: for a model that the server does not batch.
    """
    from memfit.estimators.base.workload import ServerSettings
    from memfit.estimators.guard.opening import open_guard

    def size() -> "SizedModel":
        opened = model if isinstance(model, OpenModel) else open(model, **settings)
        return opened.resolved(workload(1, {}), device).sized

    limit_bytes = parse_size(limit) if isinstance(limit, str) else limit
    return open_guard(
        "" if isinstance(model, OpenModel) else os.fspath(model),
        size,
        ServerSettings(
            prefill_step=prefill_step_size,
            prompt_concurrency=prompt_concurrency,
            decode_concurrency=decode_concurrency,
        ),
        limit_bytes=limit_bytes,
        device=place(device, {})[0] if limit_bytes is None else None,
    )


with_keywords(fits, MachineSettings)
with_keywords(compare, EstimateSettings)
with_keywords(plan_server, OpenSettings)
with_keywords(guard, OpenSettings)
