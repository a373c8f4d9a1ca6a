"""The result of ``memfit tune cache`` as data; renderers only show it."""

from msgspec import Struct

from memfit.estimators.base.units import Bytes, Count, Number, Positive, Sha256
from memfit.estimators.plans.offload.cache_tiers import Found
from memfit.estimators.results.estimate import DeviceSummary, Note
from memfit.estimators.results.offload import Policy, Simulation
from memfit.estimators.results.result import Result
from memfit.estimators.runtimes.measurement import Way
from memfit.probes.agreement import Agreement
from memfit.probes.result import PointStatus


class CacheRestore(Struct, frozen=True, kw_only=True):
    """One way to restore a stored cache, in a process of its own."""

    way: Way
    """``as-stored``: used as it is in the file; ``bulk``: all layers are read, then all are
    dequantised; ``freeing``: all are read, then one after another is dequantised and its stored
    form freed; ``lazy``: one after another is read, dequantised and freed."""
    status: PointStatus
    reason: str | None
    peak_bytes: Bytes | None
    """Of the restore, without the weights."""
    planned_peak_bytes: Bytes | None
    """As ``memfit plan offload`` computes it, for ``lazy`` as for ``freeing``; a bound for the ways
    that dequantise. None: not planned."""
    cache_bytes: Bytes | None
    """Held when it is restored."""
    read_bytes: Bytes | None
    """From files; None where the system does not count them."""
    from_disk: bool
    """Whether the system forgot the file before."""
    restore_ns: Count | None
    first_token_ns: Count | None
    """Of the restore and the next token."""
    agreement: Agreement | None
    """With the cache that was never stored."""


class StoredCache(Struct, frozen=True, kw_only=True):
    """A file with the cache of one conversation."""

    bits: Positive
    held_bytes: Bytes
    """In memory in these bits, with the unused room of the caches."""
    planned_held_bytes: Bytes | None
    """As ``memfit plan offload`` computes it; None: not planned."""
    file_bytes: Bytes
    sha256: Sha256
    write_ns: Count | None
    """Of quantising, and until file and checksum are on the disk; None: it was there before."""
    exact_layers: Count
    """Layers that are stored as they are."""
    quantised_layers: Count
    restores: tuple[CacheRestore, ...]
    group_size: Positive | None = None
    """Values that are quantised together; None: none are, or not the same in all layers."""
    quantise_ns: Count = 0
    """Of ``write_ns``, and also measured where the file was there."""


class Conversation(Struct, frozen=True, kw_only=True):
    """A prompt of one length."""

    tokens: Positive
    cache_bytes: Bytes
    prefill_peak_bytes: Bytes
    """Without the weights."""
    prefill_ns: Count
    first_token_ns: Count
    """Of the prefill and the next token: what a restore saves."""
    stored: tuple[StoredCache, ...]
    measurement_id: str | None = None
    """Id in the store; None when the measurement was not saved."""


class CacheAnswer(Struct, frozen=True, kw_only=True):
    """What to store, and how to restore it."""

    bits: Positive | None
    """The fewest that agree well enough; None when nothing was restored."""
    way: Way | None
    """The one with the smallest peak."""
    shortest_tokens: Positive | None
    """The shortest conversation that is restored faster than its prompt is read again; None when
    no measured one is."""
    agreement_percent: Number
    """The least share of equal tokens that was allowed."""
    conversations: Positive
    """Those that the hot threshold is for."""
    hot_bytes: Bytes
    """Memory for conversations that are not active: as given, else what nine tenths of the working
    set leave next to the weights and the peak of the longest measured one."""
    hot_threshold_tokens: Count | None
    """The length up to which all of them stay in memory, at least: 0 when the shortest measured
    ones do not."""
    hot_conversations: Count | None
    """Of the longest measured length, in these bits: those that the memory for conversations
    holds. All others are warm or cold."""
    warm_conversations: Count | None
    """Those that the disk holds with its reserve, beyond which conversations are cold."""
    reasons: tuple[str, ...]


class Served(Struct, frozen=True, kw_only=True):
    """Requests by where their conversation was found."""

    found: Found
    requests: Positive
    first_token_ns: Count
    """Of one request in the mean, with the restore."""


class Replay(Struct, frozen=True, kw_only=True):
    """The requests of several conversations, served by the model under a budget.

    The least recently used conversation leaves memory for the disk, and the disk, first.
    """

    policy: Policy
    """How conversations leave memory, as those of ``memfit plan offload``."""
    threshold_tokens: Positive | None
    """Of ``hybrid``: the hot threshold of the answer."""
    bits: Positive
    way: Way
    hot_bytes: Bytes
    """Memory for conversations."""
    disk_bytes: Bytes
    """Disk space that may be used."""
    measured: Simulation
    """Times are sums: of reloads, of quantising and files until they are on the disk, and of
    prompts until their first token. Bytes in memory and on the disk are of caches, read and written
    ones of files."""
    planned: Simulation | None
    """By ``memfit plan offload`` for the same requests, its times by the measured speeds; None:
    not planned."""
    peak_bytes: Bytes
    """Without the weights."""
    planned_peak_bytes: Bytes | None
    """A bound, without the weights."""
    served: tuple[Served, ...]
    differences: tuple[str, ...]
    """Figures that are not as planned."""


class LoadedPair(Struct, frozen=True):
    """The caches of two requests that arrive at once, restored."""

    peak_bytes: Bytes
    """Without the weights."""
    first_ns: Count
    """Until the first request can go on."""
    both_ns: Count


class CacheTrials(Struct, frozen=True, kw_only=True):
    """The file of the answer next to other work."""

    way: Way
    file_bytes: Bytes
    one_at_a_time: LoadedPair
    """One load waits for the other."""
    at_once: LoadedPair
    restore_ns: Count
    prefetched_ns: Count | None
    """Of a file that was read just before; None where the system cannot forget a file."""
    decoded_tokens: Positive
    decode_ns: Count
    """Of these tokens, while nothing else runs."""
    decode_ns_while_saving: Count
    """The same, while the file is saved again and again in another thread."""
    saves: Positive
    save_ns: Count
    """Of one save, in the mean, until it is on the disk with its checksum."""
    zstd_bytes: Bytes | None
    """Of the file in zstd; None without Python 3.14 or zstandard."""
    zstd_decompress_ns: Count | None


class CacheTuneResult(Result, frozen=True, kw_only=True, tag="memfit.tune-cache/1"):
    """The answer of ``memfit tune cache``."""

    model: str
    model_type: str
    device: DeviceSummary
    mlx_version: str
    mlx_lm_version: str
    weights_bytes: Bytes
    max_tokens: Positive
    """Generated after each restore, to compare them."""
    prefill_step: Positive
    directory: str | None
    """The files stay here; None: they are removed."""
    conversations: tuple[Conversation, ...]
    answer: CacheAnswer
    replay: Replay | None
    """None: no requests were given."""
    trials: CacheTrials | None
    """None: nothing is worth storing, or two of the longest do not fit."""
    report: tuple[str, ...]
    """Lines to paste into an issue when a cache is not as planned, or a restore takes more."""
    notes: tuple[Note, ...]
