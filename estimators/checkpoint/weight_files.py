"""Which weight files of a directory count, and what they hold.

mlx-lm loads every ``model*.safetensors`` of a directory, index or not, and merges them by tensor
name (mlx_lm/utils.py, load_model); what it loads is what is counted here.
"""

from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from msgspec.structs import replace

from memfit.estimators.base.errors import CheckpointError
from memfit.estimators.base.files import printable
from memfit.estimators.checkpoint.checkpoint_files import CheckpointFiles
from memfit.estimators.checkpoint.manifest import Checkpoint, Index, SkippedFile, Tensor
from memfit.estimators.checkpoint.shards import check_series, list_some, read_index

SAFETENSORS_INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"
_TORCH_SUFFIXES = (".bin", ".pt", ".pth")
_TRAINING_STEMS = (
    "optimizer",
    "random_states",
    "rng_state",
    "scaler",
    "scheduler",
    "trainer_state",
    "training_args",
)


class _Role(Enum):
    """What a file is to the model, by its name; the value says why it would not count."""

    LOADED = "repeats tensors of the files that are counted"
    OTHER = "mlx-lm loads only model*.safetensors"
    ADAPTER = "an adapter, counted on request"
    TRAINING = "state of a training run, not weights"
    TORCH = "a PyTorch file; mlx-lm loads only model*.safetensors"
    GGUF = "a GGUF file; name it to size it for llama.cpp"


def is_weight_file(name: str) -> bool:
    """Tell whether a file of this name holds weights, an adapter or the state of a training."""
    return _role(name) is not None


def with_weights(
    checkpoint: Checkpoint, files: CheckpointFiles, names: Sequence[str]
) -> Checkpoint:
    """Return a checkpoint with the weights among a folder's files, and those that do not count.

    Where the only weights are PyTorch's, ``weight_bytes_bound`` is the sum of the file sizes.

    Raises:
        CheckpointError: when a file that counts is missing, unreadable or inconsistent.
    """
    roles = {name: role for name in names if (role := _role(name)) is not None}
    counted, checkpoint = _counted(checkpoint, files, roles)
    others = [name for name in roles if name not in set(counted)]
    skipped_files = filter(None, (_left_out(files, name, roles[name].value) for name in others))
    return replace(checkpoint, skipped_files=(*checkpoint.skipped_files, *skipped_files))


def _counted(
    checkpoint: Checkpoint, files: CheckpointFiles, roles: dict[str, _Role]
) -> tuple[list[str], Checkpoint]:
    index = read_index(files, SAFETENSORS_INDEX)
    if loaded := _of(roles, _Role.LOADED):
        merged = _merged(checkpoint, files, loaded, index)
        warnings = _index_warnings(files, loaded, merged, index)
        return loaded, replace(merged, warnings=merged.warnings + warnings)
    if others := _of(roles, _Role.OTHER):
        others = sorted(index.files) if index else others
        merged = _merged(checkpoint, files, others, index)
        text = f"mlx-lm loads only model*.safetensors; counted {list_some(others)} in their place"
        return others, replace(
            merged,
            warnings=(f"{printable(files.label)}: {text}", *merged.warnings),
            has_other_names=True,
        )
    if torch := _of(roles, _Role.TORCH):
        torch = _torch_set(files, torch)
        return torch, _bounded(checkpoint, files, torch)
    text = "no weight files; the weights are derived from config.json"
    return [], replace(checkpoint, warnings=(f"{printable(files.label)}: {text}",))


def _role(name: str) -> _Role | None:
    if name.startswith("model") and name.endswith(".safetensors"):
        return _Role.LOADED
    suffix = Path(name).suffix.lower()
    if name.startswith(".") or suffix not in (".safetensors", ".gguf", *_TORCH_SUFFIXES):
        return None
    if suffix == ".gguf":
        return _Role.GGUF
    if name.startswith(_TRAINING_STEMS):
        return _Role.TRAINING
    if "adapter" in name:
        return _Role.ADAPTER
    return _Role.OTHER if suffix == ".safetensors" else _Role.TORCH


