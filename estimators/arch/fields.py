"""Config fields: read once, and named when nobody read them.

A key nobody read is a size nobody counted: it is named, never dropped. Keys that are known to
change no byte under mlx-lm are listed here, in one place for all families.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from memfit.estimators.base.errors import ConfigError
from memfit.estimators.base.files import printable, short
from memfit.estimators.base.reading.section import MAX_VALUE, REQUIRED, Reading, Section
from memfit.estimators.base.reading.strict_json import Place

MAX_LAYERS = 4096


def config_fields(config: Mapping[str, Any], name: str, place: Place = ()) -> "Fields":
    """Return the fields of a config; ``name`` is how messages name its file."""
    return Fields(config, Reading(name, ConfigError), place)


class Fields(Section):
    """A section of a config that knows which keys were read."""

    missing: ClassVar[str] = "missing; the model class needs it"

    def __init__(self, values: Mapping[str, Any], reading: Reading, place: Place = ()) -> None:
        super().__init__(values, reading, place)
        self._read: set[str] = set()
        self.sections: list[Fields] = []

    def is_list(self, key: str) -> bool:
        """Whether the key holds a list; looking is not reading."""
        return isinstance(self.values.get(key), list)

    def given(self, key: str) -> bool:
        """Whether the key is there, also as null; looking is not reading."""
        return key in self.values

    def null(self, key: str) -> bool:
        """Whether the key is there and null, which overrides a default of mlx-lm's classes."""
        return key in self.values and self.values[key] is None

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return a boolean; a null is false, as Python has it, whatever the default is."""
        value = self._take(key, REQUIRED if default is None else default)
        if default is not None and self.null(key):
            return False
        if not isinstance(value, bool):
            raise self.fail(key, f"expected true or false, got {short(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number that sizes are derived from, such as an expansion factor."""
        value = self._take(key, REQUIRED if default is None else default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 2**40:
            raise self.fail(key, f"expected a positive number, got {short(value)}")
        return value

    def counts(self, key: str, length: int | None = None, *, least: int = 1) -> list[int] | None:
        """Return a list of integers (one integer is for all), or None when absent."""
        value = self._take(key, None)
        if value is None:
            return None
        if length is not None and not isinstance(value, list):
            return [self._checked(key, value, least, MAX_VALUE)] * length
        items = self._list(key, value, length)
        return [
            self._checked(f"{key}[{i}]", item, least, MAX_VALUE) for i, item in enumerate(items)
        ]

    def texts(self, key: str, length: int | None = None) -> list[str] | None:
        """Return a list of strings, or None when absent."""
        value = self._take(key, None)
        if value is None:
            return None
        for i, item in enumerate(self._list(key, value, length)):
            if not isinstance(item, str):
                raise self.fail(f"{key}[{i}]", f"expected a string, got {short(item)}")
        return list(value)

    def items(self, key: str, length: int | None = None) -> list[Any] | None:
        """Return a list of anything, or None when absent; its items are the caller's to check."""
        value = self._take(key, None)
        return None if value is None else self._list(key, value, length)

    def section(self, key: str) -> "Fields":
        """Return a nested section; an absent one is empty."""
        section = self.untracked(key)
        self.sections.append(section)
        return section

    def untracked(self, key: str) -> "Fields":
        """Return a nested section that leaves its unread keys to the caller."""
        value = self._take(key, {})
        if not isinstance(value, dict):
            raise self.fail(key, f"expected an object, got {short(value)}")
        return Fields(value, self.reading, (*self.place, key))

    def with_overrides(
        self, forced: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
    ) -> "Fields":
        """Return this section with values put in, as a model class puts them in.

        What either of the two reads, both have read.
        """
        values = {**(defaults or {}), **self.values, **forced}
        section = Fields(values, self.reading, self.place)
        section._read, section.sections = self._read, self.sections
        return section

    def require_multiple(self, key: str, value: int, unit_key: str, unit: int) -> None:
        """Raise when the value of ``key`` is no multiple of another key's, as heads must be."""
        if value % unit:
            raise self.fail(
                key, f"{value} is not a multiple of {unit_key} {unit}; heads share keys in groups"
            )

    def require_kinds(
        self, key: str, kinds: Sequence[str], known: Sequence[str], needed: Sequence[str] = ()
    ) -> None:
        """Raise when a layer's kind is not known, or no layer is of a kind the class needs."""
        for index, kind in enumerate(kinds):
            if kind not in known:
                expected = " or ".join(known)
                raise self.fail(f"{key}[{index}]", f"expected {expected}, got {kind[:40]!r}")
        for kind in needed:
            if kind not in kinds:
                raise self.fail(key, f"no layer is {kind}; the model class needs one")

    def layers(self, key: str = "num_hidden_layers", default: int | None = None) -> int:
        """Return the number of layers, which bounds the work that follows."""
        return self.count(key, default, most=MAX_LAYERS)

    def expect(self, key: str, value: Any) -> None:
        """Raise when the key is there and contradicts what mlx-lm's class always takes."""
        given = self._take(key, value)
        if given != value:
            problem = f"{short(given)}, but mlx-lm's model class takes {short(value)} always"
            raise self.fail(key, problem)

    def required_flag(self, key: str) -> bool:
        """Return a boolean that must be there; a null is false, as Python has it."""
        return not self.null(key) and self.flag(key)

    def count_or_auto(self, key: str, automatic: int) -> int:
        """Return an integer, or ``automatic`` where the value is "auto"."""
        return automatic if self._take(key, REQUIRED) == "auto" else self.count(key)

    def chars(self, key: str) -> list[str]:
        """Return the letters of a text, or of a list of them."""
        value = self._take(key, REQUIRED)
        return list(value) if isinstance(value, str) else self.texts(key) or []

    def ignore(self, *keys: str) -> None:
        """Mark keys that this family's model class reads without any effect on bytes."""
        self._read.update(self.values.keys() & set(keys))

    def read(self) -> dict[str, Any]:
        """Return the keys that a getter asked for, with their values; None where absent."""
        return {key: self.values.get(key) for key in self._read}

    def unread(self) -> dict[str, Any]:
        """Return the keys, with their values, that no getter asked for."""
        return {key: value for key, value in self.values.items() if key not in self._read}

    def _take(self, key: str, default: Any) -> Any:
        self._read.add(key)
        value = self.values.get(key)
        return self._absent(key, default) if value is None else value


_STRUCTURAL = """
    layer head expert dim size window rank block state conv kernel group chunk interval pattern
    freq mlp attn attention mixer moe ssm mamba latent index sparse shared vocab compress width
    depth channel expand ngram memory cache recurrent hidden skip dense linear delta
    """.split()

_IGNORED_PATTERN = (
    r"(^|_)(token_ids?|token_index|token|dropout|drop|eps|epsilon|theta|base|coef|alpha|beta|std"
    r"|initializer_range|scale|multiplier|scaling|act|activation|method|type|dtype|version|impl"
    r"|implementation|init|rate|prob|loss|limit|path|name|softcap|softcapping|cap|fmt)(_|$)"
    r"|^(rope|rotary|_|transformers|output_|return_|id2|label2|begin_|bos|eos|pad|sep|decoder_start"
    r"|auto_map|architectures|quantization|torch|training|use_cache|generation|prefix|tokenizer)"
)

# Keys that name sizes of what mlx-lm never builds, or that only training and other runtimes use.
_IGNORED = frozenset(
    """
    chunk_size_feed_forward cross_attention_hidden_size add_cross_attention is_encoder_decoder
    pruned_heads num_return_sequences num_beams num_beam_groups no_repeat_ngram_size
    encoder_no_repeat_ngram_size tie_encoder_decoder is_decoder cache_implementation
    gradient_checkpointing use_cache num_labels
    num_nextn_predict_layers mtp_transformer_layers num_mtp_modules mtp_num_hidden_layers
    mtp_num_layers ep_size
    mtp_use_dedicated_embeddings num_mtp_layers use_mtp
    original_max_position_embeddings for_llm_compressor
    """.split()
)


def looks_structural(key: str) -> bool:
    """Return whether a key is named as those that shape a model are."""
    return any(part in key for part in _STRUCTURAL) and not is_ignored(key)


def is_ignored(key: str) -> bool:
    """Return whether a key is named as those that change no byte are."""
    return re.search(_IGNORED_PATTERN, key) is not None


def unread_keys(fields: Fields) -> Iterator[str]:
    """Yield every key, as messages show it, that looks structural, is on and was not read."""
    for key, value in fields.unread().items():
        if _is_off(value) or key in _IGNORED:
            continue
        if looks_structural(key):
            yield printable(fields.full_path(key))
    for section in fields.sections:
        yield from unread_keys(section)


def _is_off(value: Any) -> bool:
    """Whether the value switches its feature off or cannot be a size."""
    return value in (None, False, 0, "", [], {}) or isinstance(value, (float, str))
