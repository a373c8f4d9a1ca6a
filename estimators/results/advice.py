"""What to do about an estimate as data: actions, settings, and what needs how much where."""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from memfit.estimators.base.images import ImageSize
from memfit.estimators.base.units import Bytes, Count, Number, Positive, Tokens
from memfit.estimators.base.workload import ServerSettings
from memfit.estimators.results.terms import Cost, Method, Settings, State, Verdict


class Advice(Struct, frozen=True):
    """What to do with one setting; ``value`` is None only where there is nothing to set."""

    state: State
    value: Count | None
    reason: str
    assumes: Settings = {}
    """The other settings that are changed with it; the reason names them too."""


class Recommendation(Struct, frozen=True, kw_only=True):
    """Each setting by the cheapest set of them that makes the request fit."""

    context_tokens: Advice
    """The longest prompt that fits, all else as requested."""
    prefill_step: Advice
    kv_bits: Advice
    weight_bits: Advice
    memory_bytes: Advice
    """Of the machine; a Mac's."""
    wired_limit_bytes: Advice
    """The limit that MLX is to set for `context_tokens`."""
    wired_limit_mb: Advice
    """The system setting iogpu.wired_limit_mb, in MiB, that makes room for the request."""
    basis: tuple[str, ...] = ()
    """What the figures rest on, where it is not the estimate alone."""

    def advice(self) -> dict[str, Advice]:
        """Return the advice of each setting, by its name."""
        names = (name for name in self.__struct_fields__ if name != "basis")
        return {name: getattr(self, name) for name in names}

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons of all settings that apply, each after its name."""
        return (
            *self.basis,
            *(
                f"{NAMES[name]}: {advice.reason}"
                for name, advice in self.advice().items()
                if advice.state != "not_applicable"
            ),
        )


def not_applicable(reason: str) -> Advice:
    """Return that a setting cannot be chosen here."""
    return Advice("not_applicable", None, reason)


def impossible(reason: str) -> Advice:
    """Return that no value of a setting helps."""
    return Advice("impossible", None, reason)


def no_recommendation(reason: str, memory: Advice | None = None) -> Recommendation:
    """Return a recommendation without any setting, but perhaps the ``memory`` of the machine."""
    none = not_applicable(reason)
    return Recommendation(
        context_tokens=none,
        prefill_step=none,
        kv_bits=none,
        weight_bits=none,
        memory_bytes=memory or none,
        wired_limit_bytes=none,
        wired_limit_mb=none,
    )


NAMES = {
    "context_tokens": "context",
    "prefill_step": "prefill step",
    "kv_bits": "KV bits",
    "weight_bits": "weight bits",
    "memory_bytes": "memory",
    "wired_limit_bytes": "wired limit",
    "wired_limit_mb": "iogpu.wired_limit_mb",
}
"""What people call each setting."""


class ServerRun(Struct, frozen=True, kw_only=True):
    """The flags with which mlx_lm.server runs a request, and what no order of requests exceeds."""

    settings: ServerSettings
    needed_bytes: Bytes
    """The bound, with the margin; every reply has as many tokens as the request, or the server's
    default."""
    context_tokens: Tokens | None = None
    """The longest prompt that fits with exactly these flags; None: not searched."""
    context_needed_bytes: Bytes | None = None
    """The bound of that prompt."""


class ConversionMemory(Struct, frozen=True, kw_only=True):
    """What mlx_lm.convert takes, before a run of what it writes."""

    source_bytes: Bytes
    """Of the weight files that it reads."""
    is_local: bool
    """Whether they are there; otherwise they are downloaded first."""
    output_bytes: Bytes
    """Of the weights that it writes; the source stays on the disk beside them."""
    shards: Positive
    """Files that it writes, one after another."""
    largest_shard_bytes: Bytes
    """Of the largest of them, all of which is in memory before it is written."""
    largest_array_bytes: Bytes
    """Of the largest array that is read or cast."""
    least_peak_bytes: Bytes
    """The least over the orders in which a shard may be evaluated, that of a C++ hash map."""
    peak_bytes: Bytes
    """The most over these orders: the largest shard, and what is read ahead."""
    verdict: Verdict
    """Of that peak with the margin."""


class Alternative(Struct, frozen=True, kw_only=True):
    """A sample that fits the machine of a model that does not."""

    name: str
    """What opens it."""
    weights: str
    """What the weights are: their bits, or as they are."""
    weight_bits: Positive | None
    """What mlx_lm.convert has to make of the weights; None: they stay as they are."""
    prefill_step: Positive
    verdict: Verdict
    needed_bytes: Bytes
    """The peak with the margin."""
    context_tokens: Tokens
    """The longest prompt that fits comfortably; 0 when none does."""


SecondsRange = Annotated[tuple[Number, ...], Meta(min_length=2, max_length=2)]
"""The least and the most to expect."""


class FirstToken(Struct, frozen=True, kw_only=True):
    """How long a prompt takes before its first token, and a turn with its reply."""

    prompt_tokens: Positive
    seconds: Number
    """With the most GPU cores that the machine is sold with."""
    range_seconds: SecondsRange
    """The least and the most to expect, with the fewest cores too."""
    prefill_seconds: Number
    """The part of ``seconds`` before the last token of the prompt, which is decoded."""
    prefill_range_seconds: SecondsRange
    decode_range_seconds: SecondsRange | UnsetType = UNSET
    """Of the reply, where the request has one and its speed can be expected."""
    turn_range_seconds: SecondsRange | UnsetType = UNSET
    """Of both together: the whole turn."""
    at_usual_step_seconds: Number | UnsetType = UNSET
    """With the runtime's own prefill step, where that is more than 5 % faster."""


