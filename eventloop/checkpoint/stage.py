"""Staging: copy a tree so that training may go on at once, while the copy is written elsewhere."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Final

import msgspec
import torch

from eventloop.checkpoint.header import DIGEST_BYTES, render
from eventloop.checkpoint.layout import Batch, Changed, Layout
from eventloop.checkpoint.overlap import Copy, Overlap, Pair
from eventloop.checkpoint.tree import Flat, flatten, join
from eventloop.errors import CheckpointError

_pack: Final = msgspec.msgpack.Encoder().encode
_Sources = tuple[torch.Tensor, ...]

_SMALL: Final = 16 << 10
"""Bytes up to which tensors that can be joined are copied sooner than they are handed to another thread."""


class _Memory:
    """One flat byte buffer, its view per tensor, and who reads or writes it."""

    def __init__(self, layout: Layout) -> None:
        self.flat = torch.empty(layout.bytes, dtype=torch.uint8, pin_memory=layout.pinned)
        self.views = layout.views(self.flat)
        self.targets = [self._target(batch) for batch in layout.batches]
        # Weak: a StagedTree that is dropped without release() gives its memory back as well.
        self.lease: weakref.ref[StagedTree] | None = None
        # Copies from CUDA devices that may be under way.
        self.events: list[torch.cuda.Event] = []
        # What an Overlap copies here; it goes on when the StagedTree is released meanwhile.
        self.late: Copy | None = None

    def _target(self, batch: Batch) -> list[torch.Tensor] | torch.Tensor:
        views = self.views[batch.start : batch.stop]
        if batch.joined is None:
            return views
        begin = views[0].storage_offset() * views[0].itemsize
        end = begin + sum(view.nbytes for view in views)
        return self.flat[begin:end].view(views[0].dtype).view(batch.joined)

    def wait(self) -> None:
        """Wait for the copies from CUDA devices."""
        for event in self.events:
            event.synchronize()
        self.events = []

    @property
    def in_use(self) -> bool:
        holder = self.lease() if self.lease is not None else None
        return (holder is not None and not holder.released) or (self.late is not None and not self.late.done)


class StageBuffer:
    """Staging memory kept between saves.

    As long as names, shapes, dtypes and aliases of the tensors stay the same, the memory and the layout are used again.
    Memory that a `StagedTree` holds is never written: another is allocated beside it, and kept. `stage` with one buffer is
    for one thread at a time; `StagedTree.release` is for any thread.
    """

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._memories: list[_Memory] = []

    @property
    def bytes(self) -> int:
        """The memory held, in bytes."""
        return sum(memory.flat.numel() for memory in self._memories)

    def clear(self) -> None:
        """Forget memory and layout; a `StagedTree` keeps its own memory alive."""
        self._layout = None
        self._memories = []

    def _layout_for(self, flat: Flat) -> Layout:
        if self._layout is None:
            self._layout = Layout(flat)
        return self._layout

    def _memory(self, layout: Layout) -> _Memory:
        for memory in self._memories:
            if not memory.in_use:
                return memory
        self._memories.append(_Memory(layout))
        return self._memories[-1]


class StagedTree:
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
        """The file without its digest: header, tensors, tree. Waits for copies that are still under way.

        Raises:
            CheckpointError: after `release`; or a tensor changed while an `Overlap` was copying it.
        """
        memory = self._memory
        if memory is None:
            raise CheckpointError("this StagedTree was released (it was written already?); stage the tree again")
        if memory.late is not None:
            memory.late.finish()
        memory.wait()
        return self._header, memory.flat.numpy().data, self._tree


def stage(tree: object, buffer: StageBuffer | None = None, *, overlap: Overlap | None = None) -> StagedTree:
    """Copy `tree` so that the caller may change it at once.

    Tensors that are the same memory with the same shape, strides and dtype (tied weights) are copied once and are one
    tensor when loaded. Containers that are met twice are stored twice. Copies from CUDA devices are only enqueued, on
    the current streams, into pinned memory; changes enqueued later on those streams come after them.

    Args:
        tree: what a checkpoint can hold.
        buffer: memory to use again.
        overlap: copies what only its optimizers change later, while the caller goes on; their next step waits for it.

    Raises:
        CheckpointValueError: for a value that a checkpoint cannot hold, with its path.
    """
    flat = flatten(tree)
    buffer = StageBuffer() if buffer is None else buffer
    try:
        layout, memory = _fill(flat, buffer, overlap)
    except CheckpointError:
        raise
    except (Changed, RuntimeError):
        # The tensors are not those of the layout, perhaps in a way that only the copy found out; or they cannot be staged,
        # and then making a new layout says why.
        buffer.clear()
        layout, memory = _fill(flat, buffer, overlap)
    staged = StagedTree(layout, memory, _pack((layout.packed_slots, layout.packed_foreign, flat.rest)))
    memory.lease = weakref.ref(staged)
    return staged


@torch.no_grad()
def _fill(flat: Flat, buffer: StageBuffer, overlap: Overlap | None) -> tuple[Layout, _Memory]:
    layout = buffer._layout_for(flat)
    layout.check_places(flat)
    memory = buffer._memory(layout)
    memory.wait()  # for copies of a StagedTree that nobody wrote, on what may have been another stream
    memory.late = None
    if overlap is None and not layout.pinned:
        for (_, sources), target in zip(layout.matched(flat), memory.targets, strict=True):
            _copy_batch(target, sources)
        return layout, memory
    pairs: list[Pair] = []
    for (batch, sources), target in zip(layout.matched(flat), memory.targets, strict=True):
        if not layout.pinned and isinstance(target, torch.Tensor) and target.nbytes <= _SMALL * len(sources):
            _copy_batch(target, sources)
        else:
            pairs += _paired(memory, batch, sources)
    later: list[Pair] = []
    if overlap is not None and pairs:
        pairs, later = overlap.divide(pairs)
    _copy_pairs(memory, pairs)
    if overlap is not None and later:
        memory.late = overlap.start(later, partial(_name, flat, layout))
    return layout, memory


def _copy_batch(target: list[torch.Tensor] | torch.Tensor, sources: _Sources) -> None:
    if isinstance(target, list):
        torch._foreach_copy_(target, sources)
    elif sources[0].dim():
        torch.cat(sources, out=target)
    else:
        torch.stack(sources, out=target)


def _paired(memory: _Memory, batch: Batch, sources: _Sources) -> Iterator[Pair]:
    return map(Pair, memory.views[batch.start : batch.stop], sources, range(batch.start, batch.stop))


def _name(flat: Flat, layout: Layout, position: int) -> str:
    index = layout.order[position]
    return join(flat.parents[index], flat.keys[index])


def _copy_pairs(memory: _Memory, pairs: list[Pair]) -> None:
    by_device: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source, _ in pairs:
        targets, sources = by_device.setdefault(source.device, ([], []))
        targets.append(target)
        sources.append(source)
    memory.events = [event for device, pair in by_device.items() if (event := _copy_from(device, *pair)) is not None]


def _copy_from(device: torch.device, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> torch.cuda.Event | None:
    if device.type != "cuda":
        torch._foreach_copy_(targets, sources)
        return None
    torch._foreach_copy_(targets, sources, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    event.record(torch.cuda.current_stream(device))
    return event
