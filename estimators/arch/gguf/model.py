"""The model of a GGUF file, from its metadata and the shapes of its tensors."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from memfit.estimators.arch.fields import MAX_LAYERS, Fields, config_fields
from memfit.estimators.arch.gguf.layers import Heads, Widths, state_of
from memfit.estimators.arch.gguf.rules import NOT_DESCRIBED, RULES, Recurrence, Rule, Sliding
from memfit.estimators.arch.model import Layer, Model
from memfit.estimators.arch.specs import DenseMLP, FeedForward, Mixer, MixtureOfExperts
from memfit.estimators.base.errors import ConfigError, UnsupportedError
from memfit.estimators.checkpoint.manifest import Tensor

# exaone4.cpp slides in the 32B only, which it tells by this many layers.
_EXAONE_32B_LAYERS = 64

_Shapes = Mapping[str, tuple[int, ...]]


class GgufModel(NamedTuple):
    """A model, and how many of the file's blocks are its trunk: the rest predict ahead."""

    model: Model
    trunk: int


def build_gguf_model(
    metadata: Mapping[str, Any], tensors: Iterable[Tensor], name: str
) -> GgufModel:
    """Return the model llama.cpp makes of a GGUF file; ``name`` is how messages name the file.

    Its layers are those that have a cache: as a rule the trunk.

    Raises:
        ConfigError: when a key is missing or holds a wrong value.
        UnsupportedError: when the architecture is not described.
    """
    architecture = config_fields(metadata, name).text("general.architecture")
    rule = _rule(architecture, name)
    fields = _section(metadata, architecture, name)
    if not fields.flag("attention.causal", default=True):
        raise UnsupportedError(
            f"{fields.full_path('attention.causal')}: false: an encoder, which makes embeddings and"
            " keeps no cache; it is not sized as a generator"
        )
    # llama.cpp's converter writes it for models of sentence-transformers alone (modules.json).
    if fields.count("pooling_type", 0, least=0):
        raise UnsupportedError(
            f"{fields.full_path('pooling_type')}: an embedding model or a reranker; it is not sized"
            " as a generator"
        )
    reader = _Reader(fields, rule, architecture, {t.name: t.shape for t in tensors})
    return GgufModel(reader.model(), reader.trunk)


def _rule(architecture: str, name: str) -> Rule:
    if architecture in RULES:
        return RULES[architecture]
    why = f": {NOT_DESCRIBED[architecture]}" if architecture in NOT_DESCRIBED else ""
    raise UnsupportedError(
        f"{name}: general.architecture: {architecture[:60]!r} is not described{why}"
    )


def _section(metadata: Mapping[str, Any], architecture: str, name: str) -> Fields:
    """The keys of this architecture, not of another with a name that ends the same."""
    prefix = f"{architecture}."
    values = {key.removeprefix(prefix): v for key, v in metadata.items() if key.startswith(prefix)}
    return config_fields(values, name, (architecture,))


