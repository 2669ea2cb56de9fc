"""Reading checkpoints. All functions raise the errors of ``load``; any damage to a file is a ``CheckpointDamagedError``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from trainbus.eventloop.checkpoint.container import Header, NewerError, Strides, elements
from trainbus.eventloop.checkpoint.dtypes import FOREIGN_DTYPES, SAFE_DTYPES
from trainbus.eventloop.checkpoint.forms import in_tree, reinterpreted, with_strides
from trainbus.eventloop.checkpoint.header import check_memory, opened, read_checked, read_tree, rebuilding
from trainbus.eventloop.checkpoint.objects import put_together
from trainbus.eventloop.checkpoint.rebuild import unflatten
from trainbus.eventloop.checkpoint.store import AsPath
from trainbus.eventloop.checkpoint.unpack import Body, ObjectParts, Rebuild, body_of


class _Form(NamedTuple):
    """A tensor in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: Strides | None
    begin: int
    """Its first byte within the data."""


def load(
    path: AsPath,
    map_location: str | torch.device = "cpu",
    *,
    content: memoryview | None = None,
    make: Rebuild = put_together,
) -> Any:
    """Read and verify a checkpoint, a file or a URL, and rebuild the tree with all tensors on the device ``map_location``.

    With its ``content``, which comes from elsewhere, ``path`` only names it in errors. ``make`` decides about values of classes
    that are not imported (see ``objects``).

    Each tensor has memory of its own, aligned as torch aligns it, and the strides that it had (see ``forms``). Nothing is
    rebuilt before the digest of the whole file was right.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointDamagedError: the bytes differ from those that were written, or are not a checkpoint.
        CheckpointError: a newer trainbus or torch wrote it, or it holds a value of a class that is not imported.
    """
    device = torch.device(map_location)
    with opened(path, content) as (file, size, header, crc):
        check_memory(size)
        sizes = [end - begin for begin, end in (*(info.data_offsets for info in header.tensors.values()), header.tree)]
        *tensors, tree = raw = _allocated(sizes)
        read_checked(file, crc, sum(sizes), [one.numpy().data for one in raw])
        with rebuilding():
            body = body_of(tree.numpy().data)
            del raw
            for place, form in enumerate(_forms(header, body)):  # one after the other: no more than one is there twice
                tensors[place] = with_strides(reinterpreted(tensors[place], form.dtype, form.shape), form.strides)
        for place, tensor in enumerate(tensors):
            tensors[place] = tensor.to(device)
        with rebuilding():
            return unflatten(body.tree, in_tree(body.slots, body.kinds, tensors), make)


def _allocated(sizes: Iterable[int]) -> list[torch.Tensor]:
    try:
        return [torch.empty(size, dtype=torch.uint8) for size in sizes]
    except RuntimeError as error:
        raise MemoryError(str(error)) from error


def outline(path: AsPath) -> Any:
    """Rebuild the tree of a checkpoint with tensors on the device ``meta``: their shapes and dtypes, and none of their data.

    Only the header and the tree are read, so it is quick for a file of any size. Nothing is verified but the length of the
    file. Tied tensors are one tensor. What is an object (see ``objects``) is left in parts.
    """
    return outline_placed(path)[0]


def outline_placed(path: AsPath) -> tuple[Any, list[tuple[torch.Tensor, int]]]:
    """Return what ``outline`` does, and each tensor with its first byte in the file."""
    with opened(path) as (file, _, header, _):
        packed = read_tree(file, header)
        with rebuilding():
            body = body_of(packed)
            forms = list(_forms(header, body))
            empty = [with_strides(torch.empty(form.shape, dtype=form.dtype, device="meta"), form.strides) for form in forms]
            tensors = list(in_tree(body.slots, body.kinds, empty))
            tree = unflatten(body.tree, iter(tensors), ObjectParts)
    begins = {id(tensor): header.bytes + forms[slot].begin for tensor, slot in zip(tensors, body.slots, strict=True)}
    return tree, [(tensor, begins.pop(id(tensor))) for tensor in tensors if id(tensor) in begins]


def _forms(header: Header, body: Body) -> Iterator[_Form]:
    """Yield the forms of the tensors in the order of the file."""
    for rank, info in enumerate(header.tensors.values()):
        foreign = body.foreign.get(rank)
        if foreign is None:
            dtype, shape = SAFE_DTYPES[info.dtype], info.shape
        elif foreign.dtype in FOREIGN_DTYPES:
            dtype, shape = FOREIGN_DTYPES[foreign.dtype], foreign.shape
        else:
            raise NewerError(
                f"it holds a tensor of dtype {foreign.dtype[:60]!r}, which torch {torch.__version__} lacks; upgrade torch"
            )
        begin, end = info.data_offsets
        # The header is checked already, but not the tree.
        if elements(shape, end - begin) * dtype.itemsize != end - begin:
            raise ValueError(f"a {dtype} tensor of {len(shape)} dimensions in {end - begin} bytes")
        yield _Form(dtype, shape, body.strides.get(rank), begin)
