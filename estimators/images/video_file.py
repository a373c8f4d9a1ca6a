"""The frames that mlx-vlm samples from a video file, by its header, with OpenCV as mlx-vlm."""

import os
from pathlib import Path
from typing import Any

from memfit.estimators.base.errors import InputError, MachineError
from memfit.estimators.base.files import open_regular, printable
from memfit.estimators.base.images import VideoSize

# mlx_vlm/utils.py, DEFAULT_VIDEO_SAMPLING: frames a second, fewest, most, and in pairs.
_RATE, _FEWEST, _MOST, _PAIR = 2, 4, 768, 2


def video_file_size(path: Path) -> VideoSize:
    """Return the frames that mlx-vlm takes from a file, and their pixels.

    Raises:
        CheckpointError: when the file cannot be read.
        InputError: when it is no video, or has too few frames.
        MachineError: when OpenCV is not installed.
    """
    with open_regular(path):  # OpenCV would also take a pattern of names, or a device
        pass
    cv2 = _opencv()
    video = cv2.VideoCapture(str(path.absolute()), cv2.CAP_FFMPEG)
    names = ("FRAME_COUNT", "FPS", "FRAME_WIDTH", "FRAME_HEIGHT")
    count, rate, width, height = (video.get(getattr(cv2, f"CAP_PROP_{name}")) for name in names)
    video.release()
    if not (count >= 1 and width >= 1 and height >= 1):
        raise InputError(f"{printable(path)}: no video that OpenCV can read")
    frames = sampled(int(count), rate or 1.0)
    if frames < _PAIR:
        raise InputError(f"{printable(path)}: mlx-vlm takes a video of at least {_PAIR} frames")
    return VideoSize(frames, int(width), int(height))


def sampled(count: int, rate: float) -> int:
    """Return how many of a video's frames mlx-vlm samples (mlx_vlm/utils.py, load_video).

    >>> sampled(300, 30.0), sampled(9, 30.0), sampled(3, 30.0), sampled(100_000, 24.0)
    (20, 4, 2, 768)
    """
    most = min(_MOST, count) // _PAIR * _PAIR
    wanted = min(max(count / rate * _RATE, _FEWEST), most)
    return int(wanted // _PAIR) * _PAIR


def _opencv() -> Any:
    # It writes to standard error about a file that is damaged.
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
    os.environ.setdefault("OPENCV_LOG_LEVEL", "SILENT")
    try:
        import cv2
    except ImportError:
        raise MachineError(
            "a video file is read with OpenCV, which is not installed: install memfit[vlm], or give"
            " a folder of its frames"
        ) from None
    return cv2
