"""The sizes of images and videos as a user gives them: numbers, or a file with a header to read."""

import os
import re
import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from memfit.estimators.base.errors import InputError
from memfit.estimators.base.files import open_regular, printable
from memfit.estimators.base.images import MOST_IMAGES, ImageSize, VideoSize
from memfit.estimators.images.video_file import video_file_size

_IMAGE = re.compile(r"(\d{1,9})[x×](\d{1,9})(?: ?[x×](\d{1,9}))?", re.ASCII)
_VIDEO = re.compile(r"(\d{1,9})[x×](\d{1,9})[x×](\d{1,9})", re.ASCII)
_FORM = "write its pixels as WIDTHxHEIGHT, such as 1024x768"
# Markers of a frame's header: all of 0xC0 to 0xCF but those of tables (ITU T.81, table B.1).
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_EXIF, _ORIENTATION = b"Exif\x00\x00", 0x0112
_TURNED = (5, 6, 7, 8)
"""Orientations that mlx-vlm turns by a quarter (mlx_vlm/utils.py, load_image)."""
_MOST_SEGMENTS = 4096


def read_image(text: str) -> ImageSize:
    """Return the size of a text such as 1024x768, of several with their number, or of a file.

    Raises:
        CheckpointError: when a file cannot be read.
        InputError: when it is neither a size nor an image file, or the size is out of range.
    """
    if size := _IMAGE.fullmatch(text.strip()):
        width, height, count = size.groups(default="1")
        return ImageSize(int(width), int(height), int(count))
    path = Path(os.path.expanduser(text))
    if not text or not os.path.lexists(path):
        raise InputError(f"{printable(text)!r}: no such image file; {_FORM}")
    return ImageSize(*image_file_size(path))


def read_video(text: str) -> VideoSize:
    """Return the size of a text such as 16x448x448, of a video file, or of a folder of its frames.

    Raises:
        CheckpointError: when a file cannot be read.
        InputError: when it is none of these, frames differ, or the size is out of range.
        MachineError: for a file, when OpenCV is not installed.
    """
    if size := _VIDEO.fullmatch(text.strip()):
        frames, width, height = map(int, size.groups())
        return VideoSize(frames, width, height)
    path = Path(os.path.expanduser(text))
    if path.is_file():
        return video_file_size(path)
    if not text or not path.is_dir():
        raise InputError(
            f"{printable(text)!r}: write a video as FRAMESxWIDTHxHEIGHT, such as 16x448x448, or"
            " give a file, or a folder with its frames as images"
        )
    files = frame_files(path)
    sizes = {image_file_size(each) for each in files}
    if len(sizes) > 1:
        raise InputError(f"{printable(path)}: its frames are of {len(sizes)} sizes; give one")
    (pixels,) = sizes
    return VideoSize(len(files), *pixels)


def frame_files(folder: Path) -> list[Path]:
    """Return the frames in a folder in the order of their names, which is that of the video.

    Raises:
        InputError: when there are none or too many, or the folder cannot be read.
    """
    try:
        names = [entry.name for entry in islice(os.scandir(folder), MOST_IMAGES + 1)]
    except OSError as error:
        raise InputError(f"{printable(folder)}: {error.strerror}") from None
    files = sorted(folder / name for name in names if not name.startswith("."))
    if not 1 <= len(names) <= MOST_IMAGES or not files:
        raise InputError(f"{printable(folder)}: give a folder with 1 to {MOST_IMAGES} frames")
    return files


def image_file_size(path: Path) -> tuple[int, int]:
    """Return width and height of an image file, from its header alone.

    Raises:
        CheckpointError: when the file cannot be read.
        InputError: when it is no PNG, JPEG, WebP or GIF, or its header is cut short.
    """
    with open_regular(path) as file:
        try:
            found = _size(file)
        except (struct.error, IndexError):
            found = None
    if found is None or 0 in found:
        raise InputError(f"{printable(path)}: no PNG, JPEG, WebP or GIF; {_FORM}")
    return found


def _size(file: BinaryIO) -> tuple[int, int] | None:
    head = file.read(32)
    if head.startswith(b"\x89PNG\r\n\x1a\n") and head[12:16] == b"IHDR":
        return _pair(struct.unpack(">II", head[16:24]))
    if head[:6] in (b"GIF87a", b"GIF89a"):
        return _pair(struct.unpack("<HH", head[6:10]))
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return _webp(head)
    return _jpeg(file) if head.startswith(b"\xff\xd8") else None


def _pair(values: tuple[int, ...]) -> tuple[int, int]:
    width, height = values
    return width, height


def _webp(head: bytes) -> tuple[int, int] | None:
    """Source: the container's specification, developers.google.com/speed/webp/docs."""
    kind, data = head[12:16], head[20:]
    if kind == b"VP8X":
        low, middle, high, *height = struct.unpack("<6B", data[4:10])
        return 1 + low + (middle << 8) + (high << 16), 1 + int.from_bytes(height, "little")
    if kind == b"VP8L" and data[0] == 0x2F:
        (bits,) = struct.unpack("<I", data[1:5])
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and data[3:6] == b"\x9d\x01\x2a":
        width, height = struct.unpack("<HH", data[6:10])
        return width & 0x3FFF, height & 0x3FFF
    return None


def _jpeg(file: BinaryIO) -> tuple[int, int] | None:
    turned = False
    for marker, length in _segments(file):
        if marker in _FRAMES:
            height, width = struct.unpack(">xHH", file.read(5))
            return (height, width) if turned else (width, height)
        if marker == 0xE1:
            turned = turned or _orientation(file.read(length)) in _TURNED
    return None


def _segments(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """Yield marker and length of each segment, with the file at its content."""
    place = 2
    for _ in range(_MOST_SEGMENTS):
        file.seek(place)
        start, marker, length = struct.unpack(">BBH", file.read(4))
        if start != 0xFF or length < 2:
            return
        if marker == 0xFF:  # a fill byte
            place += 1
            continue
        yield marker, length - 2
        place += 2 + length


def _orientation(content: bytes) -> int:
    """Return the orientation of an Exif segment, 1 where it has none."""
    if not content.startswith(_EXIF):
        return 1
    tiff = content[len(_EXIF) :]
    order = "<" if tiff[:2] == b"II" else ">"
    (start,) = struct.unpack(f"{order}I", tiff[4:8])
    (count,) = struct.unpack(f"{order}H", tiff[start : start + 2])
    for index in range(count):
        entry = tiff[start + 2 + 12 * index :][:12]
        tag, _, _, value = struct.unpack(f"{order}HHIH2x", entry)
        if tag == _ORIENTATION:
            return int(value)
    return 1
