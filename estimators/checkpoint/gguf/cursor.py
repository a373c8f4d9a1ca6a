"""Reading a GGUF header value by value, forwards, in pieces of bounded size."""

import hashlib
from struct import Struct

from memfit.estimators.base.errors import CheckpointError
from memfit.estimators.base.files import printable
from memfit.estimators.checkpoint.byte_source import ByteSource

# A header with a vocabulary of 262,144 and its merges is 16 MB; a larger one is not a header.
MAX_HEADER_BYTES = 100_000_000
# Both tokens and merges of the largest vocabularies in use are half a million.
MAX_STRINGS = 2_000_000
_FIRST_PIECE = 2**17
_LARGEST_PIECE = 2**22


class Cursor:
    """A position in a source, with the bytes around it; every length is checked before use.

    ``sha256`` is of the bytes passed over so far. Methods raise CheckpointError, naming the file,
    where the header ends too early or is longer than ``MAX_HEADER_BYTES``.
    """

    def __init__(self, source: ByteSource, name: str) -> None:
        self.name = name
        self._source = source
        self._limit = min(source.size, MAX_HEADER_BYTES)
        self._buffer = b""
        self._start = 0  # offset of the buffer
        self._at = 0  # position in the buffer
        self._piece = _FIRST_PIECE
        self._strings_left = MAX_STRINGS
        self._digest = hashlib.sha256()
        self.use_byte_order("<")

    @property
    def offset(self) -> int:
        """Bytes passed over so far."""
        return self._start + self._at

    @property
    def sha256(self) -> str:
        """The digest of the bytes passed over so far, hexadecimal."""
        digest = self._digest.copy()
        digest.update(self._buffer[: self._at])
        return digest.hexdigest()

    def use_byte_order(self, order: str) -> None:
        """Read numbers little-endian (``<``) or big-endian (``>``) from here on."""
        self.byte_order = order
        self._u32, self._u64 = Struct(order + "I"), Struct(order + "Q")

    def take(self, count: int, what: str) -> bytes:
        """Return the next ``count`` bytes; ``what`` names them in messages."""
        self._need(count, what)
        taken = self._buffer[self._at : self._at + count]
        self._at += count
        return taken

    def u32(self, what: str) -> int:
        """Return the next unsigned integer of 32 bits."""
        number: int = self._u32.unpack(self.take(4, what))[0]
        return number

    def u64(self, what: str) -> int:
        """Return the next unsigned integer of 64 bits."""
        number: int = self._u64.unpack(self.take(8, what))[0]
        return number

    def pass_over(self, count: int, what: str) -> None:
        """Go ``count`` bytes further without keeping them."""
        self._require(count, what)
        while count:
            passed = min(count, len(self._buffer) - self._at)
            self._at += passed
            count -= passed
            if count:
                self._need(1, what)

    def pass_over_strings(self, count: int, what: str) -> None:
        """Go beyond ``count`` strings, each a length of 64 bits and its bytes."""
        self._require(8 * count, what)
        self._strings_left -= count
        if self._strings_left < 0:
            raise CheckpointError(
                f"{self.name}: {printable(what)}: more than {MAX_STRINGS} strings"
            )
        length_at = self._u64.unpack_from
        while count:
            self._need(8, what)
            buffer, at, last = self._buffer, self._at, len(self._buffer) - 8
            length = 0
            while count and at <= last:
                (length,) = length_at(buffer, at)
                at += 8 + length
                count -= 1
            if at <= len(buffer):
                self._at = at
            else:
                self._at = at - length
                self.pass_over(length, what)

    def _require(self, count: int, what: str) -> None:
        """Raise where ``count`` more bytes would lead beyond the header."""
        if count > self._limit - self.offset:
            fault = (
                f"the header is longer than {MAX_HEADER_BYTES} bytes"
                if self._limit < self._source.size
                else f"the file ends in it, after {self._source.size} bytes; fetch it again"
            )
            raise CheckpointError(f"{self.name}: {printable(what)}: {fault}")

    def _need(self, count: int, what: str) -> None:
        """Hold at least ``count`` bytes from the position on."""
        if count <= len(self._buffer) - self._at:
            return
        self._require(count, what)
        self._digest.update(self._buffer[: self._at])
        self._buffer = self._buffer[self._at :]
        self._start += self._at
        self._at = 0
        end = self._start + len(self._buffer)
        wanted = min(max(self._piece, count - len(self._buffer)), self._limit - end)
        self._buffer += self._source.read(end, wanted)
        self._piece = min(2 * self._piece, _LARGEST_PIECE)