class StepSchedule(Struct, frozen=True, kw_only=True):
    """Prefill steps that fall with the position, for a program that sets the step of each chunk."""

    steps: tuple[tuple[Positive, Positive], ...]
    """Tokens up to which a step is taken, and the step: ``[[32768, 2048], [40960, 1024]]``."""
    context_tokens: Positive
    """The longest prompt that fits so; the last of ``steps`` ends there."""
    context_with_first_step: Positive
    """That of the first step alone."""
    needed_bytes: Bytes
    """The peak with the margin: an upper bound where the model has windows."""
    chunks: Positive
    chunks_with_last_step: Positive
    """With the last step alone, which runs a prompt as long."""
    seconds: Number | None
    """To the first token; None where the chip is not known."""
    seconds_with_last_step: Number | None


class Action(Struct, frozen=True, kw_only=True):
    """Settings that make the request fit, or allow a longer prompt."""

    goal: Literal["request", "longer_prompt"]
    settings: Settings
    """Those to change, by the names of `Recommendation` or of llama.cpp's division; empty when
    nothing has to change."""
    commands: tuple[str, ...]
    """To paste into a shell; empty for a runtime without a command, and where the machine is too
    small for the conversion."""
    cost: Cost
    verdict: Verdict
    """Of the request, or of the longer prompt, with these settings."""
    peak_bytes: Bytes
    needed_bytes: Bytes
    """The peak with the margin."""
    context_tokens: Tokens | None
    """The longest prompt that fits with these settings, 0 when none does; None: not searched."""
    server: ServerRun | None = None
    """The server that the last command starts; None: it runs one prompt, or there is none."""
    no_server: str = ""
    """What keeps a request under mlx-lm from its server; completes a sentence."""
    host_bytes: Bytes | UnsetType = UNSET
    """What the host of a GPU then holds; ``verdict`` is unknown where its size is not known."""
    host_memory_bytes: Bytes | UnsetType = UNSET
    """The least memory of a host on which that fits."""
    runtime: str | UnsetType = UNSET
    """The runtime to take instead, with its own prefill step."""
    conversion: ConversionMemory | UnsetType = UNSET
    """What converting the weights takes, where they are converted by mlx_lm.convert."""
    first_token: FirstToken | UnsetType = UNSET
    """Of the request, or of the longer prompt, with these settings."""


