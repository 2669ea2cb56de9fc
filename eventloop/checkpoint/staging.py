"""Stage a tree: copy it, so that training continues at once. Write a staged tree, here or on another thread."""

from __future__ import annotations

import hashlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import Any, Final

import msgspec
import torch

from trainbus.eventloop.checkpoint.commit import DIGEST_BYTES, Pieces, crc32, readable
from trainbus.eventloop.checkpoint.layout import Batch, Changed, Layout, Pair, Tensors, by_device, copy
from trainbus.eventloop.checkpoint.memory import allocate
from trainbus.eventloop.checkpoint.overlap import Overlap
from trainbus.eventloop.checkpoint.rebuild import unflatten
from trainbus.eventloop.checkpoint.store import AnyPath, AsPath, as_path, write_pieces
from trainbus.eventloop.checkpoint.tree import FlatTree, entries_of, with_entries, with_list
from trainbus.eventloop.checkpoint.unpack import ObjectParts
from trainbus.eventloop.device import DeviceEvent, end_of_queue, is_asynchronous, pinned_bytes
from trainbus.eventloop.errors import CheckpointError

_pack: Final = msgspec.msgpack.Encoder().encode

_SMALL: Final = 16 << 10
"""Bytes per tensor up to which an Overlap does not pay: reading versions twice costs the training as much as the copy."""

_ROOM: Final = 1 << 16
"""Bytes of memory beyond those of the tensors, so that small ones may grow or come: where memory is pinned, to allocate all of
it anew costs the training 0.4 to 0.6 seconds per gigabyte (H200)."""

Target = list[torch.Tensor] | torch.Tensor


class _Memory:
    """One flat byte buffer, its view per tensor, and who reads or writes it."""

    def __init__(self, layout: Layout) -> None:
        size = layout.bytes + _ROOM
        self._pinned, self._all = layout.pinned, pinned_bytes(size) if layout.pinned else allocate(size)
        self._layout: Layout | None = None
        self.lay_out(layout)
        # Weak: dropping a StagedTree without release() gives its memory back as well.
        self.lease: weakref.ref[StagedTree] | None = None
        # Copies from devices that may be under way.
        self.events: list[DeviceEvent] = []
        # The copies of an Overlap; they continue if the StagedTree is released before their end.
        self.late: Future[None] | None = None

    def suits(self, layout: Layout) -> bool:
        """Return whether the tensors of a layout have room here, and fill more than half."""
        return layout.pinned == self._pinned and layout.bytes <= self._all.numel() <= 2 * layout.bytes + _ROOM

    def lay_out(self, layout: Layout) -> None:
        """Give the tensors of a layout their views."""
        if self._layout is not layout:
            self.flat = self._all[: layout.bytes]
            self.views = layout.views(self.flat)
            self.targets = [self._target(batch) for batch in layout.batches]
            self._layout = layout  # last: Ctrl-C may strike in here

    @property
    def bytes(self) -> int:
        """The bytes that are held for tensors."""
        return self._all.numel() - _ROOM

    def _target(self, batch: Batch) -> Target:
        views = self.views[batch.start : batch.stop]
        if batch.join is None:
            return views
        begin = views[0].storage_offset() * views[0].itemsize - self.flat.storage_offset()
        end = begin + sum(view.nbytes for view in views)
        return self.flat[begin:end].view(views[0].dtype).view(batch.shape)

    def wait(self) -> None:
        """Wait for the copies from devices."""
        for event in self.events:
            event.synchronize()
        self.events = []

    @property
    def in_use(self) -> bool:
        holder = self.lease() if self.lease is not None else None
        return (holder is not None and not holder.released) or (self.late is not None and not self.late.done())


