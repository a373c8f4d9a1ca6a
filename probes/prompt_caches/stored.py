"""A prompt's cache on the disk: mlx-lm's file, and its checksum in a second file.

A file appears under its name when all of it, and its checksum, are on the disk.
"""

import hashlib
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from memfit.estimators.base.errors import CheckpointError
from memfit.estimators.base.files import is_there, printable, read_whole, write_atomically
from memfit.estimators.base.unfinished import unfinished_file
from memfit.estimators.plans.offload.session_cache import GROUP_SIZES
from memfit.estimators.runtimes.measurement import Way
from memfit.probes.disk import require_free, sha256_of, sync, unwritable
from memfit.probes.run_monitor import ReportFigures

FULL_BITS = 16
_SUFFIX = ".safetensors"
_CHECKSUM = re.compile(rb"([0-9a-f]{64})  [^\n]+\n")
_CHECKSUM_BYTES = 1024
_NAMED_BITS = re.compile(rf".+-([0-9]{{1,3}})bit{re.escape(_SUFFIX)}")
# Room for the header: it names a few arrays of each layer.
_HEADER_BYTES = 2**20


def file_name(fingerprint: str, tokens: int, bits: int) -> str:
    """Return the name of a stored cache: its model, tokens and bits."""
    return f"{fingerprint[:12]}-{tokens}-{bits}bit{_SUFFIX}"


def metadata_of(fingerprint: str, ids: Sequence[int]) -> dict[str, str]:
    """Return what a stored cache says of itself: its model, and the tokens it is of."""
    return {"model": fingerprint, "prompt": hashlib.sha256(repr(list(ids)).encode()).hexdigest()}


def remove(path: Path) -> None:
    """Remove a stored cache."""
    path.unlink()
    # The checksum goes last: a stored cache always has one.
    _checksum_path(path).unlink(missing_ok=True)


def save(path: Path, caches: Sequence[Any], metadata: dict[str, str]) -> None:
    """Write caches in mlx-lm's format, and their checksum.

    Raises:
        InputError: when they cannot be written; nothing is left.
        MachineError: when the disk is too full.
    """
    from mlx_lm.models.cache import save_prompt_cache

    require_free(path.parent, sum(cache.nbytes for cache in caches) + _HEADER_BYTES)
    try:
        with unfinished_file(path.parent, suffix=_SUFFIX) as (temporary, _):
            save_prompt_cache(str(temporary), list(caches), metadata)
            sync(temporary)
            line = f"{sha256_of(temporary)}  {path.name}\n"
            # First the checksum: a stored cache always has one.
            write_atomically(_checksum_path(path), line.encode(), durable=True)
            os.replace(temporary, path)
            sync(path.parent)
    except (OSError, RuntimeError) as error:  # MLX raises RuntimeError for a full disk
        with suppress(OSError):
            if not is_there(path):
                _checksum_path(path).unlink()
        raise unwritable(path, error) from None


def checked_sha256(path: Path) -> str:
    """Return the checksum of a stored cache that is as it was written.

    Raises:
        CheckpointError: when it is cut short, was changed, or was not stored by memfit.
    """
    remedy = "remove it, or name another directory with --dir"
    checksum = _checksum_path(path)
    if not is_there(checksum):
        raise CheckpointError(
            f"{printable(path)}: was not stored by memfit tune cache: {printable(checksum.name)} is"
            f" missing; {remedy}"
        )
    line = _CHECKSUM.fullmatch(read_whole(checksum, limit=_CHECKSUM_BYTES))
    if line is None:
        raise CheckpointError(f"{printable(checksum)}: is not a checksum; {remedy}")
    digest = sha256_of(path)
    if digest != line[1].decode():
        raise CheckpointError(
            f"{printable(path)}: is cut short or was changed: its checksum differs; {remedy}"
        )
    return digest


