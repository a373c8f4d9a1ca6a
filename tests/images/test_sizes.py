"""Sizes of images: as text, and from the headers of files."""

import struct
import sys
from pathlib import Path

import pytest

from memfit.estimators.base.errors import InputError, MachineError
from memfit.estimators.base.images import Images, ImageSize, VideoSize
from memfit.estimators.images.sizes import image_file_size, read_image, read_video

EXIF_TURNED = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"
FORMATS = {
    "PNG": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", 300, 200),
    "GIF": b"GIF89a" + struct.pack("<HH", 300, 200),
    "JPEG": b"\xff\xd8\xff\xe0\0\x04ab\xff\xc0\0\x11\x08" + struct.pack(">HH", 200, 300),
    "JPEG, turned": b"\xff\xd8\xff\xe1"
    + struct.pack(">H", len(EXIF_TURNED) + 2)
    + EXIF_TURNED
    + b"\xff\xc2\0\x11\x08"
    + struct.pack(">HH", 300, 200),
    "WebP, lossy": b"RIFF\0\0\0\0WEBPVP8 \0\0\0\0\0\0\0\x9d\x01\x2a" + struct.pack("<HH", 300, 200),
    "WebP, lossless": b"RIFF\0\0\0\0WEBPVP8L\0\0\0\0\x2f" + struct.pack("<I", 299 | 199 << 14),
    "WebP, extended": b"RIFF\0\0\0\0WEBPVP8X\0\0\0\0\0\0\0\0" + b"\x2b\x01\0\xc7\0\0",
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_header_of_a_file_has_its_size(name: str, tmp_path: Path) -> None:
    path = tmp_path / "picture"
    path.write_bytes(FORMATS[name] + bytes(40))
    assert image_file_size(path) == (300, 200)
    for length in range(len(FORMATS[name])):
        path.write_bytes(FORMATS[name][:length])
        with pytest.raises(InputError, match="picture: no PNG, JPEG, WebP or GIF"):
            image_file_size(path)


@pytest.mark.parametrize("form", ["PNG", "GIF", "JPEG", "WEBP", "WEBP lossless"])
def test_headers_are_as_pillow_writes_them(form: str, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    path, (kind, _, lossless) = tmp_path / "picture", form.partition(" ")
    image.new("RGB", (123, 45)).save(path, kind, lossless=bool(lossless))
    assert image_file_size(path) == (123, 45)


def test_a_size_is_text_with_a_number_of_images() -> None:
    assert read_image("1024x768") == ImageSize(1024, 768)
    assert read_image("640x480x3") == read_image("640x480 x3") == ImageSize(640, 480, 3)
    assert read_video("16x448x336") == VideoSize(16, 448, 336)
    asked = Images((ImageSize(4, 3, 2),), (VideoSize(2, 5, 6),))
    assert str(asked) == "4x3 x2, video 2x5x6"
    assert asked.each_image() == (ImageSize(4, 3), ImageSize(4, 3))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0x480", "0x480 pixels: a side has from 1 to 65536"),
        ("640x65537", "640x65537 pixels: a side has"),
        ("640x480x0", "give from 1 to 4096 images"),
        ("640x", "'640x': no such image file; write its pixels"),
        ("640*480", "no such image file"),
        ("\0", "no such image file"),
        (".", "is not a regular file"),
    ],
)
def test_what_is_no_image_is_refused(text: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        read_image(text)


def test_what_is_no_video_is_refused() -> None:
    for text in ("16x448", "clip.mp4", "16x448x448x2"):
        with pytest.raises(InputError, match="write a video as FRAMESxWIDTHxHEIGHT"):
            read_video(text)
    with pytest.raises(InputError, match="from 1 to 4096 frames"):
        read_video("5000x4x4")


def test_a_folder_of_frames_is_a_video(tmp_path: Path) -> None:
    header = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
    with pytest.raises(InputError, match="give a folder with 1 to 4096 frames"):
        read_video(str(tmp_path))
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(header + struct.pack(">II", 64, 48))
    (tmp_path / ".hidden").write_text("of the system")
    assert read_video(str(tmp_path)) == VideoSize(3, 64, 48)
    (tmp_path / "9.png").write_bytes(header + struct.pack(">II", 48, 64))
    with pytest.raises(InputError, match="its frames are of 2 sizes"):
        read_video(str(tmp_path))
    (tmp_path / "note.txt").write_text("no frame")
    with pytest.raises(InputError, match=r"note\.txt: no PNG"):
        read_video(str(tmp_path))


def test_a_file_that_is_no_video_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "film.mp4"
    path.write_bytes(b"\0\0\0\x18ftypmp42")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "cv2", None)
        with pytest.raises(MachineError, match="OpenCV, which is"):
            read_video(str(path))
    pytest.importorskip("cv2")
    with pytest.raises(InputError, match=r"film\.mp4: no video that OpenCV can read"):
        read_video(str(path))
