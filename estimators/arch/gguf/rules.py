"""What llama.cpp makes of each GGUF architecture's metadata, as far as memory follows from it.

Source: llama.cpp src/llama-model.cpp, load_hparams and create_memory, and `load_arch_hparams` of
src/models/*.cpp (commit 0c1e57098). A key that llama.cpp does not read changes no byte; the keys
it reads are matched whole, under the file's own architecture.
"""

from enum import Enum

from msgspec import Struct


class Sliding(Struct, frozen=True):
    """Which layers slide."""

    period: int | None = None
    """Of this many layers one is full; None for files that list every layer."""
    first_is_full: bool = False
    """Whether the full layer is the first of a period, not the last."""
    window: int | None = None
    """The window when the key is absent."""
    fixed: int | None = None
    """The window for any value of the key."""
    optional: bool = False
    """Whether no layer slides without the key, or with a window of 0."""
    chunked: bool = False


class Recurrence(Enum):
    """How llama.cpp tells the recurrent layers from those with attention."""

    NONE = "none"
    ALL = "all"
    BOTH = "both"  # every layer has attention and a recurrent mixer
    NO_KV_HEADS = "no_kv_heads"
    NO_KV_HEADS_NO_MLP = "no_kv_heads_no_mlp"  # Nemotron-H: layers with an MLP have no other mixer
    INTERVAL = "interval"  # the last layer of each interval has attention


class State(Enum):
    """What a recurrent layer keeps, by the keys that size it."""

    NONE = "none"
    SSM = "ssm"  # without groups
    GROUPED_SSM = "grouped_ssm"
    GATED_DELTA = "gated_delta"  # a grouped SSM: groups are key heads, the rank value heads
    WKV = "wkv"
    SHORT_CONVOLUTION = "short_convolution"
    KDA = "kda"
    LINEAR = "linear"  # a matrix per head, no convolution


class Rule(Struct, frozen=True):
    """The memory of one architecture."""

    sliding: Sliding | None = None
    recurrence: Recurrence = Recurrence.NONE
    state: State = State.NONE
    latent: bool = False
    """Whether it keeps one latent per token when the file has both MLA lengths."""
    indexer: bool = False
    """Whether it keeps the indexer's key too."""
    own_kv_layers: int | None = None
    """Layers with a cache of their own; -1 where ``attention.shared_kv_layers`` gives the rest."""
    interval: int = 4
    """The interval of the recurrence where the file has none."""
    trunk_only: bool = False
    """Whether prediction layers of a hybrid have no cache."""
    flash_attention: bool = True
    deepstack: bool = False
    """Whether ``n_deepstack_layers`` widens its input (n_embd_inp)."""


_PLAIN = """
    apertus arcee arctic baichuan bailingmoe bailingmoe2 bitnet bloom chameleon chatglm codeshell
    cogvlm command-r dbrx deci deepseek deepseek2-ocr dots1 ernie4_5 ernie4_5-moe exaone falcon
    gemma glm4 glm4moe gpt2 gptneox granite granitemoe grovemoe hunyuan-dense hunyuan-moe
    hunyuan_vl hy_v3 internlm2 jais jais2 llama maincoder minicpm minicpm3 minimax-m2
    mistral3 mpt nemotron olmo olmoe openelm orion paddleocr pangu-embedded phi2 phi3 phimoe plamo
    plm qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe refact seed_oss smollm3
    stablelm starcoder starcoder2 talkie xverse
""".split()


def _sliding(period: int | None = None, window: int | None = None) -> Rule:
    return Rule(sliding=Sliding(period, window=window))


def _optional(period: int, *, first_is_full: bool = False, fixed: int | None = None) -> Rule:
    return Rule(sliding=Sliding(period, first_is_full, fixed=fixed, optional=True))


def _recurrent(state: State) -> Rule:
    return Rule(recurrence=Recurrence.ALL, state=state)


def _hybrid(state: State, *, latent: bool = False, sliding: Sliding | None = None) -> Rule:
    return Rule(sliding=sliding, recurrence=Recurrence.NO_KV_HEADS, state=state, latent=latent)


_INTERVAL = Rule(recurrence=Recurrence.INTERVAL, state=State.GATED_DELTA, trunk_only=True)
_NEMOTRON = Rule(recurrence=Recurrence.NO_KV_HEADS_NO_MLP, state=State.GROUPED_SSM)

