"""``memfit plan offload``: conversations kept in memory and on disk."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from msgspec.structs import replace

from memfit.cli.commands.plan.subject import CACHE_BUDGET, disk_here, sized_for_mlx_lm
from memfit.cli.exits import Exit
from memfit.cli.options.groups import OptionGroup, PlanOutput, grouped, option
from memfit.cli.options.questions import AdaptedModel, MachineOptions, VersionOptions
from memfit.estimators.base.units import parse_count, parse_rate, parse_size
from memfit.estimators.questions.question import DEFAULT_CONTEXT

if TYPE_CHECKING:
    from memfit.estimators.arch.model import Model
    from memfit.estimators.machine.device import Device
    from memfit.estimators.plans.offload.plan import OffloadQuestion
    from memfit.estimators.plans.offload.session_cache import Storage
    from memfit.estimators.sizing.sized_model import SizedModel


class OffloadOptions(OptionGroup, frozen=True, kw_only=True):
    """The conversations, and where they are stored."""

    conversations: int = option(help="Number of conversations.", default=8)
    tokens: int | None = option(
        help="Tokens of each conversation, such as 18000 or 16k.", read=parse_count
    )
    stored_bits: int = option(help="Bits of a stored conversation: 4, 8 or 16.", default=4)
    stored_group_size: int = option(help="Group size of --stored-bits.", default=64)
    in_blocks: bool = option(
        "--in-blocks",
        help="Quantise every layer, in whole blocks of 256 tokens, as agent-memory does; else"
        " caches are stored as by mlx-lm.",
        default=False,
    )
    cache_budget: int | None = CACHE_BUDGET
    disk: int | None = option(metavar="SIZE", help="Free disk space.", read=parse_size)
    read: int | None = option(
        metavar="RATE", help="Read bandwidth of the disk, such as 3.5GB/s.", read=parse_rate
    )
    write: int | None = option(
        metavar="RATE", help="Write bandwidth of the disk, such as 2GB/s.", read=parse_rate
    )
    prefill_speed: int | None = option(
        metavar="N", help="Prompt tokens per second, not generated ones."
    )
    requests: Path | None = option(
        metavar="FILE",
        help="Simulate this CSV or JSONL of agent, prompt_tokens and completion_tokens.",
    )
    plot: bool = option(
        "--plot", help="Draw the size of all conversations by tokens.", default=False
    )

    def question(self) -> "OffloadQuestion":
        """Return the question.

        Raises:
            InputError: when a value or the file of requests cannot be read.
        """
        from memfit.estimators.base.reading.request_trace import read_request_trace
        from memfit.estimators.plans.offload.plan import OffloadQuestion
        from memfit.estimators.results.offload import Speeds

        return OffloadQuestion(
            conversations=self.conversations,
            tokens=DEFAULT_CONTEXT if self.tokens is None else self.tokens,
            hot_bytes=self.cache_budget,
            disk_bytes=self.disk,
            speeds=Speeds(self.read, self.write, self.prefill_speed),
            requests=read_request_trace(self.requests, agents=True) if self.requests else (),
        )

    def storage(self, model: "Model") -> "Storage":
        """Return how conversations of a model are stored.

        Raises:
            InputError: for bits or a group size that are not stored.
            UnsupportedError: when the model keeps nothing between tokens.
        """
        from memfit.estimators.plans.offload.session_cache import storage_of

        return storage_of(
            model,
            bits=self.stored_bits,
            group_size=self.stored_group_size,
            in_blocks=self.in_blocks,
        )


@grouped
def offload(
    model: AdaptedModel,
    options: OffloadOptions,
    machine: MachineOptions,
    versions: VersionOptions,
    output: PlanOutput,
) -> None:
    """For agents that take turns: conversations in memory and on disk.

    Also the time saved by loading them again.
    """
    from memfit.estimators.plans.offload.plan import plan_offload

    question = options.question()
    device = machine.machine()
    sized = sized_for_mlx_lm(model, device, versions, verbose=output.verbose)
    storage = options.storage(sized.model)
    if not model.quantization():
        question = _with_measured(question, sized, storage, device)
    measured = question.measured
    if not question.speeds.read and not (measured and measured.read_bytes_per_second):
        question = replace(question, speeds=replace(question.speeds, read=disk_here(device)))
    result = plan_offload(sized, storage, question)
    output.write(result, units=output.units, plot=output.draws(options.plot))
    raise typer.Exit(Exit.NO if result.hot_conversations == 0 else Exit.YES)


def _with_measured(
    question: "OffloadQuestion", sized: "SizedModel", storage: "Storage", device: "Device | None"
) -> "OffloadQuestion":
    """Add what ``memfit tune cache`` measured of the same files on the machine."""
    from memfit.estimators.machine.host import detect_host
    from memfit.probes.saved import saved_storage
    from memfit.probes.store import user_store

    measured, warnings = saved_storage(
        sized,
        device or detect_host(),
        user_store(),
        tokens=question.tokens,
        bits=storage.bits,
        group_size=storage.kept_group_size,
    )
    if measured and storage.in_blocks:
        # The restores that were measured are of caches as mlx-lm stores them.
        measured = replace(measured, bulk_bytes=None, streaming_bytes=None)
    return replace(question, measured=measured, warnings=warnings)
