"""The worst inputs within the readers' limits, each with its reader."""

import json
from collections.abc import Callable
from struct import pack

from memfit.estimators.base.reading.json_members import MAX_MEMBER_CHARACTERS
from memfit.estimators.checkpoint.config import MAX_CONFIG_BYTES, MAX_CONFIG_VALUES
from memfit.estimators.checkpoint.gguf.cursor import MAX_STRINGS
from memfit.estimators.checkpoint.gguf.header import MAX_KEPT_ELEMENTS, MAX_KEYS
from memfit.estimators.checkpoint.hub.listing import MAX_FILES, MAX_LISTING_BYTES
from memfit.estimators.checkpoint.local.samples import MAX_SAMPLE_BYTES
from memfit.estimators.checkpoint.safetensors import MAX_HEADER_BYTES, MAX_NAME_BYTES, MAX_TENSORS
from memfit.estimators.checkpoint.shards import MAX_INDEX_NAMES
from memfit.probes.measurement_json import MAX_COLLECTION_VALUES, to_text
from tests.gguf.writing import text
from tests.probes.measurements import measurement

EMOJI = "😀"


def safetensors(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def padded(start: str, size: int, end: str) -> bytes:
    return (start + "x" * (size - len(start.encode()) - len(end)) + end).encode()


def many_tensors() -> bytes:
    width = MAX_NAME_BYTES - 6
    entry = '{"dtype":"F32","shape":[0,4096],"data_offsets":[0,0]}'
    names = (f'"{"a" * width}{i:06d}":{entry}' for i in range(MAX_TENSORS - 1))
    return safetensors(f"{{{','.join(names)}}}".encode())


def kept_arrays() -> bytes:
    array = pack("<IIQ", 9, 10, MAX_KEPT_ELEMENTS) + b"\xff" * 8 * MAX_KEPT_ELEMENTS
    keys = b"".join(text(f"{i:06d}") + array for i in range(MAX_KEYS))
    return b"GGUF" + pack("<IQQ", 3, 0, MAX_KEYS) + keys


def index() -> bytes:
    names = {f"{i:0100d}": "model.safetensors" for i in range(MAX_INDEX_NAMES - 9)}
    return json.dumps({"weight_map": names}, separators=(",", ":")).encode()


def collection() -> bytes:
    record = to_text(measurement())
    count = (MAX_COLLECTION_VALUES - 9) // (record.count(",") + 9)
    records = ",".join([json.dumps(json.loads(record))] * count)
    return f'{{"schema":"memfit.measurements/1","measurements":[{records}]}}'.encode()


def listing() -> bytes:
    entry = {"rfilename": "", "blobId": "1" * 40, "lfs": {"sha256": "2" * 64, "size": 2**40}}
    count = MAX_LISTING_BYTES // (len(json.dumps(entry)) + 12)
    files = [{**entry, "rfilename": f"{i:08d}"} for i in range(count)]
    return json.dumps({"sha": "0" * 40, "siblings": files}).encode()


def smallest_files() -> bytes:
    files = ",".join(f'{{"rfilename":"{i}"}}' for i in range(2 * MAX_FILES - 9))
    return f'{{"sha":"{"0" * 40}","siblings":[{files}]}}'.encode()


WORST: dict[str, tuple[str, Callable[[], bytes]]] = {
    "a header of 100 MB with one emoji": (
        "safetensors",
        lambda: safetensors(padded(f'{{"__metadata__":{{"a":"{EMOJI}', MAX_HEADER_BYTES, '"}}')),
    ),
    "metadata of emojis": (
        "safetensors",
        lambda: safetensors(
            f'{{"__metadata__":{{"a":"{EMOJI * (MAX_MEMBER_CHARACTERS - 99)}"}}}}'.encode()
        ),
    ),
    "as many tensors as there may be": ("safetensors", many_tensors),
    "as many strings as there may be": (
        "gguf",
        lambda: (
            b"GGUF"
            + pack("<IQQ", 3, 0, 1)
            + text("a")
            + pack("<IIQ", 9, 8, MAX_STRINGS)
            + text("a" * 40) * MAX_STRINGS
        ),
    ),
    "as many kept arrays as there may be": ("gguf", kept_arrays),
    "a config of one emoji": ("config", lambda: padded(f'{{"a":"{EMOJI}', MAX_CONFIG_BYTES, '"}')),
    "as many keys as there may be": (
        "config",
        lambda: json.dumps({f"{i:09d}": 1.5 for i in range(MAX_CONFIG_VALUES - 9)}).encode(),
    ),
    "as many names as there may be": ("index", index),
    "as many files as the Hub may list": ("listing", listing),
    "as many files with short names": ("listing", smallest_files),
    "as many measurements as there may be": ("collection", collection),
    "as many items as there may be": (
        "sample",
        lambda: b"a: [" + b"1," * ((MAX_SAMPLE_BYTES - 9) // 2) + b"1]",
    ),
}