RULES: dict[str, Rule] = {
    **dict.fromkeys(_PLAIN, Rule()),
    "qwen3vl": Rule(deepstack=True),
    "qwen3vlmoe": Rule(deepstack=True),
    "grok": Rule(flash_attention=False),  # llama-context.cpp, llama_init_from_model
    "afmoe": _optional(4),
    "cohere2": _sliding(4),
    "cohere2moe": Rule(sliding=Sliding(4, first_is_full=True)),
    "exaone4": Rule(sliding=Sliding(4, window=4096)),  # with 64 layers; see gguf.py
    "exaone-moe": _sliding(4),
    "gemma2": _sliding(2, window=4096),
    "gemma3": _optional(6),
    "gemma3n": Rule(sliding=Sliding(5), own_kv_layers=20),
    "gemma4": Rule(sliding=Sliding(), own_kv_layers=-1),
    "gpt-oss": _sliding(2),
    "granite_swa": _sliding(),
    "laguna": _optional(4, first_is_full=True),
    "llama4": Rule(sliding=Sliding(4, fixed=8192, chunked=True)),  # a window of 0 turns it off
    "maple": _sliding(),
    "mellum": _optional(4),
    "mimo2": _sliding(),
    "muse-glimmer": _sliding(4),
    "olmo2": _optional(4),
    "plamo3": _optional(8),
    "smallthinker": _optional(4, first_is_full=True, fixed=4096),
    "spark2_5": _sliding(),
    "step35": _sliding(),
    "deepseek2": Rule(latent=True),
    "mistral4": Rule(latent=True),
    "deepseek32": Rule(latent=True, indexer=True),
    "glm-dsa": Rule(latent=True, indexer=True),
    "mamba": _recurrent(State.SSM),
    "mamba2": _recurrent(State.GROUPED_SSM),
    "rwkv6": _recurrent(State.WKV),
    "rwkv6qwen2": _recurrent(State.WKV),
    "rwkv7": _recurrent(State.WKV),
    "arwkv7": _recurrent(State.WKV),
    "jamba": _hybrid(State.SSM),
    "plamo2": _hybrid(State.GROUPED_SSM),
    "granitehybrid": _hybrid(State.GROUPED_SSM),
    "lfm2": _hybrid(State.SHORT_CONVOLUTION, sliding=Sliding(0, optional=True)),
    "lfm2moe": _hybrid(State.SHORT_CONVOLUTION),
    "kimi-linear": _hybrid(State.KDA, latent=True),
    "kimi-k3": _hybrid(State.KDA, latent=True),
    "bailingmoe3": _hybrid(State.KDA, latent=True),
    "falcon-h1": Rule(recurrence=Recurrence.BOTH, state=State.GROUPED_SSM),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "qwen3next": _INTERVAL,
    "qwen35": _INTERVAL,
    "qwen35moe": _INTERVAL,
    "minimax-01": Rule(
        recurrence=Recurrence.INTERVAL, state=State.LINEAR, interval=8, trunk_only=True
    ),
}

_ENCODER = "an encoder, which makes embeddings and keeps no cache; it is not sized as a generator"
_DIFFUSION = "a diffusion model, which computes all tokens in each step and keeps no cache"
_DRAFT = "a draft model, which reads layers of its target"
_AUDIO = "a model of speech, whose decoder is not text"
_SPARSE = "its sparse attention has caches of its own, whose rules were not read"

NOT_DESCRIBED: dict[str, str] = {
    **dict.fromkeys(
        """
        bert modern-bert nomic-bert nomic-bert-moe neo-bert jina-bert-v2 jina-bert-v3 eurobert
        gemma-embedding gemma-embedding2 llama-embed t5encoder
        """.split(),
        _ENCODER,
    ),
    "clef": "a model that decides on a whole prompt at once and keeps no cache",
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), _DIFFUSION),
    **dict.fromkeys(("eagle3", "dflash", "gemma4-assistant"), _DRAFT),
    **dict.fromkeys(("wavtokenizer-dec", "qwen3tts", "pockettts"), _AUDIO),
    **dict.fromkeys(
        ("deepseek4", "dots3note", "glm5-next", "hy_v4", "minimax-m3", "qwen4exp"), _SPARSE
    ),
    "t5": "an encoder with a decoder, whose cross attention has a cache that is not described",
    "graniteswitch": "its layers switch between adapters in ways that were not read",
    "hrm_text": "its layers run several times for a token, each time with caches of their own",
    **dict.fromkeys(("k2-horizon", "nanbeige"), "its graph was not read"),
    "gptj": "build b11549 has its name, and loads none of its files",
    "clip": "a vision projector: give the language model's file, and this one with --mmproj",
}
"""Why the other architectures of build b11549 (src/llama-arch.cpp) are not sized."""
