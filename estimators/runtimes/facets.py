"""What only some runtimes have: `RuntimeModel.facet` returns it, or None.

A facet is a class that a runtime's model inherits. The functions at the end give the answer for a
runtime without the facet too.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from msgspec import Struct

from memfit.estimators.base.ranks import Parallel, Rank
from memfit.estimators.base.workload import CallPhase, ServerSettings, Workload
from memfit.estimators.machine.device import Device
from memfit.estimators.results.estimate import MemoryPool, MemoryShare, Note, RunCall

if TYPE_CHECKING:
    from memfit.estimators.results.context import AutoContext
    from memfit.estimators.runtimes.auto_context import RuntimeMemoryProfile
    from memfit.estimators.runtimes.interface import (
        DraftFigures,
        MemoryFigures,
        RuntimeModel,
        Subject,
    )
    from memfit.estimators.runtimes.runtime import HostNeed, Runtime
    from memfit.estimators.runtimes.token_cost import TokenCost


class OnMlx:
    """MLX's allocator has its memory, within MLX's wired limit."""

    converter: ClassVar[str] = "mlx_lm.convert"
    """The program that converts a model for it."""

    def load_bytes(self) -> int:
        """Return the most bytes in use while the weights are loaded."""
        raise NotImplementedError

    def most_load_bytes(self) -> int:
        """Return what the load takes at most, 0 where disk and GPU do not decide it."""
        return 0

    def refusal(self) -> str:
        """Return why it does not load the checkpoint, nothing where none is known."""
        raise NotImplementedError


class Commands:
    """A program runs it from the command line."""

    reply_tokens: ClassVar[int] = 0
    """Tokens that the program generates from a prompt where none are requested."""

    def commands(
        self, workload: Workload, model: str, server: ServerSettings | None
    ) -> tuple[str, ...]:
        """Return commands for a shell that run a model with the settings of a workload.

        ``server`` are the flags of mlx_lm.server that fit, None where it does not.
        """
        raise NotImplementedError


class MlxLmPrograms(Commands):
    """The programs of mlx-lm run it: generate, server, lora; `memfit tune` measures them."""


class Batching:
    """It prefills a batch in groups."""

    def is_grouped(self, workload: Workload) -> bool:
        """Whether the batch of a workload is larger than a group."""
        raise NotImplementedError

    def decoding_rows(self, workload: Workload) -> int:
        """Return the most sequences of a batch that decode together."""
        raise NotImplementedError


class Sharding:
    """It runs a model over several ranks."""

    def parallel(self, requested: Parallel | None) -> Parallel:
        """Return how it runs the model over several ranks.

        Raises:
            UnsupportedError: when it does not, or not as it is ``requested``.
        """
        raise NotImplementedError

    def for_rank(self, rank: Rank) -> "RuntimeModel":
        """Return the part of one rank; call `parallel` first.

        Raises:
            InputError: for a split that is not of the model's layers.
            UnsupportedError: when the model does not divide among the ranks.
        """
        raise NotImplementedError

    def communication_bytes(self) -> int:
        """Return the bytes outside of MLX's allocator for the exchange with other ranks."""
        raise NotImplementedError


class Views:
    """Other ways to the same figures, for a search of many workloads."""

    def formula(self) -> "RuntimeModel":
        """Return what answers many workloads quickly."""
        raise NotImplementedError

    def for_phases(self, phases: frozenset[CallPhase]) -> "RuntimeModel":
        """Return what may leave out the calls of other phases, if that is quicker."""
        raise NotImplementedError

    def comparing(self, *workloads: Workload) -> "RuntimeModel":
        """Return what answers for all these workloads in one way, so that peaks compare."""
        raise NotImplementedError

    def least_bytes(self, workload: Workload) -> int:
        """Return a part of what a workload takes that is cheap to compute.

        Raises:
            UnsupportedError: when the runtime cannot run it.
        """
        raise NotImplementedError

    def run_calls(self, workload: Workload) -> tuple[RunCall, ...]:
        """Return the memory over each call of a run, for a plot; nothing without a trace."""
        return ()


class Drafting:
    """It is described how it runs a draft model."""

    def require_draft(self, draft: "Subject") -> None:
        """Check that it takes a draft model.

        Raises:
            UnsupportedError: when it does not.
        """

    def drafted(self, workload: Workload, draft: "RuntimeModel", tokens: int) -> "DraftFigures":
        """Return what a draft model adds that proposes ``tokens`` in each step.

        Raises:
            UnsupportedError: when the runtime cannot run it.
        """
        raise NotImplementedError


