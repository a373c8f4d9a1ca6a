"""What is common to the questions, and the workload as it is requested."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import UNSET, Struct
from msgspec.structs import replace

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import short
from memfit.estimators.base.images import Images, ImageSize, VideoSize
from memfit.estimators.base.reading.section import number_or_text
from memfit.estimators.base.setting_names import setting
from memfit.estimators.base.units import parse_count
from memfit.estimators.base.workload import Workload
from memfit.estimators.runtimes.runtime import Runtime

Value = TypeVar("Value")
AnyQuestion = TypeVar("AnyQuestion", bound="Question")


class Question(Struct, frozen=True, kw_only=True):
    """Settings of one kind; a setting that is None was not given.

    Each is annotated with what reads it from a value or a text. The library and the command line
    `read` them; a policy, whose mistakes have a line each, sets values that it has read.
    """

    @classmethod
    def read(cls: type[AnyQuestion], given: Mapping[str, Any]) -> AnyQuestion:
        """Return the question of settings that are given by their names.

        Raises:
            InputError: naming the setting, when a value cannot be read or is out of range.
        """
        values = {}
        for name, value in given.items():
            if value is not None:
                reader, *_ = cls.__annotations__[name].__metadata__
                values[name] = read_setting(name, reader, value)
        return cls(**values)


def read_setting(name: str, read: Callable[[Any], Value], value: Any) -> Value:
    """Return what ``read`` makes of the value of a setting.

    Raises:
        InputError: naming the setting, when the value cannot be read.
    """
    try:
        return read(value)
    except InputError as error:
        raise InputError(f"{setting(name)}: {error}") from None


def integer(value: Any) -> int:
    """Return a whole number."""
    if type(value) is not int:
        raise InputError(f"expected a whole number, got {short(value)}")
    return value


def flag(value: Any) -> bool:
    """Return True or False."""
    if not isinstance(value, bool):
        raise InputError(f"expected True or False, got {short(value)}")
    return value


def text(value: Any) -> str:
    """Return a string."""
    if not isinstance(value, str):
        raise InputError(f"expected a string, got {short(value)}")
    return value


def path(value: Any) -> Path:
    """Return a path."""
    if not isinstance(value, str | os.PathLike):
        raise InputError(f"expected a path, got {short(value)}")
    return Path(value)


Integer = Annotated[int | None, integer]
Text = Annotated[str | None, text]
PathSetting = Annotated[Path | None, path]


def each(
    read: Callable[[Any], Value], separator: str | None = None
) -> Callable[[Any], tuple[Value, ...]]:
    """Return a reader of one value, of a list, or of a string with separators.

    Raises:
        InputError: for an empty list of what strings separate too: a string has at least one.
    """

    def several(value: Any) -> tuple[Value, ...]:
        if isinstance(value, str) and separator:
            value = [part.strip() for part in value.split(separator)]
        if separator and value in ([], ()):
            raise InputError(f"expected one or more, got {short(value)}")
        return tuple(map(read, value if isinstance(value, list | tuple) else [value]))

    return several


DEFAULT_CONTEXT = 4096
RUNTIME_DEFAULTS = ("prefill_step", "kv_bits", "kv_group_size", "quantized_kv_start")
"""The settings that every runtime has its own defaults of."""


def _image(value: Any) -> ImageSize:
    from memfit.estimators.images.sizes import read_image

    return read_image(str(path(value)))


def _video(value: Any) -> VideoSize:
    from memfit.estimators.images.sizes import read_video

    return read_video(str(path(value)))


TokenCount = Annotated[int | None, number_or_text(parse_count)]
OWN_CONTEXTS = ("model", "auto")
"""A context that follows from the model: all of it, or what the runtime takes where none is set."""


def _context(value: Any) -> int | str:
    if isinstance(value, str) and value.strip().lower() in OWN_CONTEXTS:
        return value.strip().lower()
    return number_or_text(parse_count)(value)


class WorkloadQuestion(Question, frozen=True, kw_only=True):
    """A workload; counts are tokens or sequences.

    Raises:
        InputError: when a count is out of range, or settings exclude each other.
    """

    context: Annotated[int | str | None, _context] = None
    """The prompt with no generation, in place of ``prompt_tokens`` and ``max_tokens``; ``model`` is
    the longest of the model, ``auto`` what the runtime takes where none is set."""
    prompt_tokens: TokenCount = None
    max_tokens: TokenCount = None
    batch: Annotated[int, integer] = 1
    prefill_batch: Annotated[int, integer] = 8
    decode_batch: Annotated[int, integer] = 32
    prefill_step: Integer = None
    kv_bits: Integer = None
    """0 for a cache that no runtime quantises."""
    kv_group_size: Integer = None
    quantized_kv_start: Integer = None
    max_kv_size: Integer = None
    cached_tokens: TokenCount = None
    image: Annotated[tuple[ImageSize, ...], each(_image)] = ()
    video: Annotated[tuple[VideoSize, ...], each(_video)] = ()

    @classmethod
    def of(cls, workload: Workload) -> "WorkloadQuestion":
        """Return the question for a whole workload, in which every setting counts as given."""
        settings = (name for name in cls.__struct_fields__ if name in workload.__struct_fields__)
        values = {name: getattr(workload, name) for name in settings}
        if workload.images:
            values |= {"image": workload.images.images, "video": workload.images.videos}
        return cls(**{**values, "kv_bits": workload.kv_bits or 0})

    def __post_init__(self) -> None:
        known = self.of_context(DEFAULT_CONTEXT) if self.has_own_context else self
        known.under(None)  # for its errors

    def under(self, runtime: Runtime | None) -> Workload:
        """Return the workload, with a runtime's own defaults where nothing was given.

        With None they are mlx-lm's.
        """
        prompt, generated = self.tokens()
        given = {name: getattr(self, name) for name in RUNTIME_DEFAULTS}
        settings = {
            name: getattr(runtime, name) if value is None else value
            for name, value in given.items()
            if runtime or value is not None
        }
        if self.kv_bits is not None:
            settings["kv_bits"] = self.kv_bits or None
        return Workload(
            prompt_tokens=prompt,
            max_tokens=generated,
            batch=self.batch,
            prefill_batch=self.prefill_batch,
            decode_batch=self.decode_batch,
            max_kv_size=self.max_kv_size,
            cached_tokens=self.cached_tokens or 0,
            images=Images(self.image, self.video) if self.has_images else UNSET,
            **settings,
        )

    def varied(self, settings: Mapping[str, Any]) -> "WorkloadQuestion":
        """Return the same with other settings.

        Raises:
            InputError: when a count is out of range.
        """
        prompt, generated = self.tokens()
        whole = {"context": None, "prompt_tokens": prompt, "max_tokens": generated}
        return replace(self, **{**whole, **settings})

    def tokens(self) -> tuple[int, int]:
        """Return the tokens of the prompt and of the generation.

        Raises:
            InputError: when settings exclude each other.
        """
        if self.context is not None and (self.prompt_tokens, self.max_tokens) != (None, None):
            prompt, generated = setting("prompt_tokens"), setting("max_tokens")
            raise InputError(
                f"{setting('context')} excludes {prompt} and {generated}: use those two"
            )
        if isinstance(self.context, str):
            raise InputError(f"{setting('context')} {self.context}: give a number of tokens here")
        whole = DEFAULT_CONTEXT if self.context is None else self.context
        return (whole if self.prompt_tokens is None else self.prompt_tokens), self.max_tokens or 0

    @property
    def has_own_context(self) -> bool:
        """Whether the context follows from the model."""
        return isinstance(self.context, str)

    def of_context(self, tokens: int) -> "WorkloadQuestion":
        """Return the same with a number of tokens as the context."""
        return replace(self, context=tokens)

    @property
    def has_images(self) -> bool:
        """Whether the prompt has images or videos."""
        return bool(self.image or self.video)
