"""The bytes of matrices, for the copies that a GPU makes of those on the host."""

import re
from collections.abc import Iterable

from msgspec import Struct

from memfit.estimators.checkpoint.manifest import Tensor

_BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+)")

_HEAD, _TIED = "output.weight", "token_embd.weight"


class Weights(Struct, frozen=True):
    """The largest matrix of each name in any block, and the average size of an element."""

    largest: dict[str, int]
    blocks: int
    """Blocks of the file, with those that predict ahead; 0 without a file."""
    nbytes: int
    elements: int

    def of(self, name: str, elements: int) -> int:
        """Return the bytes of a matrix, at the average where it is not in the file."""
        known = self.largest.get(name)
        return -(-elements * self.nbytes // self.elements) if known is None else known


def read_weights(tensors: Iterable[Tensor], *, nbytes: int, elements: int) -> Weights:
    """Return the matrices of a file; of a config there are none."""
    largest: dict[str, int] = {}
    blocks = 0
    for tensor in tensors:
        found = _BLOCK.fullmatch(tensor.name)
        name = found[2] if found else tensor.name
        largest[name] = max(tensor.nbytes, largest.get(name, 0))
        blocks = max(blocks, int(found[1]) + 1) if found else blocks
    if _TIED in largest:
        largest.setdefault(_HEAD, largest[_TIED])
    return Weights(largest, blocks, nbytes, max(1, elements))
