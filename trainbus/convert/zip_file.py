"""Lay out an uncompressed zip file as torch does: every record begins at a multiple of 64, and its checksum follows it.

The files have the bytes that torch's own writer makes of the same records. Sizes and offsets beyond 32 bits are given in 64.

Source: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, and ``caffe2/serialize/inline_container.cc`` of torch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final

from trainbus.eventloop.checkpoint.commit import crc32
from trainbus.eventloop.seams import Seam

Part = bytes | memoryview

_FOLDER: Final = b"archive/"
_ALIGNMENT: Final = 64
_FLAGS: Final = 0x0800
"""Names are UTF-8."""
_CHECKED: Final = 0x0008
"""The checksum follows the record. An empty one has none."""
LARGE: Final = Seam(0xFFFFFFFF)
_MANY: Final = 0xFFFF
_VERSION: Final = (0x031E, 45)
"""Made by, and needed to read: 4.5 has sizes of 64 bits."""

_LOCAL: Final = struct.Struct("<4s5H3I2H")
_CENTRAL: Final = struct.Struct("<4s6H3I5H2I")
_CHECK: Final = struct.Struct("<4s3I")
_CHECK_64: Final = struct.Struct("<4sI2Q")
_END_64: Final = struct.Struct("<4sQ2H2I4Q")
_LOCATOR: Final = struct.Struct("<4sIQI")
_END: Final = struct.Struct("<4s4H2IH")


class ZipLayout:
    """The position of each record in a file; ``records`` are names and contents."""

    def __init__(self, records: Sequence[tuple[str, Part]]) -> None:
        self._records: list[tuple[bytes, int, bytes, bytes, Part]] = []
        """Name, offset, header, extra field of the directory, content."""
        at = directory = 0
        for name, content in records:
            full = _FOLDER + name.encode()
            extra = _wide(len(content), at)
            header = _header(full, extra, at, len(content))
            self._records.append((full, at, header, extra, content))
            at += len(header) + len(content) + (_CHECK_64.size if extra else _CHECK.size) * bool(content)
            directory += _CENTRAL.size + len(full) + len(extra)
        self._directory = at
        #: The size of the file.
        self.bytes = at + directory + _END_64.size + _LOCATOR.size + _END.size

    def parts(self) -> Iterator[Part]:
        """Yield the file, part by part; the checksum of a record is made when its turn comes."""
        directory: list[bytes] = []
        for name, at, header, extra, content in self._records:
            crc, size = crc32((content,)), len(content)
            yield header
            if size:
                yield content
                yield (_CHECK_64 if extra else _CHECK).pack(b"PK\7\x08", crc, size, size)
            fits, offset = min(size, LARGE.value), min(at, LARGE.value)
            entry = (b"PK\1\2", 0, 0, _flags(size), 0, 0, 0, crc, fits, fits, len(name), len(extra), 0, 0, 0, 0, offset)
            directory += (_CENTRAL.pack(*entry), name, extra)
        joined = b"".join(directory)
        yield joined
        yield _end(len(self._records), len(joined), self._directory)


def _wide(size: int, at: int) -> bytes:
    """Return the extra field with what 32 bits cannot hold."""
    numbers = (size, size) * (size >= LARGE.value) + (at,) * (at >= LARGE.value)
    return struct.pack(f"<2H{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""


def _header(name: bytes, extra: bytes, at: int, size: int) -> bytes:
    unpadded = at + _LOCAL.size + len(name) + len(extra) + 4
    padding = -unpadded % _ALIGNMENT
    extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    return _LOCAL.pack(b"PK\3\4", 0, _flags(size), 0, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra


def _flags(size: int) -> int:
    return _FLAGS | _CHECKED if size else _FLAGS


def _end(count: int, size: int, at: int) -> bytes:
    few = min(count, _MANY)
    return (
        _END_64.pack(b"PK\6\6", _END_64.size - 12, *_VERSION, 0, 0, count, count, size, at)
        + _LOCATOR.pack(b"PK\6\7", 0, at + size, 1)
        + _END.pack(b"PK\5\6", 0, 0, few, few, min(size, LARGE.value), min(at, LARGE.value), 0)
    )
