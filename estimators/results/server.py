"""A plan of a server as data: renderers show it and compute nothing."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from memfit.estimators.base.images import Images
from memfit.estimators.base.units import Bytes, Count, Tokens
from memfit.estimators.base.workload import ServerSettings
from memfit.estimators.results.estimate import DeviceSummary, Limit, Note, RuntimeSummary
from memfit.estimators.results.program_line import ProgramLine
from memfit.estimators.results.result import Result
from memfit.estimators.results.terms import Verdict


class ServerMoment(Struct, frozen=True, kw_only=True):
    """The moment that takes the most memory of those compared."""

    needed_bytes: Bytes
    """Everything, with the margin."""
    weights_bytes: Bytes
    cache_bytes: Bytes
    """Caches of requests that decode, and what the prompt cache keeps."""
    logits_bytes: Bytes
    """Logits and log-probabilities of requests that decode; with images all that decoding takes."""
    prefill_bytes: Bytes
    """The cache and the workspace of prompts that are prefilled."""
    prefill_error_bytes: Bytes
    """How much more or less that may be: the stated error of its workspace."""
    margin_bytes: Bytes
    images_bytes: Bytes = 0
    """Pixels and embeddings of open requests that are not prefilled, and cached features."""
    prefilled_prompts: Count
    decoding_requests: Count
    stored_caches: Count
    """Entries of the prompt cache."""


class ServerMix(Struct, frozen=True, kw_only=True):
    """What one usual mix of requests takes."""

    name: str
    requests: Count
    needed_bytes: Bytes
    """The most that it needs at a time, with the margin."""
    waited: Count
    """Requests that found no room when they arrived."""


class ServerPlan(Result, frozen=True, kw_only=True, tag="memfit.plan-server/3"):
    """The answer of ``memfit plan server``."""

    server: Literal["mlx_lm.server", "mlx_vlm.server"] = "mlx_lm.server"
    model: str
    runtime: RuntimeSummary
    device: DeviceSummary | None
    settings: ServerSettings
    kv_bits: int | None
    requests: Count
    """Requests of the largest mix."""
    clients: Count
    """Requests that are open at a time."""
    longest_prompt_tokens: Tokens
    longest_generation_tokens: Tokens
    images: Images | None = None
    """Of every request; None: text only."""
    sequential: str | None
    """Why requests run one at a time; None: they are batched."""
    bound: ServerMoment
    """The largest moment that any order and mix of requests within these lengths can lead to."""
    held_bytes: Bytes | UnsetType = UNSET
    """The most that MLX holds over the server's life in any order of requests, freed buffers that
    it keeps included; without the margin. Left out where it is not known."""
    usual: ServerMoment | None
    """The largest moment of the mixes; None where there are none: one at a time, and images."""
    mixes: tuple[ServerMix, ...]
    """Usual mixes within these lengths, or the recorded requests."""
    idle_bytes: Bytes
    """What stays in memory when every request has ended: weights and the prompt cache."""
    verdict: Verdict
    """``fits``: the bound fits; ``tight``: only the mixes do, less than a tenth stays free, or
    something else than bytes may end a request."""
    limits: tuple[Limit, ...]
    """What else may end the longest request, with its figure."""
    waited: Count
    """Requests that found no room when they arrived."""
    fitting: ServerSettings | None
    """The nearest settings whose bound fits; None: not needed, or there are none."""
    fitting_clients: Count | None
    """Requests open at a time for which they fit: fewer than ``clients`` where nobody stated these,
    as many as find a place and a prompt cache."""
    fitting_bound: ServerMoment | None
    fitting_mixes: tuple[ServerMix, ...]
    """The same mixes with these settings."""
    commands: tuple[str, ...]
    """What starts a server that fits: a conversion where one was asked for, then the server."""
    notes: tuple[Note, ...]
    program: ProgramLine | UnsetType = UNSET
    """The command line of a server that it answers for, where one was given."""
