"""Write files of ``torch.save`` beside the training: ``torch.load``, with ``weights_only`` too, reads them without trainbus.

``Pickled`` pickles a tree at once, objects of any class included, so nothing in it can change afterwards. The storages of its
tensors are left to ``stage``. The writing thread then has nothing to pickle:

    pickled = Pickled(trainer.state())
    saver.save(pickled.storages, "last.ckpt", write=pickled.write)
"""

from __future__ import annotations

import io
import pickle
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.serialization import location_tag

from trainbus.convert.zip_file import ZipLayout
from trainbus.eventloop.checkpoint.commit import CHUNK, commit_file, crc32, readable, write_all
from trainbus.eventloop.checkpoint.remote import RemotePath
from trainbus.eventloop.checkpoint.staging import CommitInfo, StagedTree
from trainbus.eventloop.checkpoint.store import AnyPath
from trainbus.eventloop.checkpoint.unpack import join
from trainbus.eventloop.errors import CheckpointError, CheckpointValueError
from trainbus.eventloop.privates import address_of, backward_hooks_of, rebuild_tensor, storage_kinds, untyped_bytes

_PROTOCOL: Final = 2
_MOST_PARTS: Final = 1000
"""Of one system call; Linux takes up to 1,024."""
_FIRST: Final = ((".format_version", b"1"), (".storage_alignment", b"64"), ("byteorder", sys.byteorder.encode()))
_LAST: Final = ("version", b"3\n")
_STORAGES: Final = (torch.UntypedStorage, torch.storage.TypedStorage)
_ATOMS: Final = frozenset({int, float, bool, str, bytes, type(None), tuple, list, dict, OrderedDict, type(rebuild_tensor)})
_KINDS: Final[dict[torch.dtype, type]] = {dtype: getattr(torch, name) for dtype, name in storage_kinds().items()}
"""The class that stands for the dtype of a storage in these files. Newer dtypes have none."""


class Pickled:
    """A tree pickled as ``torch.save`` does, at this moment, except for the bytes of its tensors, which are not copied.

    As with ``torch.save``, tensors that share a storage share it in the file, and a view takes its whole storage along.

    Raises:
        CheckpointValueError: an object that cannot be pickled.
    """

    def __init__(self, tree: object) -> None:
        file = io.BytesIO()
        pickler = _Pickler(file, _PROTOCOL)
        try:
            pickler.dump(tree)
        except Exception as error:  # any type, because classes define their pickling
            where = _culprit(tree, "") or "the tree"
            raise CheckpointValueError(f"{where}: torch.save cannot hold it: {error or type(error).__name__}") from error
        self._pickle = file.getvalue()
        #: The storages of the tensors as bytes (uint8), each one once: to be staged, so that ``write`` gets their copies.
        self.storages = [torch.empty(0, dtype=torch.uint8, device=one.device).set_(one) for one in pickler.storages]

    def write(self, staged: StagedTree, path: AnyPath) -> CommitInfo:
        """Write the file durably and atomically to the local file ``path``; a writer for ``AsyncSaver.save``.

        Args:
            staged: of ``storages``, nothing else.
            path: the file.

        Raises:
            CheckpointError: from the error of the step that failed; or ``path`` is a URL.
        """
        if isinstance(path, RemotePath):
            raise CheckpointError(f"{path} is a URL; a file of torch.save can only be written to a local path")
        start = time.perf_counter()
        size, fill = self.file(staged.tree())
        digest = commit_file(path, size, fill)
        return CommitInfo(path, size, readable(digest), time.perf_counter() - start)

    def file(self, copies: Sequence[torch.Tensor]) -> tuple[int, Callable[[int], int]]:
        """Return the size of the file, and a function that writes it to a file descriptor and returns the CRC-32 of all of it.

        Args:
            copies: of ``storages``, on the CPU.
        """
        records: list[tuple[str, bytes | memoryview]] = [("data.pkl", self._pickle), *_FIRST]
        records += ((f"data/{index}", copy.numpy().data) for index, copy in enumerate(copies))
        layout = ZipLayout([*records, _LAST])
        return layout.bytes, lambda descriptor: _write_grouped(descriptor, layout.parts())


