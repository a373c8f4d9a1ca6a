"""The keys of a policy, with what the JSON Schema for editors says of their values.

`read_policy` checks more: names of machines, sizes that exist, keys that exclude each other.
"""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, defstruct

from memfit.estimators.base.dtypes import FloatMode
from memfit.estimators.base.ranks import MAX_RANKS, Parallel
from memfit.estimators.base.units import Count, Positive, one_of
from memfit.estimators.base.workload import KvBits, KvGroupSize, Recipe
from memfit.estimators.gate.limit_values import NUMBER, TokenCount
from memfit.estimators.gate.limits import LIMITS, RequiredBasis
from memfit.estimators.machine.device import OsRegime
from memfit.estimators.questions.target import MOST_DRAFT_TOKENS
from memfit.estimators.runtimes.registry import runtime_names

OwnSetting = Positive | str
"""A count, or a word or size that the runtime reads."""
SCHEMA = "memfit.policy/1"
NAME = "^[A-Za-z0-9_.+-]{1,80}$"
Size = Annotated[str, Meta(pattern=rf"{NUMBER} *[A-Za-z]{{0,3}}$")]


def _exactly_one(*keys: str) -> Meta:
    return Meta(extra_json_schema={"oneOf": [{"required": [key]} for key in keys]})


def _keys(*, of_growth: bool) -> Any:
    """A struct with a field for each limit; without a module, because no source describes it."""
    fields = [
        (rule.key.rpartition(".")[2], rule.kind.schema | UnsetType, UNSET)
        for rule in LIMITS.values()
        if rule.kind.is_growth is of_growth
    ]
    return defstruct("Limits", fields, module="", frozen=True)


class GrowthKeys(_keys(of_growth=True), frozen=True):  # type: ignore[call-arg, misc]
    """Limits on the growth of the baseline's figures."""


class LimitKeys(_keys(of_growth=False), frozen=True):  # type: ignore[call-arg, misc]
    """The limits of a target."""

    basis: RequiredBasis | UnsetType = UNSET
    growth: GrowthKeys | UnsetType = UNSET


class WorkloadKeys(Struct, frozen=True):
    """The workload of a target."""

    context: TokenCount | UnsetType = UNSET
    prompt_tokens: TokenCount | UnsetType = UNSET
    max_tokens: TokenCount | UnsetType = UNSET
    batch: TokenCount | UnsetType = UNSET
    prefill_batch: TokenCount | UnsetType = UNSET
    decode_batch: TokenCount | UnsetType = UNSET
    prefill_step: TokenCount | UnsetType = UNSET
    kv_bits: KvBits | UnsetType = UNSET
    kv_group_size: KvGroupSize | UnsetType = UNSET
    quantized_kv_start: TokenCount | UnsetType = UNSET
    max_kv_size: TokenCount | UnsetType = UNSET
    cached_tokens: TokenCount | UnsetType = UNSET
    image: list[str] | UnsetType = UNSET
    """Images of the prompt, such as 1024x768, or 640x480x3 for three; their tokens are added."""
    video: list[str] | UnsetType = UNSET
    """Videos of the prompt, such as 16x448x448."""