class HeadDrafting(Drafting):
    """It drafts with heads that read a target's hidden states, not with language models."""


class Images:
    """Its figures are of prompts with images too."""


class CachedPrompts:
    """Its figures are of prompts too whose beginning is in a stored cache."""

    def require_cached(self, workload: Workload) -> None:
        """Check that they are of this workload.

        Raises:
            UnsupportedError: naming why they are not.
        """
        raise NotImplementedError


class BoundByTrace:
    """Some models under it are run by their own class instead of by formula."""

    @classmethod
    def needs_trace(cls, subject: "Subject") -> bool:
        """Whether a model is run by its own class."""
        raise NotImplementedError


class ForeignFormats:
    """It loads formats of other programs that mlx-lm does not."""


class NvidiaOnly:
    """It is described for NVIDIA GPUs: Macs are not looked through for it."""


class PerMachine:
    """Its figures differ between machines with GPUs of the same kind."""


class Cache:
    """It has a cache that grows with the tokens."""

    def token_costs(self, workload: Workload) -> "tuple[TokenCost, ...]":
        """Return what it caches for every token, equal layers together.

        Raises:
            UnsupportedError: when it has no such cache.
        """
        raise NotImplementedError

    def runs_kv_bits(self, workload: Workload) -> bool:
        """Whether it quantises the cache of such a workload; ``figures`` rejects single bits."""
        return True


class ExpertCapacity(Struct, frozen=True):
    """Experts of each layer that fit in the budget, 71 % of the working set."""

    experts: int
    of: int
    """How many experts a layer has."""
    resident_bytes: int
    """What the experts that fit take, all layers together."""


class LoadedWeights(NamedTuple):
    """Bytes of the checkpoint's tensors."""

    loaded_bytes: int
    """Bytes of the tensors that the runtime keeps."""
    unloaded_bytes: int
    """Bytes of the tensors that it does not keep."""
    by_part: Mapping[str, int] | None = None
    """Bytes that it keeps of each part, where it leaves a part of the experts on disk."""
    experts: ExpertCapacity | None = None
    """The experts of each layer in memory, None where that is all of them."""


class OwnWeights:
    """It keeps other tensors than mlx-lm's class."""

    def loaded_weights(self) -> LoadedWeights:
        """Return the bytes of the tensors that it keeps and leaves."""
        raise NotImplementedError


class ContextLimit:
    """It fails beyond a number of tokens, whatever the memory."""

    def context_limit(self) -> int | None:
        """Return the tokens beyond which it fails, None without a limit."""
        raise NotImplementedError


class ProgramContext:
    """Its program takes a context by itself where none is set."""

    def program_context(self, workload: Workload, *, fitted: bool) -> int:
        """Return the tokens of each sequence of a workload that is as long as the model allows.

        ``fitted``: with what the program changes to fit the device.
        """
        raise NotImplementedError

    def program_workload(self, workload: Workload) -> Workload:
        """Return a workload with what the program chooses by its length.

        Raises:
            UnsupportedError: when it does not run it.
        """
        return workload


class OwnContext:
    """It chooses a context by itself, or is known to take the model's own."""

    def memory_profile(
        self, workload: Workload, figures: "MemoryFigures"
    ) -> "RuntimeMemoryProfile":
        """Return fixed bytes and bytes a token, as they are at the workload."""
        raise NotImplementedError

    def automatic_context(
        self, device: Device, workload: Workload, *, most: int, longest: int
    ) -> "AutoContext":
        """Return the context that it chooses by itself, and the right one.

        ``most`` is the longest that the model and its settings allow, ``longest`` the longest that
        fits the device, both in tokens.
        """
        raise NotImplementedError

    def context_notes(self, workload: Workload, figures: "MemoryFigures") -> Iterator[Note]:
        """Yield what a plan of contexts must say of the runtime."""
        return iter(())


class Pool:
    """It divides a device's memory at its start."""

    def pool(self, workload: Workload, *, draft_bytes: int = 0) -> MemoryPool | None:
        """Return how it divides the memory, None without a device.

        ``draft_bytes`` are of the weights of a draft model.
        """
        raise NotImplementedError