class _Reader:
    """One file's keys read into layers."""

    def __init__(self, fields: Fields, rule: Rule, architecture: str, shapes: _Shapes) -> None:
        self.fields, self.rule, self.architecture = fields, rule, architecture
        self.shapes = shapes
        self.blocks = fields.count("block_count", most=MAX_LAYERS)
        predicting = fields.count("nextn_predict_layers", 0, least=0, most=self.blocks - 1)
        self.trunk = self.blocks - predicting
        self.hidden = fields.count("embedding_length")
        self.heads = Heads(fields, self.blocks, self.hidden)
        self.window, self.slides = self._sliding()
        self.widths = fields.counts("feed_forward_length", self.blocks, least=0)
        self.recurrent = self._recurrent()
        every = rule.recurrence in (Recurrence.NONE, Recurrence.ALL) or rule.trunk_only
        self.cached = self.trunk if every else self.blocks
        self.owning = self._owning()

    def model(self) -> Model:
        return Model(
            model_type=self.architecture,
            hidden_size=self.hidden,
            vocab_size=self._vocabulary(),
            layers=tuple(
                Layer(self._mixers(index), self._feed_forward(index), ())
                for index in range(self.cached)
            ),
            modules=(),
            makes_own_cache=True,
            max_context=self.fields.count("context_length"),
            dtype="F32",
            deepstack_layers=self._deepstack_layers(),
            notes=self._notes(),
        )

    def _deepstack_layers(self) -> int:
        if not self.rule.deepstack:
            return 0
        return self.fields.count("n_deepstack_layers", 0, least=0, most=self.blocks)

    def _vocabulary(self) -> int:
        for tensor in ("output.weight", "token_embd.weight"):
            shape = self.shapes.get(tensor, ())
            if len(shape) == 2:
                return shape[1]
        raise ConfigError(
            f"{self.fields.full_path('vocab_size')}: no token_embd.weight tells the vocabulary"
        )

    def _notes(self) -> tuple[str, ...]:
        predicting = self.blocks - self.trunk
        if not predicting:
            return ()
        return (f"llama.cpp loads none of the {predicting} prediction layers by default",)

    def _sliding(self) -> tuple[int, list[bool]]:
        """The window, and which layers slide."""
        none = 0, [False] * self.blocks
        sliding, key = self.rule.sliding, "attention.sliding_window"
        if sliding is None:
            return none
        if self.architecture == "exaone4" and self.trunk != _EXAONE_32B_LAYERS:
            return none
        default = 0 if sliding.optional else sliding.fixed or sliding.window
        window = self.fields.count(key, default, least=0)
        if window == 0 and (sliding.optional or sliding.fixed):
            return none
        if window == 0:
            raise self.fields.fail(key, "expected at least 1, got 0")
        return sliding.fixed or window, self._pattern(sliding)

    def _pattern(self, sliding: Sliding) -> list[bool]:
        key = "attention.sliding_window_pattern"
        if self.fields.is_list(key):
            listed = self.fields.items(key) or []
            if not self.trunk <= len(listed) <= self.blocks:
                raise self.fields.fail(key, f"{len(listed)} entries for {self.trunk} layers")
            return [bool(item) for item in listed] + [False] * (self.blocks - len(listed))
        if sliding.period is None:
            raise self.fields.fail(key, "missing; llama.cpp needs it")
        period = self.fields.count(key, sliding.period, least=0)
        place = 0 if sliding.first_is_full else period - 1
        return [
            index < self.trunk and (period == 0 or index % period != place)
            for index in range(self.blocks)
        ]

    def _recurrent(self) -> list[bool]:
        """Which layers have a recurrent mixer."""
        kind, kv_heads = self.rule.recurrence, self.heads.kv_heads
        if kind in (Recurrence.ALL, Recurrence.BOTH):
            recurrent = [True] * self.blocks
        elif kind is Recurrence.NO_KV_HEADS:
            recurrent = [count == 0 for count in kv_heads]
        elif kind is Recurrence.NO_KV_HEADS_NO_MLP:
            recurrent = [count == 0 and not self._has_mlp(i) for i, count in enumerate(kv_heads)]
        elif kind is Recurrence.INTERVAL:
            recurrent = self._by_interval()
        else:
            recurrent = [False] * self.blocks
        return [value and index < self.trunk for index, value in enumerate(recurrent)]

    def _by_interval(self) -> list[bool]:
        key = "attention.recurrent_layers"
        if self.fields.has(key):
            listed = self.fields.items(key, self.blocks) or []
            return [bool(item) for item in listed]
        interval = self.fields.count("full_attention_interval", self.rule.interval)
        return [(index + 1) % interval != 0 for index in range(self.blocks)]

    def _owning(self) -> int:
        """How many layers, from the first, have a cache of their own."""
        own = self.rule.own_kv_layers
        if own is None:
            return self.blocks
        if own >= 0:
            return own
        shared = self.fields.count("attention.shared_kv_layers", 0, least=0, most=self.blocks)
        return self.blocks - shared

    def _mixers(self, index: int) -> tuple[Mixer, ...]:
        mixers: list[Mixer] = []
        both = self.rule.recurrence is Recurrence.BOTH
        if self._attends(index) and (both or not self.recurrent[index]):
            widths = Widths(self.fields, self.rule, self.heads)
            mixers.append(
                widths.attention(
                    index,
                    window=self.window if self.slides[index] else None,
                    owns_cache=index < self.owning,
                    indexed=self._is_indexed(index),
                    query_rows=self.shapes.get(f"blk.{index}.attn_q.weight", (0,))[-1],
                )
            )
        if self.recurrent[index]:
            mixers.append(state_of(self.rule.state, self.fields, self.heads, self.hidden))
        return tuple(mixers)

    def _attends(self, index: int) -> bool:
        if self.rule.recurrence is Recurrence.ALL or not self.heads.kv_heads[index]:
            return False
        if self.rule.recurrence is Recurrence.NO_KV_HEADS_NO_MLP:
            return not self._has_mlp(index)
        return True

    def _has_mlp(self, index: int) -> bool:
        return bool(self.widths and self.widths[index])

    def _is_indexed(self, index: int) -> bool:
        if not self.rule.indexer:
            return False
        key = "attention.indexer.types"
        types = self.fields.counts(key, self.trunk, least=0)
        if types is not None:
            return types[index] != 0
        if self.architecture == "glm-dsa" and self.fields.count("context_length") >= 2**20:
            raise self.fields.fail(key, "missing; this GLM shares its indexers between layers")
        return True

    def _feed_forward(self, index: int) -> FeedForward | None:
        """The block's own tensors say what it is, whatever the architecture calls it."""
        up = self._shape(index, "ffn_up_exps")
        fused = self._shape(index, "ffn_gate_up_exps")
        if up or fused:
            shared = self._shape(index, "ffn_up_shexp")
            used = self.fields.counts("expert_used_count", self.blocks) or [1] * self.blocks
            shape = up or fused
            return MixtureOfExperts(
                experts=shape[-1],
                top_k=used[index],
                intermediate=shape[1] if up else shape[1] // 2,
                shared_intermediate=shared[1] if len(shared) == 2 else 0,
                gated=bool(fused or self._shape(index, "ffn_gate_exps")),
            )
        dense = self._shape(index, "ffn_up")
        if keys := self._shape(index, "channel_mix_key"):
            return DenseMLP(intermediate=keys[1], gated=False)
        if len(dense) != 2:
            return None
        down = self._shape(index, "ffn_down")
        if down and dense[1] == 2 * down[0]:  # the gate is in the same matrix, as in Phi-3's
            return DenseMLP(intermediate=down[0])
        return DenseMLP(intermediate=dense[1], gated=bool(self._shape(index, "ffn_gate")))

    def _shape(self, index: int, tensor: str) -> tuple[int, ...]:
        shape = self.shapes.get(f"blk.{index}.{tensor}.weight", ())
        return shape if len(shape) in (2, 3) else ()
