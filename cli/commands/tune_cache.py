"""``memfit tune cache``: store the cache of a prompt on the disk, and restore it."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from memfit.cli.commands.plan.subject import CACHE_BUDGET
from memfit.cli.measuring import measuring
from memfit.cli.options.groups import Only, OptionGroup, PlanOutput, grouped, option
from memfit.cli.options.questions import RuntimeOptions
from memfit.cli.options.run import RunOptions, tokens_to_compare
from memfit.cli.render.output import require_writable
from memfit.estimators.base.units import parse_counts, parse_size

if TYPE_CHECKING:
    from memfit.probes.prompt_caches.request import CacheRequest


class CacheOptions(OptionGroup, frozen=True, kw_only=True):
    """What is stored."""

    prompt_tokens: tuple[int, ...] = option(
        metavar="N,N...",
        help="Lengths of the prompts, such as 2048,8192.",
        default=...,
        read=parse_counts,
    )
    stored_bits: tuple[int, ...] = option(
        metavar="N,N...",
        help="Bits of the stored keys and values; 16 is all.",
        default=(16, 8, 4),
        read=parse_counts,
    )
    dir: Path | None = option(
        metavar="DIR",
        help="Keep the files here, and restore those that are there; created if needed.",
    )
    max_tokens: int = option(
        help="Tokens to generate and compare.", default=32, read=tokens_to_compare
    )
    prefill_step: int = option(min=1, help="Tokens in a prefill chunk.", default=2048)
    agreement: int = option(
        metavar="PERCENT", min=0, max=100, help="The least of equal tokens.", default=95
    )


class ServingOptions(OptionGroup, frozen=True, kw_only=True):
    """The conversations that share the memory and the disk."""

    requests: Path | None = option(
        metavar="FILE",
        help="Serve this CSV or JSONL of agent, prompt_tokens and completion_tokens, and"
        " compare with memfit plan offload.",
    )
    conversations: int | None = option(
        help="Number of conversations; with --requests those that begin first."
    )
    eviction: Literal["reactive", "proactive", "hybrid"] = option(
        help="With --requests: when a conversation leaves memory: for another, at once, or at once"
        " above the hot threshold.",
        default="reactive",
    )
    cache_budget: int | None = CACHE_BUDGET
    disk: int | None = option(
        metavar="SIZE", help="Disk space for them; by default all.", read=parse_size
    )

    def fields(self) -> dict[str, Any]:
        """Return the fields of `CacheRequest`.

        Raises:
            InputError: when a value or the file of requests cannot be read.
        """
        from memfit.estimators.base.reading.request_trace import read_request_trace

        return {
            "conversations": self.conversations,
            "eviction": self.eviction,
            "hot_bytes": self.cache_budget,
            "disk_bytes": self.disk,
            "requests": read_request_trace(self.requests, agents=True) if self.requests else (),
        }


@grouped
def tune_cache(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model's directory, or org/name on the Hub.")
    ],
    cache: CacheOptions,
    serving: ServingOptions,
    run: Annotated[RunOptions, Only("force", "memory_limit", "timeout", "download")],
    runtime: Annotated[RuntimeOptions, Only("margin")],
    output: PlanOutput,
) -> None:
    """Store the cache of prompts on the disk, and restore it.

    Shows memory, time and agreement of each way to restore it, and what is worth storing. Requests
    of several conversations are served under a budget.
    """
    from memfit.probes.experiments.caches import tune_cache as answer
    from memfit.probes.process import ModelProcess
    from memfit.probes.store import user_store

    request_of = partial(_request(cache, run, runtime, output), **serving.fields())
    with measuring(model, run, verbose=output.verbose) as (checkpoint, path, progress):
        result = answer(
            request_of(checkpoint=checkpoint),
            start=run.start(ModelProcess, path),
            store=user_store(),
            progress=progress,
        )
    output.write(result, units=output.units)


def _request(
    cache: CacheOptions, run: RunOptions, runtime: RuntimeOptions, output: PlanOutput
) -> "partial[CacheRequest]":
    """Return `CacheRequest` with the options; all are checked before anything is loaded."""
    from memfit.probes.prompt_caches.request import CacheRequest

    require_writable(output.file, needs_stdout=False)
    return partial(
        CacheRequest,
        prompt_tokens=cache.prompt_tokens,
        stored_bits=cache.stored_bits,
        directory=cache.dir,
        max_tokens=cache.max_tokens,
        prefill_step=cache.prefill_step,
        agreement_percent=cache.agreement,
        **run.settings(runtime.margin, output.units),
    )