class HostReads(NamedTuple):
    """What a decode step reads from the host's memory, and the bytes a second of it."""

    nbytes: int
    bandwidth_bytes: int


class SplitMemory:
    """It can keep a part of a model on the host of a GPU."""

    def memories(self, workload: Workload) -> tuple[MemoryShare, ...]:
        """Return what is on the GPU and what on the host, where figures are the GPU's alone."""
        raise NotImplementedError

    def shared_bytes(self, figures: "MemoryFigures") -> int:
        """Return what GPU and host need of one memory, 0 where figures are of all of it."""
        raise NotImplementedError

    def host_need(self, nbytes: int) -> "HostNeed | None":
        """Return what holding ``nbytes`` means for the host, None where it has no own memory.

        Raises:
            InputError: when a host is described and there is none.
        """
        raise NotImplementedError

    def host_reads(self, workload: Workload) -> HostReads | None:
        """Return what a decode step reads from the host, None where it has no own memory."""
        raise NotImplementedError

    def divisions(self) -> "Iterator[Sequence[tuple[dict[str, int], Runtime]]]":
        """Yield ways to divide the model between a GPU and its host, the fastest way first.

        Each has settings with the most on the GPU first, by their names and as a runtime; nothing
        where the settings say how.
        """
        raise NotImplementedError

    def settled(self, workload: Workload) -> "Runtime":
        """Return the runtime with the settings that it chooses by a workload.

        Raises:
            UnsupportedError: when it cannot choose.
        """
        raise NotImplementedError


def loaded_weights(runtime_model: "RuntimeModel") -> LoadedWeights:
    """Return the bytes of the tensors that a runtime keeps and leaves."""
    if own := runtime_model.facet(OwnWeights):
        return own.loaded_weights()
    footprint = runtime_model.subject.footprint
    return LoadedWeights(footprint.loaded_bytes, footprint.unloaded_bytes)


def load_bytes(runtime_model: "RuntimeModel") -> int:
    """Return the most bytes in use while the weights are loaded, or those that stay."""
    mlx = runtime_model.facet(OnMlx)
    return mlx.load_bytes() if mlx else runtime_model.resident_bytes()


def is_grouped(runtime_model: "RuntimeModel", workload: Workload) -> bool:
    """Whether a batch is prefilled in groups."""
    batching = runtime_model.facet(Batching)
    return batching is not None and batching.is_grouped(workload)


def decoding_rows(runtime_model: "RuntimeModel", workload: Workload) -> int:
    """Return the most sequences of a batch that decode together."""
    batching = runtime_model.facet(Batching)
    return batching.decoding_rows(workload) if batching else workload.batch


def runs_kv_bits(runtime_model: "RuntimeModel", workload: Workload) -> bool:
    """Whether the cache of such a workload is quantised."""
    cache = runtime_model.facet(Cache)
    return cache is None or cache.runs_kv_bits(workload)


def context_limit(runtime_model: "RuntimeModel") -> int | None:
    """Return the tokens beyond which a runtime fails whatever the memory, None without a limit."""
    limited = runtime_model.facet(ContextLimit)
    return limited.context_limit() if limited else None


def formula_of(runtime_model: "RuntimeModel") -> "RuntimeModel":
    """Return what answers many workloads quickly."""
    views = runtime_model.facet(Views)
    return views.formula() if views else runtime_model


def least_bytes(runtime_model: "RuntimeModel", workload: Workload) -> int:
    """Return a part of what a workload takes that is cheap to compute.

    Raises:
        UnsupportedError: when the runtime cannot run it.
    """
    views = runtime_model.facet(Views)
    return views.least_bytes(workload) if views else runtime_model.resident_bytes()


def pool(
    runtime_model: "RuntimeModel", workload: Workload, *, draft_bytes: int = 0
) -> MemoryPool | None:
    """Return how a runtime divides a device's memory at its start, None where it does not."""
    pooled = runtime_model.facet(Pool)
    return pooled.pool(workload, draft_bytes=draft_bytes) if pooled else None


def communication_bytes(runtime_model: "RuntimeModel") -> int:
    """Return the bytes outside of MLX's allocator for the exchange with other ranks."""
    sharding = runtime_model.facet(Sharding)
    return sharding.communication_bytes() if sharding else 0
