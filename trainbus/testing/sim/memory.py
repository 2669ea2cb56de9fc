"""Memory of the simulated device: host memory that torch takes for memory of another device.

DLPack has a device type for extensions, which torch reads as its PrivateUse1 backend. A capsule made here becomes a plain
``torch.Tensor`` of the simulated device, with a storage, views and a version counter of torch's own.
"""

from __future__ import annotations

import atexit
import ctypes
import heapq
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

HOST, DEVICE = 1, 12
"""DLPack's device types: the CPU, and an extension."""

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

# Torch calls the deleter of a capsule at any time, perhaps while an exception is on its way, so it must not be Python.
# This one takes a pointer, too, and sets at most 128 bytes there to zero: a slot whose memory torch has freed has no address.
_DELETER = ctypes.cast(ctypes.CDLL(None).sigemptyset, ctypes.c_void_p).value
_WORDS = 17
"""64-bit words of a slot: DLPack's struct, what the deleter overwrites besides, and the length."""
_U8 = 1 << 32 | 8 << 40 | 1 << 48 | 1
"""Of one dimension and of type uint8, as DLPack's struct has it."""

lock = threading.RLock()
"""Of all that the device does, by any thread."""
_slots = np.zeros((1 << 14, _WORDS), np.uint64)
_free = list(range(len(_slots)))
_top = 0
"""The number of slots that were ever used."""
_live: dict[int, tuple[Block, int]] = {}
"""What torch has not freed, by address: the memory, and its slot."""


class Block:
    """The memory of one storage. Queued kernels hold it, so that they can run after torch has freed the storage."""

    def __init__(self, nbytes: int, kind: int, index: int, home: Any) -> None:
        with torch.inference_mode(mode=False):  # in which the owner may be
            self.memory = torch.empty(max(nbytes, 1), dtype=torch.uint8)
        self.storage = self.memory.untyped_storage()
        self.nbytes, self.kind, self.index = nbytes, kind, index
        self.home = home
        """The stream that it was allocated on; None for pinned memory."""
        self.users: dict[Any, None] = {}
        """Other streams that use it, as far as they were recorded."""
        self.poison()

    def poison(self) -> None:
        """Fill the memory with NaN of each floating dtype, which is -1 for integers."""
        self.memory.fill_(0xFF)


@dataclass(frozen=True, slots=True)  # not a tuple, which torch would look into
class Spec:
    """Where the elements of a tensor are."""

    block: Block
    dtype: torch.dtype
    offset: int
    shape: Sequence[int]
    strides: Sequence[int]

    def tensor(self) -> torch.Tensor:
        """Return a CPU tensor of this memory."""
        return torch.empty(0, dtype=self.dtype).set_(self.block.storage, self.offset, self.shape, self.strides)


def allocate(block: Block) -> torch.Tensor:
    """Return a flat tensor of bytes over ``block``."""
    global _top
    address = block.memory.data_ptr()
    with lock:
        slot = heapq.heappop(_free)
        _top = max(_top, slot + 1)
        words = _slots[slot]
        begin = words.ctypes.data
        words[:8] = address, block.kind | block.index << 32, _U8, begin + 8 * (_WORDS - 1), 0, 0, 0, _DELETER
        words[-1] = block.nbytes
        _live[address] = block, slot
    made: torch.Tensor = torch.utils.dlpack.from_dlpack(_new_capsule(begin, b"dltensor", None))
    return made


def reclaim() -> list[Block]:
    """Return the blocks that torch has freed since the last call; call it with the lock."""
    addresses = _slots[:_top, 0]
    if addresses.all():
        return []
    freed = [(address, block, slot) for address, (block, slot) in _live.items() if not addresses[slot]]
    for address, _, slot in freed:
        del _live[address]
        heapq.heappush(_free, slot)
        _slots[slot, 0] = 1  # free, and known to be
    return [block for _, block, _ in freed]


@atexit.register
def _forget() -> None:
    """Let torch free what is left without asking for the GIL of an interpreter that has ended."""
    _slots[:, 7] = 0


def block_of(tensor: torch.Tensor) -> Block | None:
    """Return the block of a tensor; None if its memory was not allocated here."""
    found = _live.get(tensor.untyped_storage().data_ptr())
    return None if found is None else found[0]


def block_at(address: int) -> Block:
    """Return the block at an address of the device."""
    return _live[address][0]


def spec_of(tensor: torch.Tensor) -> Spec:
    """Return where the elements of a tensor on the device are."""
    block = block_at(tensor.untyped_storage().data_ptr())
    return Spec(block, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements of memory a shape with these strides spans."""
    return 0 if 0 in shape else 1 + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))


def allocated(index: int) -> int:
    """Return the bytes in use on a device."""
    return sum(
        block.nbytes for block, slot in [*_live.values()] if (block.kind, block.index) == (DEVICE, index) and _slots[slot, 0]
    )