class TargetKeys(Struct, frozen=True, kw_only=True):
    """A model on a machine at a workload, and its limits."""

    model: str | UnsetType = UNSET
    hub: str | UnsetType = UNSET
    """A model on the Hub, org/name@revision."""
    path: str | UnsetType = UNSET
    """A local model."""
    adapter: str | UnsetType = UNSET
    """The directory of a LoRA adapter that is loaded with it."""
    draft: str | UnsetType = UNSET
    """A draft model that is loaded with it, or a head of mlx-vlm, named as a model."""
    num_draft_tokens: Annotated[int, Meta(ge=1, le=MOST_DRAFT_TOKENS)] | UnsetType = UNSET
    """Tokens that the draft model proposes in each step."""
    quantize: KvBits | FloatMode | UnsetType = UNSET
    """Bits, or a mode of floating-point numbers, that mlx_lm.convert would give the model."""
    margin: Size | UnsetType = UNSET
    """Memory to keep free above the peak, 64MB by default as in memfit estimate."""
    device: str | UnsetType = UNSET
    memory: Size | UnsetType = UNSET
    working_set: Size | UnsetType = UNSET
    os_regime: OsRegime | UnsetType = UNSET
    ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS)] | UnsetType = UNSET
    """Ranks of mlx.launch, each on such a machine; the figures are of the one with least room."""
    parallel: Parallel | UnsetType = UNSET
    """How the ranks share the model; by default as mlx-lm's sharded_load chooses."""
    split: list[Positive] | UnsetType = UNSET
    """Layers of each rank of a pipeline."""
    runtime: Annotated[str, one_of(*runtime_names())] | UnsetType = UNSET
    """The runtime that sets the allocation rules; by default the checkpoint's own runtime."""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] | UnsetType = UNSET
    """The share of the GPU's memory that vllm takes, 0.92 by default."""
    cache_type: str | UnsetType = UNSET
    """With llama.cpp: the types of its cache, such as q8_0, or q8_0,f16 for keys and values."""
    cache_type_k: str | UnsetType = UNSET
    cache_type_v: str | UnsetType = UNSET
    flash_attn: bool | UnsetType = UNSET
    kv_unified: bool | UnsetType = UNSET
    swa_full: bool | UnsetType = UNSET
    all_logits: bool | UnsetType = UNSET
    gpu_layers: Count | str | UnsetType = UNSET
    n_cpu_moe: OwnSetting | UnsetType = UNSET
    cpu_moe: bool | UnsetType = UNSET
    override_tensor: str | UnsetType = UNSET
    """With llama.cpp: where tensors are whose names match, such as ffn_.*_exps=CPU."""
    kv_offload: bool | UnsetType = UNSET
    mmproj_offload: bool | UnsetType = UNSET
    batch_size: OwnSetting | UnsetType = UNSET
    host_memory: OwnSetting | UnsetType = UNSET
    host_bandwidth: OwnSetting | UnsetType = UNSET
    mtp_tokens: Positive | UnsetType = UNSET
    """With llama.cpp: tokens that the file's own prediction layers draft."""
    capacity: OwnSetting | UnsetType = UNSET
    """With mlx-moe: experts of each layer in memory."""
    kv_cache_dtype: str | UnsetType = UNSET
    """With vllm, as max_requests: the type of its cache."""
    max_requests: Positive | UnsetType = UNSET
    mlx_version: str | UnsetType = UNSET
    """The version of MLX with the rules that apply; by default the newest that is described."""
    mlx_lm_version: str | UnsetType = UNSET
    """The version of mlx-lm with the rules that apply; by default the newest that is described."""
    allow_stale: bool | UnsetType = UNSET
    """Accept a cached answer when the Hub was not queried, or did not answer."""
    allow_beyond_context: bool | UnsetType = UNSET
    """Accept a workload that is longer than the model's context."""
    routing: str | UnsetType = UNSET
    """A file of memfit tune experts --record; ``misses_per_token`` limits what mlx-moe misses."""
    stored_bits: Literal[4, 8, 16] | UnsetType = UNSET
    """Bits of a stored cache, by default those of the workload; ``restore_peak`` limits it."""
    training: Recipe | UnsetType = UNSET
    """How mlx_lm.lora fine-tunes the model, by its own names; ``training_peak`` limits it."""
    workload: Annotated[WorkloadKeys, _exactly_one("context", "prompt_tokens")]
    limits: Annotated[LimitKeys, Meta(extra_json_schema={"minProperties": 1})]


class PolicyKeys(Struct, frozen=True, tag_field="schema", tag=SCHEMA):
    """The policy that ``memfit gate`` reads from memfit.yaml."""

    targets: Annotated[
        dict[
            Annotated[str, Meta(pattern=NAME)],
            Annotated[TargetKeys, _exactly_one("device", "memory", "working_set")],
        ],
        Meta(min_length=1),
    ]
