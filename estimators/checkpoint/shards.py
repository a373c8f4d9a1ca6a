"""Which of a directory's files belong together: the index, and series of numbered shards."""

import re
from collections.abc import Iterable
from itertools import islice
from pathlib import PurePath, PurePosixPath

from memfit.estimators.base.errors import CheckpointError
from memfit.estimators.base.files import printable
from memfit.estimators.base.reading.json_members import object_members
from memfit.estimators.checkpoint.checkpoint_files import CheckpointFiles
from memfit.estimators.checkpoint.manifest import Index

MAX_INDEX_BYTES = 100_000_000  # DeepSeek-V3's, with 91,991 names, is 9 MB
MAX_INDEX_NAMES = 215_000
MAX_INDEX_FILES = 10_000
_NAMES_SHOWN = 5
# DeepSeek-V3 writes model-00001-of-000163.safetensors: the two numbers may differ in width.
_SHARD = re.compile(r"(?P<stem>.*?)(?P<number>[0-9]{1,6})-of-(?P<total>[0-9]{1,6})(?P<rest>\..*)")


def read_index(files: CheckpointFiles, name: str) -> Index | None:
    """Return the index with this name, or None if there is none; all files it names exist.

    Raises:
        CheckpointError: when it is not JSON, has no weight_map of names, names files that are
            missing, or leads out of its directory.
    """
    if not files.exists(name):
        return None
    path = files.label / name
    weight_map = _weight_map(files.read(name, limit=MAX_INDEX_BYTES), path)
    shards = frozenset(weight_map.values())
    for shard in shards:
        _reject_leaving(shard, path)
    missing = files.missing(sorted(shards))
    _reject_missing(missing, f"{printable(path)}: of the files it names")
    return Index(weight_map, shards)


def _weight_map(text: bytes, path: PurePath) -> dict[str, str]:
    place = f"{printable(path)}: the index"
    weight_map: dict[str, str] = {}
    # Many tensors name the same few files.
    files: dict[str, str] = {}
    for name, file in object_members(
        text, place, error=CheckpointError, max_values=MAX_INDEX_NAMES, inside="weight_map"
    ):
        if type(file) is not str:
            raise CheckpointError(f"{printable(path)}: weight_map is not an object of file names")
        if name in weight_map:
            raise CheckpointError(f"{place} has the name '{printable(name)}' twice")
        weight_map[name] = files.setdefault(file, file)
        if len(files) > MAX_INDEX_FILES:
            raise CheckpointError(f"{place} names more than {MAX_INDEX_FILES} files")
    if not weight_map:
        raise CheckpointError(f"{printable(path)}: weight_map is not an object of file names")
    return weight_map


def check_series(place: PurePath, names: Iterable[str]) -> None:
    """Check that of every series ``-00001-of-0000N`` among ``names`` no shard is missing.

    Raises:
        CheckpointError: naming the missing shards.
    """
    series: dict[tuple[str, str, str], dict[int, int]] = {}
    for name in names:
        if shard := _SHARD.fullmatch(name):
            numbers = series.setdefault((shard["stem"], shard["total"], shard["rest"]), {})
            numbers[int(shard["number"])] = len(shard["number"])
    for (stem, total, rest), numbers in series.items():
        first = 0 if 0 in numbers else 1
        width = max(numbers.values())
        expected = range(first, first + int(total))
        absent = (number for number in expected if number not in numbers)
        # A name may claim a million shards: only those that the message shows are written out.
        missing = [
            f"{stem}{number:0{width}d}-of-{total}{rest}" for number in islice(absent, _NAMES_SHOWN)
        ]
        count = len(expected) - sum(number in expected for number in numbers)
        _reject_missing(missing, f"{printable(place)}: of {int(total)} shards", count)


def shard_total(name: str) -> int:
    """Return how many shards the series has that ``name`` is one of; 1 when it is of none.

    >>> shard_total("model-00001-of-00004.safetensors")
    4
    """
    shard = _SHARD.fullmatch(name)
    return int(shard["total"]) if shard else 1


def list_some(names: Iterable[str], count: int | None = None) -> str:
    """Return names for a message, the first few of ``count`` or of those given."""
    every = [printable(name) for name in names]
    more = (len(every) if count is None else count) - _NAMES_SHOWN
    return ", ".join(every[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _reject_missing(missing: list[str], place: str, count: int | None = None) -> None:
    """Raise where files are missing; of ``count`` in all only the first need be given."""
    if missing:
        count = len(missing) if count is None else count
        raise CheckpointError(
            f"{place}, {count} are missing: {list_some(missing, count)}; fetch them first"
        )


def _reject_leaving(name: str, path: PurePath) -> None:
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if not parts or ".." in parts or parts[0].startswith("/") or ":" in name or "\0" in name:
        raise CheckpointError(
            f"{printable(path)}: weight_map names '{printable(name)}', which is not a file in its"
            " directory"
        )