def read(path: Path, own: Sequence[Any], metadata: dict[str, str]) -> list[Any]:
    """Return the caches of a file; their arrays are read when they are first used.

    ``own`` are empty caches of the model: a file with others is refused.

    Raises:
        CheckpointError: when the file is damaged, or of another model or prompt.
    """
    import mlx.core as mx
    from mlx.utils import tree_unflatten
    from mlx_lm.models.cache import load_prompt_cache

    try:
        loaded: Any = mx.load(str(path), return_metadata=True)
        found, kinds, _ = tree_unflatten(list(loaded[1].items()))
        del loaded
    except Exception as error:  # noqa: BLE001 - the file may contain anything
        raise _foreign(path, f"mlx-lm cannot read it ({type(error).__name__})") from None
    if found != metadata:
        raise _foreign(path, "it is of another model or prompt")
    names = [type(cache).__name__ for cache in own]
    if len(kinds) != len(names) or any(
        kind not in (name, "QuantizedKVCache") for kind, name in zip(kinds, names, strict=True)
    ):
        raise _foreign(path, "its caches are not those of the model")
    try:
        caches: list[Any] = load_prompt_cache(str(path))
    except Exception as error:  # noqa: BLE001 - the file may contain anything
        raise _foreign(path, f"mlx-lm cannot read it ({type(error).__name__})") from None
    _require_bits(path, caches)
    return caches


def _require_bits(path: Path, caches: Sequence[Any]) -> None:
    """Require that caches are of the bits in the name of their file, if it has any."""
    if not (named := _NAMED_BITS.fullmatch(path.name)):
        return
    bits = int(named[1])
    for cache in caches:
        if type(cache).__name__ == "QuantizedKVCache":
            found = cache.bits
        elif bits == FULL_BITS or quantised(cache, bits)[1]:
            continue
        else:
            found = FULL_BITS
        if found != bits:
            raise _foreign(path, f"its name says {bits} bits, a cache in it has {found}")


def drop_from_page_cache(path: Path) -> bool:
    """Let the system forget a file, so that the next read is from the disk; whether it can."""
    if not hasattr(os, "posix_fadvise"):
        return False
    handle = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def quantised(cache: Any, bits: int) -> tuple[Any, str | None]:
    """Return a cache in fewer bits, or the same one and why it cannot be quantised."""
    kind = type(cache).__name__
    if kind != "KVCache":
        return cache, f"{kind}: mlx-lm does not quantise it"
    if cache.empty():
        return cache, f"{kind}: it is empty"
    widths = (cache.keys.shape[-1], cache.values.shape[-1])
    group = next((size for size in GROUP_SIZES if not any(width % size for width in widths)), None)
    if group is None:
        return cache, f"{kind}: MLX does not quantise rows of {widths[0]} and {widths[1]} values"
    return cache.to_quantized(group_size=group, bits=bits), None


def restored(caches: list[Any], way: Way, report: ReportFigures) -> list[Any]:
    """Return stored caches, which may not be read yet, as one of the ways restores them."""
    import mlx.core as mx

    if way != "lazy":
        mx.eval([cache.state for cache in caches])
    report({})
    if way == "bulk":
        caches = [dequantised(cache) for cache in caches]
        mx.eval([cache.state for cache in caches])
    elif way in ("freeing", "lazy"):
        for index in range(len(caches)):
            caches[index] = dequantised(caches[index])
            mx.eval(caches[index].state)
            report({})
    return caches


def dequantised(cache: Any) -> Any:
    """Return a quantised cache as the one it was made of, any other as it is."""
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache

    if type(cache).__name__ != "QuantizedKVCache":
        return cache
    keys, values = (
        mx.dequantize(packed, scales, biases, group_size=cache.group_size, bits=cache.bits)
        for packed, scales, biases in (cache.keys, cache.values)
    )
    return KVCache.from_state((keys, values, cache.offset))


def _checksum_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _foreign(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{printable(path)}: {why}; remove it, or name another directory with --dir"
    )