class StageBuffer:
    """Staging memory kept between saves.

    The layout is used again while names, shapes, dtypes and aliases of the tensors stay the same, the memory while they have
    room in it and fill more than half. Memory that a ``StagedTree`` holds is never written: another buffer is allocated beside
    it, and kept. Only one thread at a time may call ``stage`` with one buffer; any thread may call ``StagedTree.release``.
    """

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._memories: list[_Memory] = []
        self.sparse = False
        """Whether sparse tensors were met, and each tensor is to be looked at."""

    @property
    def bytes(self) -> int:
        """The memory held for tensors, in bytes."""
        return sum(memory.bytes for memory in self._memories)

    def clear(self) -> None:
        """Forget memory and layout; a ``StagedTree`` keeps its own memory alive."""
        self.forget_layout()
        self._memories = []

    def forget_layout(self) -> None:
        """Lay the tensors of the next tree out anew."""
        self._layout = None

    @torch.no_grad()
    def fill(self, flat: FlatTree, overlap: Overlap | None) -> tuple[Layout, _Memory]:
        """Copy the tensors of a tree into free memory; raise Changed, or RuntimeError, if they do not fit the layout."""
        layout = self._layout = self._layout or Layout(flat)
        layout.check(flat)
        free = [one for one in self._memories if not one.in_use]
        used = [one for one in self._memories if one not in free]
        free = [one for one in free if one.suits(layout)]
        self._memories = used + free[1:]  # before more is allocated
        # Not in the list until it is filled: after Ctrl-C in here a thread may still write to it.
        memory = free[0] if free else _Memory(layout)
        memory.wait()  # for the copies of a StagedTree that was never written, perhaps on another stream
        memory.late = None
        memory.lay_out(layout)
        try:
            self._copy(flat, overlap, layout, memory)
        except Changed:  # before copies from a device are queued, which another layout would not expect
            self._memories.append(memory)
            raise
        self._memories.append(memory)
        return layout, memory

    def _copy(self, flat: FlatTree, overlap: Overlap | None, layout: Layout, memory: _Memory) -> None:
        at_once, pairs, moved = _Copying(flat.tensors), list[Pair](), False
        for batch, target in zip(layout.batches, memory.targets, strict=True):
            small = isinstance(target, torch.Tensor) and target.nbytes <= _SMALL * (batch.stop - batch.start)
            if not layout.elsewhere and (overlap is None or small):
                at_once.batches.append((batch, target))
                continue
            sources = batch.pick(flat.tensors)
            batch.check(sources, joins=False)
            moved |= batch.moved(sources)
            pairs += map(Pair, memory.views[batch.start : batch.stop], sources, range(batch.start, batch.stop))
        if overlap is not None and len(at_once.batches) > 1:
            helper = overlap.help(at_once.run)
            try:
                moved |= at_once.run()
            except BaseException:
                if not helper.cancel():
                    wait([helper])
                raise
            moved |= not helper.cancel() and helper.result()
        else:
            moved |= at_once.run()
        layout.check_aliases(flat.tensors, moved=moved)
        later: list[Pair] = []
        if overlap is not None and pairs:
            pairs, later = overlap.divide(pairs)
        for device, group in by_device(pairs).items():
            copy(group, non_blocking=is_asynchronous(device))
            if is_asynchronous(device):
                memory.events.append(end_of_queue(device))
        if overlap is not None and later:
            memory.late = overlap.start(later, lambda position: flat.path(layout.order[position]))


