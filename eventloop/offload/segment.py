"""Memory that this process and one worker process both see. It holds one parcel at a time: the calls of a lane are in order.

Everything goes this way, and only its place through the pipe, so that writing to the pipe never waits for its reader. The
memory has no name, and is gone with its last process however that ends: there is nothing to clean up or to leak. (Measured
against the pipe and torch.multiprocessing's tensors: benchmarks/README.md.)
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Extent = tuple[int, int]  # offset and length

_ALIGNMENT = 64  # of every part, so that copies run at full speed


class Segment:
    """Bytes shared by two processes: one writes, the other reads.

    Args:
        descriptor: of memory that another process made; without it this makes some.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._writes = descriptor is None
        self.descriptor = _memory() if descriptor is None else descriptor
        self._map: mmap.mmap | None = None

    @property
    def size(self) -> int:
        """Bytes that are mapped."""
        return 0 if self._map is None else len(self._map)

    def write(self, parts: Sequence[Bytes], extents: Sequence[Extent]) -> None:
        """Copy ``parts`` to the places that :func:`lay_out` found for them; the copies leave the GIL to other threads."""
        target = self._bytes(sum(extents[-1]))
        for part, (offset, length) in zip(parts, extents, strict=True):
            target[offset : offset + length] = part

    def read(self, extents: Sequence[Extent], size: int) -> list[Bytes]:
        """Return copies of what is at ``extents`` of a segment of ``size`` bytes."""
        source = self._bytes(size)
        return [source[offset : offset + length].copy() for offset, length in extents]

    def __reduce__(self) -> Any:
        # Works while a process is spawned, which inherits the descriptor, and at no other time.
        return _attach, (DupFd(self.descriptor),)

    def close(self) -> None:
        """Let go of the memory."""
        if self._map is not None:
            self._map.close()
            self._map = None
        os.close(self.descriptor)

    def _bytes(self, needed: int) -> Bytes:
        if self._map is None or needed > self.size:
            # It stays as large as the largest parcel was: the next may be as large.
            size = -(-needed // mmap.PAGESIZE) * mmap.PAGESIZE
            if self._map is not None:
                self._map.close()
            if self._writes:
                os.ftruncate(self.descriptor, size)
            self._map = mmap.mmap(self.descriptor, size, access=mmap.ACCESS_WRITE if self._writes else mmap.ACCESS_READ)
        return np.frombuffer(self._map, np.uint8)


def lay_out(lengths: Sequence[int]) -> list[Extent]:
    """Return a place for each part, one behind the other."""
    extents = []
    offset = 0
    for length in lengths:
        extents.append((offset, length))
        offset += -(-length // _ALIGNMENT) * _ALIGNMENT
    return extents


def _attach(descriptor: Any) -> Segment:
    return Segment(descriptor.detach())


def _memory() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("trainbus")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
