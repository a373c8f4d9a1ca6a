"""The request of ``memfit tune cache``."""

from pathlib import Path

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.reading.request_trace import TraceRequest
from memfit.estimators.plans.offload.plan import MAX_CONVERSATIONS
from memfit.estimators.results.offload import Policy
from memfit.probes.experiments.base import RunRequest
from memfit.probes.prompt_caches.stored import FULL_BITS

_BITS = (2, 3, 4, 5, 6, 8, FULL_BITS)
CONVERSATIONS = 8


class CacheRequest(RunRequest, frozen=True, kw_only=True):
    """The prompts whose caches are stored, and how; the conversations to serve with them."""

    prompt_tokens: tuple[int, ...]
    stored_bits: tuple[int, ...] = (16, 8, 4)
    directory: Path | None = None
    """Where the files stay; None: they are removed."""
    max_tokens: int = 32
    prefill_step: int = 2048
    agreement_percent: int = 95
    conversations: int | None = None
    """Those that the answer is for; None: those of the requests, else `CONVERSATIONS`."""
    requests: tuple[TraceRequest, ...] = ()
    """Of several conversations, to be served under a budget."""
    eviction: Policy = "reactive"
    """How their conversations leave memory."""
    hot_bytes: int | None = None
    """Memory for conversations; None takes what the machine leaves."""
    disk_bytes: int | None = None
    """Disk space for conversations, with the reserve; None takes the free one."""


def check_possible(request: CacheRequest) -> None:
    """Refuse what cannot be, before anything is loaded.

    Raises:
        InputError: for impossible lengths, bits or numbers of conversations.
    """
    if not request.prompt_tokens or min(request.prompt_tokens) < 1:
        raise InputError("a prompt needs at least 1 token")
    for bits in request.stored_bits:
        if bits not in _BITS:
            known = ", ".join(map(str, _BITS))
            raise InputError(f"stored bits {bits}: MLX stores a cache in {known}")
    _check_conversations(request)
    if request.max_tokens < 1:
        raise InputError("generate at least 1 token, to compare it")


def _check_conversations(request: CacheRequest) -> None:
    wanted, agents = request.conversations, len({each.agent for each in request.requests})
    if wanted is not None and not 1 <= wanted <= MAX_CONVERSATIONS:
        raise InputError(f"{wanted} conversations: give from 1 to {MAX_CONVERSATIONS}")
    if wanted is not None and request.requests and wanted > agents:
        raise InputError(f"{wanted} conversations: the requests have {agents}")
