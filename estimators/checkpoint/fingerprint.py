"""Digests to compare two checkpoints, wherever they are stored."""

import hashlib
import json

from memfit.estimators.checkpoint.manifest import Checkpoint


def config_sha256(checkpoint: Checkpoint) -> str:
    """Return the digest of a checkpoint's config; spacing and order of its keys do not matter."""
    return _digest(checkpoint.config)


def fingerprint_of(checkpoint: Checkpoint) -> str:
    """Return the digest of a checkpoint's config and headers: 64 hexadecimal digits.

    Headers give every tensor's name, type and shape, so every size, but not the values: two
    fine-tunes of one model are the same here, as they are in memory.
    """
    return _digest([config_sha256(checkpoint), sorted(checkpoint.header_sha256)])


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