def _of(roles: dict[str, _Role], wanted: _Role) -> list[str]:
    return [name for name, role in roles.items() if role is wanted]


def _merged(
    checkpoint: Checkpoint, files: CheckpointFiles, names: list[str], index: Index | None
) -> Checkpoint:
    check_series(files.label, names)
    merged: dict[str, Tensor] = {}
    skipped_files, repeating = [], []
    digests = []
    file_bytes = header_bytes = larger_bytes = 0
    names = _in_order(names, index)
    for name, header in zip(names, files.headers(names, index), strict=True):
        repeated = [tensor for tensor in header.tensors if tensor.name in merged]
        larger_bytes += sum(max(0, new.nbytes - merged[new.name].nbytes) for new in repeated)
        if repeated:
            repeating.append(name)
        if repeated and len(repeated) == len(header.tensors):
            skipped_files.append(
                SkippedFile(printable(name), header.file_bytes, _Role.LOADED.value)
            )
            continue
        for tensor in header.tensors:
            merged.setdefault(tensor.name, tensor)
        file_bytes += header.file_bytes
        header_bytes += header.header_bytes
        digests.append((name, header.sha256))
    return replace(
        checkpoint,
        tensors=tuple(merged.values()),
        file_bytes=file_bytes,
        header_bytes=header_bytes,
        shards=len(names) - len(skipped_files),
        skipped_files=tuple(skipped_files),
        warnings=_repeat_warnings(files, repeating, larger_bytes),
        header_sha256=tuple(sorted(digests)),
    )


def _in_order(names: list[str], index: Index | None) -> list[str]:
    # When two files hold a tensor, the copy in an indexed file or in model.safetensors counts.
    indexed = index.files if index else frozenset[str]()
    return sorted(names, key=lambda name: (name not in indexed, name != "model.safetensors", name))


def _repeat_warnings(
    files: CheckpointFiles, repeating: list[str], larger_bytes: int
) -> tuple[str, ...]:
    if not repeating:
        return ()
    text = (
        f"{printable(files.label)}: {list_some(repeating)} hold tensors that other files hold too; "
        "mlx-lm merges them in the order the file system lists them; one copy is counted"
    )
    return (f"{text}, the other may take {larger_bytes} bytes more" if larger_bytes else text,)


def _index_warnings(
    files: CheckpointFiles, loaded: list[str], weights: Checkpoint, index: Index | None
) -> tuple[str, ...]:
    if index is None:
        return ()
    place = f"{printable(files.label)}: {SAFETENSORS_INDEX} names"
    present = {tensor.name for tensor in weights.tensors or ()}
    others, tensors = sorted(index.files - set(loaded)), sorted(index.weight_map.keys() - present)
    warnings = []
    if others:
        warnings.append(f"{place} {list_some(others)}, but mlx-lm loads only model*.safetensors")
    if tensors:
        warnings.append(f"{place} tensors that no counted file holds: {list_some(tensors)}")
    return tuple(warnings)


def _torch_set(files: CheckpointFiles, names: list[str]) -> list[str]:
    if index := read_index(files, TORCH_INDEX):
        return sorted(index.files)
    return [name for name in names if name.startswith("pytorch_model")] or names


def _bounded(checkpoint: Checkpoint, files: CheckpointFiles, names: list[str]) -> Checkpoint:
    check_series(files.label, names)
    bound = sum(files.pytorch_file_bytes(name) for name in names)
    text = "only PyTorch files; their size is an upper bound, and mlx-lm cannot load them"
    return replace(
        checkpoint,
        weight_bytes_bound=bound,
        file_bytes=bound,
        shards=len(names),
        warnings=(f"{printable(files.label)}: {text}",),
    )


def _left_out(files: CheckpointFiles, name: str, reason: str) -> SkippedFile | None:
    try:
        return SkippedFile(printable(name), files.size(name), reason)
    except CheckpointError:
        return None  # a directory or a dead link by that name holds nothing to leave out
