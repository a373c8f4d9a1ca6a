"""The files of a model's processor, strictly read."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from msgspec import Struct

from memfit.estimators.base.errors import ConfigError, UnsupportedError
from memfit.estimators.base.files import short
from memfit.estimators.base.images import Images
from memfit.estimators.base.reading.section import Reading, Section, json_section
from memfit.estimators.checkpoint.manifest import Checkpoint
from memfit.estimators.images.plan import ImagePlan, TokenRun

IMAGE_FILE = "preprocessor_config.json"
PROCESSOR_FILE = "processor_config.json"
VIDEO_FILE = "video_preprocessor_config.json"
TOKENIZER_FILE = "tokenizer_config.json"
MAX_BYTES = 4_000_000
MAX_VALUES = 200_000
MAX_SIDE = 2**16
MAX_PIXELS = 2**32
MAX_SIZES = 256
ONE_TOKEN = TokenRun("text", 1)
"""A tag, a break of a line, a start or an end."""


class FileSettings(Section):
    """A section of a processor's file; a missing key has the default of the family."""

    def edge(self, key: str, default: int) -> int:
        """Return a side in pixels: of an integer, or of a square of {height, width}."""
        height, width = self.pair(key, default)
        if height != width:
            raise self.fail(key, f"{height} and {width}: this processor takes squares only")
        return height

    def pair(self, key: str, default: int) -> tuple[int, int]:
        """Return height and width: of an integer, a list of them, or {height, width}."""
        value = self._take(key, default)
        if isinstance(value, dict):
            place = self.sub(key)
            for edge in ("longest_edge", "shortest_edge"):
                if place.has(edge):
                    return (place.count(edge, most=MAX_SIDE),) * 2
            return place.count("height", most=MAX_SIDE), place.count("width", most=MAX_SIDE)
        if isinstance(value, list) and len(value) in (1, 2):
            sides = [self._checked(key, side, 1, MAX_SIDE) for side in value]
            return sides[0], sides[-1]
        return (self._checked(key, value, 1, MAX_SIDE),) * 2

    def pixels(self, default: tuple[int, int]) -> tuple[int, int]:
        """Return the fewest and the most pixels, as Qwen's processors and those like them say it.

        Source: mlx_vlm/models/qwen3_vl/processing_qwen3_vl.py, _qwen_vl_image_kwargs.
        """
        size = self.sub("size")
        least = size.count("shortest_edge", default[0], most=MAX_PIXELS)
        most = size.count("longest_edge", default[1], most=MAX_PIXELS)
        return (
            self.count("min_pixels", least, most=MAX_PIXELS),
            self.count("max_pixels", most, most=MAX_PIXELS),
        )

    def sub(self, key: str) -> "FileSettings":
        """Return a nested section; an absent one is empty."""
        value = self._take(key, {})
        if not isinstance(value, dict):
            raise self.fail(key, f"expected an object, got {short(value)}")
        return FileSettings(value, self.reading, self._at(key))

    def flag(self, key: str, *, default: bool) -> bool:
        """Return a boolean; a null is the default."""
        value = self._take(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"expected true or false, got {short(value)}")
        return value

    def ratio(self, key: str, default: float) -> float:
        """Return a positive number."""
        value = self._take(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 2**32:
            raise self.fail(key, f"expected a positive number, got {short(value)}")
        return float(value)

    def sizes(self, key: str, default: list[list[int]]) -> list[tuple[int, int]]:
        """Return a list of pairs of height and width."""
        value = self._list(key, self._take(key, default))
        if len(value) > MAX_SIZES:
            raise self.fail(key, f"{len(value)} sizes; at most {MAX_SIZES} can be read")
        return [(self._pair_side(key, pair, 0), self._pair_side(key, pair, 1)) for pair in value]

    def _pair_side(self, key: str, pair: Any, index: int) -> int:
        return self._checked(key, self._list(key, pair, 2)[index], 1, MAX_SIDE)


class ProcessorFiles(Struct, frozen=True):
    """What the files of a processor say; an empty section where there is no file."""

    config: FileSettings
    """Of config.json."""
    processor: FileSettings
    image: FileSettings
    """Of the image processor, wherever it is kept."""
    video: FileSettings
    tokenizer: FileSettings
    are_there: bool
    """Whether there is any file of the image processor."""


def processor_files(checkpoint: Checkpoint) -> ProcessorFiles:
    """Return the files of a checkpoint's processor.

    The image processor's part of processor_config.json comes before preprocessor_config.json, and
    Qwen's processors read both.

    Raises:
        CheckpointError: when a file is unreadable or too large.
        ConfigError: when one is not a JSON object.
        UnreachableError: when files are remote and cannot be reached.
    """
    processor = _section(checkpoint, PROCESSOR_FILE)
    image, nested = _section(checkpoint, IMAGE_FILE), processor.sub("image_processor")
    if nested.values:
        image = FileSettings({**image.values, **nested.values}, nested.reading, nested.place)
    video, nested = _section(checkpoint, VIDEO_FILE), processor.sub("video_processor")
    return ProcessorFiles(
        config=_settings(checkpoint.config, checkpoint.config_name),
        processor=processor,
        image=image,
        video=nested if nested.values and not video.values else video,
        tokenizer=_section(checkpoint, TOKENIZER_FILE),
        are_there=bool(image.values or processor.values),
    )


def _section(checkpoint: Checkpoint, name: str) -> FileSettings:
    """The object of a file, empty where there is no such file."""
    path = PurePath(checkpoint.config_name).with_name(name)
    files = checkpoint.others
    if files is None or not files.exists(name):
        return _settings({}, str(path))
    content = files.read(name, limit=MAX_BYTES)
    read = json_section(content, path, what="the file", max_values=MAX_VALUES, error=ConfigError)
    return FileSettings(read.values, read.reading)


def _settings(values: Mapping[str, Any], name: str) -> FileSettings:
    return FileSettings(values, Reading(name, ConfigError))


class Processor(Struct, frozen=True, kw_only=True):
    """What one family's processor makes of images; its fields are what models of it differ in."""

    takes_videos: bool = False
    one_image: bool = False
    """Whether it takes one image alone."""

    def plan(self, files: ProcessorFiles, inputs: Images) -> ImagePlan:
        """Return the plan of all images and videos, of which it takes as many.

        Raises:
            InputError: for an image that the processor refuses.
        """
        raise NotImplementedError

    def require(self, files: ProcessorFiles, inputs: Images) -> None:
        """Check that mlx-vlm's processor takes videos, or several images, where there are some.

        Raises:
            UnsupportedError: when it does not.
        """
        place = f"{files.config.reading.name}: mlx-vlm's processor of this model takes"
        if inputs.videos and not self.takes_videos:
            raise UnsupportedError(f"{place} no videos")
        if self.one_image and len(inputs.each_image()) > 1:
            raise UnsupportedError(f"{place} one image")