class PartialExperts(Struct, frozen=True, kw_only=True):
    """A part of each layer's experts, which fits where all of them do not."""

    experts: Positive
    """Experts to keep of each layer."""
    of: Positive
    """Experts that each layer has."""
    weight_bits: Positive | None
    """Bits that the weights are converted to first; None: as they are."""
    running_bytes: Bytes
    """Peak of the run, when the experts are loaded."""
    startup_bytes: Bytes
    """Peak while mlx-moe's loader reads one file after another."""
    pays: bool | None
    """Whether it pays off by mlx-moe's published rules; None where that depends on the routing."""
    warned: bool
    """Whether the first of the reasons warns of this number."""
    reasons: tuple[str, ...]
    """What is published of this number, then why it pays or does not."""


class Recommended(Struct, frozen=True, kw_only=True):
    """What to set on this machine for the best action; None where there is nothing to set."""

    context_tokens: Tokens | None
    """The longest prompt that its last command runs, by its bytes."""
    context_verdict: Verdict = "fits"
    """Of that prompt: tight where something else than its bytes may end it."""
    wired_limit_bytes: Bytes | None
    """MLX's wired limit that keeps all of that prompt resident, at most what MLX accepts."""
    expert_capacity: Count | None
    """Experts of each layer to keep: all where they fit, those that the runtime keeps, else those
    of ``partial_experts``."""
    experts: Count | UnsetType = UNSET
    """Experts that a layer has, where the runtime keeps fewer."""


class Cell(Struct, frozen=True):
    """A row's settings at one column, with the largest prefill step that fits."""

    verdict: Verdict
    needed_bytes: Bytes | None
    """The peak with the margin; None where the runtime cannot run it."""
    prefill_step: Positive
    reason: str = ""
    """Why the runtime cannot run it."""
    prompt_cache_size: Count | None = None
    """Of a server, the prompt caches that it keeps with this need."""


class GridRow(Struct, frozen=True, kw_only=True):
    """Settings, and what they need at each column."""

    label: str
    program: Literal["run", "server"] = "run"
    """One run, or mlx_lm.server with as many clients as the request has sequences: then the needs
    are what no order of requests exceeds."""
    settings: Settings
    """Those that differ from the request."""
    weights_bytes: Bytes
    cells: tuple[Cell, ...]
    context_tokens: Tokens
    """The longest prompt that fits, 0 when none does or no device is known; of a server with the
    flags that are printed."""
    context_step: Positive
    """The prefill step of that prompt."""
    context_verdict: Verdict = "fits"
    """Of that prompt: tight where something else than its bytes may end it."""


class LeftOut(Struct, frozen=True):
    """A row, a column or a setting that is not shown, and why."""

    what: str
    reason: str


class Grid(Struct, frozen=True):
    """What needs how much where; its columns are prompts, or Macs when no device is known."""

    axis: Literal["context_tokens", "memory_bytes"]
    columns: tuple[Positive, ...]
    rows: tuple[GridRow, ...]
    left_out: tuple[LeftOut, ...]
    method: Method


class SmallerImages(Struct, frozen=True):
    """All images of the request, each reduced by a whole number."""

    divisor: Count
    image_tokens: Tokens
    peak_bytes: Bytes


class ImageAdvice(Struct, frozen=True):
    """Answers about the images of a request; its text stays as it is."""

    largest: ImageSize | None
    """The largest image with the sides in the ratio of the first one that fits, None: none does."""
    any_size: bool
    """Whether an image of any size fits, because the processor reduces it."""
    most: Count
    """How many images such as the first one fit, at most ``searched``."""
    searched: Count
    """How many images were tried: 256, or 1 to 4 where each number has to be traced."""
    smaller: tuple[SmallerImages, ...]
    """With sides of a half and of a quarter, where that lowers the peak."""