class StagedTree:
    """A copy of a tree at one moment, ready to be written.

    ``write`` releases it after the commit. Call ``release`` if it is not written, or if writing it fails.
    """

    def __init__(self, layout: Layout, memory: _Memory, rest: msgspec.Raw) -> None:
        self._memory: _Memory | None = memory
        self._slots = layout.slots
        self._layout = layout
        self._describe(rest)

    def _describe(self, rest: msgspec.Raw) -> None:
        layout = self._layout
        self._rest = rest
        self._tree = _pack((layout.packed_slots, layout.packed_foreign, rest, *layout.packed_forms))
        self._header = layout.header(len(self._tree))
        #: The size of the file that ``write`` makes, in bytes.
        self.bytes = len(self._header) + layout.bytes + len(self._tree) + DIGEST_BYTES

    def put(self, key: str, values: Iterable[bytes]) -> None:
        """Put a list of values, each as :func:`packed` made it, into the tree, a dict that is not written yet."""
        self._describe(with_list(self._rest, key, values))

    def rewrite(self, keys: Collection[str], change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
        """Let ``change`` make others of the values under some ASCII keys of a dict that is not written yet; return these.

        Empty tensors stand for its own.

        Raises:
            CheckpointError: these are no longer in their order.
        """
        stand_ins: list[torch.Tensor] = []

        def tensors() -> Iterator[torch.Tensor]:
            while True:
                stand_ins.append(torch.empty(0, device="meta"))
                yield stand_ins[-1]

        found = {key: unflatten(packed, tensors(), ObjectParts) for key, packed in entries_of(self._rest, keys).items()}
        changed = change(found)
        flat = {key: FlatTree(value) for key, value in changed.items()}
        kept = [id(tensor) for one in flat.values() for tensor in one.tensors]
        if kept != [*map(id, stand_ins)]:
            raise CheckpointError("the tensors of a staged tree cannot be moved")
        self._describe(with_entries(self._rest, {key: one.rest for key, one in flat.items()}))
        return changed

    @property
    def released(self) -> bool:
        """Whether the memory was given back."""
        return self._memory is None

    def release(self) -> None:
        """Give the memory back to its buffer. Calling it again does nothing."""
        self._memory = None

    def offsets(self) -> list[int]:
        """Return where each tensor of the tree begins in the file, in bytes, in the order of the tree."""
        if (memory := self._memory) is None:
            return []
        begin = len(self._header) - memory.flat.data_ptr()
        return [begin + memory.views[slot].data_ptr() for slot in self._slots]

    def crc32(self, begin: int, size: int) -> int:
        """Return the CRC-32 of bytes of its tensors, from the byte ``begin`` of the file on. See ``pieces``."""
        first = begin - len(self._header)
        return crc32((self._copied().flat[first : first + size].numpy().data,))

    def pieces(self) -> Pieces:
        """Return the file without its digest: header, tensors, tree. Wait for copies that are still under way.

        Raises:
            CheckpointError: after ``release``; or a tensor changed while an ``Overlap`` was copying it.
        """
        return self._header, self._copied().flat.numpy().data, self._tree

    def sha256(self) -> str:
        """Return the SHA-256 of the file that ``write`` makes. See ``pieces``."""
        pieces = self.pieces()
        found = hashlib.sha256()
        for piece in (*pieces, crc32(pieces).to_bytes(DIGEST_BYTES, "little")):
            found.update(piece)
        return found.hexdigest()

    def tree(self) -> Any:
        """Return the tree with copies of its tensors on the CPU, which are valid until ``release``. See ``pieces``."""
        memory = self._copied()
        return unflatten(self._rest, self._layout.formed(memory.views))

    def _copied(self) -> _Memory:
        if (memory := self._memory) is None:
            raise CheckpointError("this StagedTree was released, probably because it was written already; stage the tree again")
        if memory.late is not None:
            memory.late.result()
        memory.wait()
        return memory


def stage(tree: object, buffer: StageBuffer | None = None, *, overlap: Overlap | None = None) -> StagedTree:
    """Copy ``tree`` so that the caller may change it at once.

    Tensors that are the same memory with the same shape, strides and dtype (tied weights) are copied once and are one
    tensor when loaded. Containers that are met twice are stored twice. Copies from devices with streams are only enqueued,
    on the current streams, into pinned memory; changes enqueued later on those streams come after them.

    Args:
        tree: containers of numbers, text, arrays and tensors.
        buffer: memory to use again.
        overlap: copies the tensors of its optimizers later, while the caller continues; their next step waits for it.

    Raises:
        CheckpointValueError: for a value that a checkpoint cannot hold, with its path.
    """
    buffer = StageBuffer() if buffer is None else buffer
    flat = FlatTree(tree, sparse=buffer.sparse)
    try:
        layout, memory = buffer.fill(flat, overlap)
    except (Changed, RuntimeError) as error:
        sparse = not buffer.sparse and any(tensor.layout is not torch.strided for tensor in flat.tensors)
        if isinstance(error, CheckpointError) and not sparse:
            raise
        # The tensors are not those of the layout, perhaps in a way that only the copy showed; or they cannot be staged, and
        # then a new layout raises the reason.
        buffer.forget_layout()
        if sparse:
            buffer.sparse, flat = True, FlatTree(tree, sparse=True)
        layout, memory = buffer.fill(flat, overlap)
    staged = StagedTree(layout, memory, flat.rest)
    memory.lease = weakref.ref(staged)
    return staged


class _Copying:
    """Batches to copy, by one thread or several: each takes the next one."""

    def __init__(self, tensors: Tensors) -> None:
        self.batches: deque[tuple[Batch, Target]] = deque()
        self._tensors = tensors

    @torch.no_grad()
    def run(self) -> bool:
        """Copy until no batch is left; return whether tensors have moved. If it raises, no other thread begins a batch."""
        moved = False
        try:
            for batch, target in self._taken():
                sources = batch.pick(self._tensors)
                batch.check(sources)
                batch.copy(sources, target)
                moved |= batch.moved(sources)
        except BaseException:
            self.batches.clear()
            raise
        return moved

    def _taken(self) -> Iterator[tuple[Batch, Target]]:
        while True:
            try:
                yield self.batches.popleft()
            except IndexError:
                return


class CommitInfo(msgspec.Struct, frozen=True):
    """A checkpoint that is on disk: where, its size in bytes, its digest, and the seconds it took without staging."""

    path: AnyPath
    bytes: int
    digest: str
    seconds: float


def write(staged: StagedTree, path: AsPath, *, release: bool = True, create: bool = False) -> CommitInfo:
    """Write a staged tree to ``path``, a file or a URL, durably and atomically, and ``release`` it.

    With ``create`` it must be new in a store with conditional writes (S3, Google Cloud Storage).

    The GIL is free during nearly all of it. If it fails, the name keeps what it had, and ``staged`` may be written elsewhere.

    Raises:
        CheckpointError: from the error of the step that failed; or ``staged`` was released before.
        ConfigurationError: ``path`` is a URL whose file system is not installed.
    """
    start = time.perf_counter()
    path = as_path(path)
    digest = write_pieces(path, staged.bytes, staged.pieces(), create=create)
    if release:
        staged.release()
    return CommitInfo(path, staged.bytes, readable(digest), time.perf_counter() - start)


WriteFile = Callable[[StagedTree, AnyPath], CommitInfo]
"""Writes a staged tree to a path, durably and atomically, or raises."""


def save(tree: object, path: AsPath) -> CommitInfo:
    """Stage ``tree`` and write it to ``path``; raise the errors of ``stage`` and ``write``."""
    return write(stage(tree), path)
