"""Staging: copy a tree so that training may go on at once, while the copy is written elsewhere."""

from __future__ import annotations

import weakref
from typing import Final

import msgspec
import torch

from eventloop.checkpoint.header import DIGEST_BYTES, render
from eventloop.checkpoint.layout import Layout
from eventloop.checkpoint.tree import Flat, flatten
from eventloop.errors import CheckpointError

_pack: Final = msgspec.msgpack.Encoder().encode


class _Memory:
    """One flat byte buffer, its view per tensor, and who reads it."""

    def __init__(self, layout: Layout) -> None:
        self.flat = torch.empty(layout.bytes, dtype=torch.uint8, pin_memory=layout.pinned)
        self.views = layout.views(self.flat)
        # Weak: a Staged that is dropped without release() gives its memory back as well.
        self.lease: weakref.ref[Staged] | None = None
        # Copies from CUDA devices that may be under way.
        self.events: list[torch.cuda.Event] = []

    def wait(self) -> None:
        """Wait for the copies from CUDA devices."""
        for event in self.events:
            event.synchronize()
        self.events = []

    @property
    def leased(self) -> bool:
        holder = self.lease() if self.lease is not None else None
        return holder is not None and not holder.released


class StageBuffer:
    """Staging memory kept between saves.

    As long as names, shapes, dtypes and aliases of the tensors stay the same, the memory and the layout are used again.
    Memory that a `Staged` holds is never written: another is allocated beside it, and kept. `stage` with one buffer is
    for one thread at a time; `Staged.release` is for any thread.
    """

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._memories: list[_Memory] = []

    @property
    def bytes(self) -> int:
        """The memory held, in bytes."""
        return sum(memory.flat.numel() for memory in self._memories)

    def clear(self) -> None:
        """Forget memory and layout; a `Staged` keeps its own memory alive."""
        self._layout = None
        self._memories = []

    def _room_for(self, flat: Flat) -> tuple[Layout, _Memory]:
        if self._layout is None or not self._layout.fits(flat):
            self.clear()
            self._layout = Layout(flat)
        for memory in self._memories:
            if not memory.leased:
                return self._layout, memory
        self._memories.append(_Memory(self._layout))
        return self._layout, self._memories[-1]


class Staged:
    """A copy of a tree at one moment, ready to be written.

    `write` releases it after the commit; whoever does not write it (or whose write failed) calls `release`.
    """

    def __init__(self, layout: Layout, memory: _Memory, tree: bytes) -> None:
        self._memory: _Memory | None = memory
        self._header = render(layout.start, layout.bytes, len(tree))
        self._tree = tree
        #: The size of the file that `write` makes, in bytes.
        self.bytes: Final = len(self._header) + layout.bytes + len(tree) + DIGEST_BYTES

    @property
    def released(self) -> bool:
        """Whether the memory was given back."""
        return self._memory is None

    def release(self) -> None:
        """Give the memory back to its buffer. Again is fine."""
        self._memory = None

    def pieces(self) -> tuple[bytes, memoryview, bytes]:
        """The file without its digest: header, tensors, tree. Waits for copies from CUDA devices still under way.

        Raises:
            CheckpointError: after `release`.
        """
        if self._memory is None:
            raise CheckpointError("this Staged was released (it was written already?); stage the tree again")
        self._memory.wait()
        return self._header, self._memory.flat.numpy().data, self._tree


def stage(tree: object, buffer: StageBuffer | None = None) -> Staged:
    """Copy `tree` so that the caller may change it at once.

    Tensors that are the same memory with the same shape, strides and dtype (tied weights) are copied once and are one
    tensor when loaded. Containers that are met twice are stored twice. Copies from CUDA devices are only enqueued, on
    the current streams, into pinned memory; changes enqueued later on those streams come after them.

    Raises:
        CheckpointValueError: for a value that a checkpoint cannot hold, with its path.
    """
    flat = flatten(tree)
    buffer = StageBuffer() if buffer is None else buffer
    try:
        layout, memory = buffer._room_for(flat)
        _copy(flat, layout, memory)
    except CheckpointError:
        raise
    except RuntimeError:
        # The tensors were not those of the layout in a way that only the copy found out; or they cannot be staged,
        # and then making a new layout says why.
        buffer.clear()
        layout, memory = buffer._room_for(flat)
        _copy(flat, layout, memory)
    staged = Staged(layout, memory, _pack((layout.packed_slots, layout.packed_foreign, flat.rest)))
    memory.lease = weakref.ref(staged)
    return staged


@torch.no_grad()
def _copy(flat: Flat, layout: Layout, memory: _Memory) -> None:
    memory.wait()  # for copies of a Staged that nobody wrote, on what may have been another stream
    sources = [flat.tensors[index] for index in layout.order]
    if not layout.pinned:
        _copy_from(torch.device("cpu"), memory.views, sources)
        return
    by_device: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for view, source in zip(memory.views, sources, strict=True):
        targets, members = by_device.setdefault(source.device, ([], []))
        targets.append(view)
        members.append(source)
    memory.events = [event for device, pair in by_device.items() if (event := _copy_from(device, *pair)) is not None]


def _copy_from(device: torch.device, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> torch.cuda.Event | None:
    if device.type != "cuda":
        if sources:
            torch._foreach_copy_(targets, sources)
        return None
    torch._foreach_copy_(targets, sources, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    event.record(torch.cuda.current_stream(device))
    return event