def _write_grouped(descriptor: int, parts: Iterator[bytes | memoryview]) -> int:
    """Write parts with few system calls: after each one, the thread waits for the GIL. Return their CRC-32."""
    crc = size = 0
    group: list[bytes | memoryview] = []
    for part in parts:
        if size + len(part) > CHUNK or len(group) == _MOST_PARTS:
            write_all(descriptor, *group)
            crc, size, group = crc32(group, crc), 0, []
        group.append(part)
        size += len(part)
    write_all(descriptor, *group)
    return crc32(group, crc)


_Id = tuple[str, type, str, str, int]
"""How the pickle names a storage: the word, the class of its dtype, its record, its device, its number of elements."""


class _Reference(NamedTuple):
    """A placeholder for a storage while a tensor is being pickled."""

    id: _Id


class _Pickler(pickle.Pickler):
    """Pickle as ``torch.save`` does: a storage becomes a reference to a record of the file.

    Source: ``torch.serialization._save``, ``torch.Tensor._reduce_ex_internal``.
    """

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.storages: list[torch.UntypedStorage] = []
        self._keys: dict[int, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}

    def persistent_id(self, value: Any) -> _Id | None:
        kind = type(value)
        if kind in _ATOMS:  # it is asked for every object, and there are twenty to a tensor
            return None
        if kind is _Reference:
            return value.id  # type: ignore[no-any-return]  # looked at above
        if not isinstance(value, _STORAGES):
            return None
        if isinstance(value, torch.UntypedStorage):
            return self._refer(value, torch.uint8, torch.UntypedStorage, value.nbytes())
        untyped, dtype = untyped_bytes(value), value.dtype
        return self._refer(untyped, dtype, _KINDS[dtype], untyped.nbytes() // dtype.itemsize)

    def reducer_override(self, value: Any) -> Any:
        """Reduce plain tensors to what they would reduce themselves to, in less time."""
        kind = type(value)
        if kind is torch.Tensor:
            return _reduce(value, self._refer) if _is_plain(value) else NotImplemented
        return (OrderedDict, ()) if kind is OrderedDict and not value and not vars(value) else NotImplemented

    def _refer(self, storage: torch.UntypedStorage, dtype: torch.dtype, kind: type, size: int) -> _Id:
        if (pointer := storage.data_ptr()) and self._dtypes.setdefault(pointer, dtype) != dtype:
            raise ValueError(
                f"two of its tensors view the same memory as {self._dtypes[pointer]} and {dtype}; clone one of them"
            )
        key = self._keys.get(address_of(storage))
        if key is None:
            key = self._keys[address_of(storage)] = str(len(self._keys))
            self.storages.append(storage)  # which also keeps its address from being used again
        return "storage", kind, key, location_tag(storage), size


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.dtype in _KINDS
        and (tensor.is_cpu or tensor.is_cuda)  # those of other types reduce themselves, some without a storage
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and backward_hooks_of(tensor) is None
        and not vars(tensor)
    )


def _reduce(tensor: torch.Tensor, refer: Callable[..., _Id]) -> Any:
    storage = tensor.untyped_storage()
    reference = _Reference(refer(storage, tensor.dtype, _KINDS[tensor.dtype], storage.nbytes() // tensor.itemsize))
    form = tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.requires_grad
    return rebuild_tensor, (reference, *form, OrderedDict())


def _culprit(value: object, path: str) -> str:
    """Return the path of the innermost object that cannot be pickled, through containers and attributes."""
    if isinstance(value, Mapping):
        parts = list(value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        parts = list(enumerate(value))
    else:
        parts = list(getattr(value, "__dict__", {}).items())
    for key, part in parts:
        try:
            _Pickler(io.BytesIO(), _PROTOCOL).dump(part)
        except Exception:  # noqa: BLE001 - see Pickled
            return _culprit(part, join(path, key))
    return path
