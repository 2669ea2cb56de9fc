"""Reading checkpoints. All functions raise the errors of ``load``; any damage to a file is a ``CheckpointDamagedError``."""

from __future__ import annotations

import errno
import io
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Literal, NamedTuple

import msgspec
import torch

from trainbus.eventloop.checkpoint import container
from trainbus.eventloop.checkpoint.commit import CHUNK, DIGEST_BYTES, chunks, crc32, readable
from trainbus.eventloop.checkpoint.container import LENGTH_BYTES, ForeignInfo, Header, TensorInfo
from trainbus.eventloop.checkpoint.forms import Strides, in_tree, reinterpreted, with_strides
from trainbus.eventloop.checkpoint.objects import ObjectParts, Rebuild, put_together
from trainbus.eventloop.checkpoint.rebuild import check_packed, unflatten
from trainbus.eventloop.checkpoint.store import AnyPath, AsPath, as_path, list_files, open_file
from trainbus.eventloop.errors import CheckpointDamagedError, CheckpointError
from trainbus.eventloop.user_errors import contextmanager

Kind = Literal["checkpoint", "plain safetensors", "torch.save", "unknown"]

ZIP: Final = b"PK\x03\x04"
"""How files of ``torch.save`` begin, since torch 1.6;"""
LEGACY: Final = b"\x80\x02\x8a\x0a"
"""and before."""
_TOGETHER: Final = 1 << 20
"""Bytes of small tensors that are read by one call, which stay in the processor's cache until they are copied."""
# Format names of other programs. Any other name may be trainbus's own with a flipped bit.
_OTHER_FORMATS: Final = frozenset({None, "pt", "np", "numpy", "tf", "flax", "mlx"})


class CheckpointInfo(msgspec.Struct, frozen=True):
    """The header of a checkpoint file. Sizes and offsets are in bytes."""

    path: AnyPath
    bytes: int
    version: int
    digest: str
    tensors: dict[str, TensorInfo]
    """By dotted path; a dtype that safetensors lacks is described as the U8 it is stored as."""


class _Tree(msgspec.Struct, array_like=True):
    slots: list[Annotated[int, msgspec.Meta(ge=0)]]
    foreign: dict[int, ForeignInfo]
    tree: msgspec.Raw
    strides: dict[int, Strides] = {}
    """Of tensors in the file, by their place in the header."""
    kinds: dict[int, int] = {}
    """Of tensors in the tree, by their place in ``slots``."""


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
    with _opened(path, content) as (file, size, header, crc):
        check_memory(size)
        sizes = [end - begin for begin, end in (*(info.data_offsets for info in header.tensors.values()), header.tree)]
        *tensors, tree = raw = _allocated(sizes)
        _read_checked(file, crc, sum(sizes), [one.numpy().data for one in raw])
        with _rebuilding():
            body = _body(tree.numpy().data)
            del raw
            for place, form in enumerate(_forms(header, body)):  # one after the other: no more than one is there twice
                tensors[place] = with_strides(reinterpreted(tensors[place], form.dtype, form.shape), form.strides)
        for place, tensor in enumerate(tensors):
            tensors[place] = tensor.to(device)
        with _rebuilding():
            return unflatten(body.tree, in_tree(body.slots, body.kinds, tensors), make)


def _allocated(sizes: Iterable[int]) -> list[torch.Tensor]:
    try:
        return [torch.empty(size, dtype=torch.uint8) for size in sizes]
    except RuntimeError as error:
        raise MemoryError(str(error)) from error


def content_of(path: AsPath) -> memoryview:
    """Return all bytes of a checkpoint, unverified."""
    with open_file(as_path(path)) as (file, size):
        return read_exactly(file, size)


def verify(path: AsPath) -> None:
    """Read a checkpoint through a small buffer and check its header and every byte."""
    with _opened(path) as (file, size, header, crc):
        _read_checked(file, crc, size - header.bytes - DIGEST_BYTES)


def inspect(path: AsPath) -> CheckpointInfo:
    """Describe a checkpoint from its header alone. The data are not read, so damage to them is not seen."""
    path = as_path(path)
    with _opened(path) as (file, size, header, _):
        file.seek(size - DIGEST_BYTES)
        digest = readable(_read_digest(file))
    return CheckpointInfo(path, size, header.version, digest, header.tensors)


def outline(path: AsPath) -> Any:
    """Rebuild the tree of a checkpoint with tensors on the device ``meta``: their shapes and dtypes, and none of their data.

    Only the header and the tree are read, so it is quick for a file of any size. Nothing is verified but the length of the
    file. Tied tensors are one tensor. What is an object (see ``objects``) is left in parts.
    """
    return outline_placed(path)[0]


def outline_placed(path: AsPath) -> tuple[Any, list[tuple[torch.Tensor, int]]]:
    """Return what ``outline`` does, and each tensor with its first byte in the file."""
    with _opened(path) as (file, _, header, _):
        start, end = header.tree
        file.seek(header.bytes + start)
        packed = read_exactly(file, end - start)
        with _rebuilding():
            body = _body(packed)
            forms = list(_forms(header, body))
            empty = [with_strides(torch.empty(form.shape, dtype=form.dtype, device="meta"), form.strides) for form in forms]
            tensors = list(in_tree(body.slots, body.kinds, empty))
            tree = unflatten(body.tree, iter(tensors), ObjectParts)
    begins = {id(tensor): header.bytes + forms[slot].begin for tensor, slot in zip(tensors, body.slots, strict=True)}
    return tree, [(tensor, begins.pop(id(tensor))) for tensor in tensors if id(tensor) in begins]


def file_kind(path: AsPath) -> Kind:
    """Return the kind of a file, from its first bytes: a checkpoint, weights of another program, or a file of ``torch.save``.

    A damaged checkpoint is a checkpoint or unknown. A file that is not a regular one is unknown.
    """
    try:
        with open_file(as_path(path)) as (file, size):
            start = file.read(LENGTH_BYTES)
            if start.startswith((ZIP, LEGACY)):
                return "torch.save"
            metadata, _ = container.decode(file.read(container.header_bytes(start, size)))
    except CheckpointDamagedError:
        return "unknown"
    if metadata.get("format") == container.FORMAT:
        return "checkpoint"
    return "plain safetensors" if metadata.get("format") in _OTHER_FORMATS else "unknown"


def is_checkpoint(path: AnyPath) -> bool:
    """Return True if a file has the name and the content of a checkpoint. One that cannot be read counts: it may be one."""
    named = path.suffix == ".safetensors" and not path.name.startswith(".")
    try:
        return named and path.is_file() and file_kind(path) == "checkpoint"
    except OSError:  # a bad sector, or no permission
        return True


def checkpoints_in(directory: AnyPath) -> Iterator[AnyPath]:
    """Yield the checkpoints in a directory, if it exists."""
    return (path for path, _ in list_files(directory) if is_checkpoint(path))


def check_memory(size: int) -> None:
    """Raise CheckpointDamagedError if this machine, or this container, has less memory (used or not) than ``size`` bytes."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):  # of a container
        try:
            limits.append(int(Path(file).read_text()))
        except (OSError, ValueError):  # the file is missing, or says "max"
            continue
    if size > (memory := min(limits)):
        raise CheckpointDamagedError(f"it needs {size:,} bytes of memory, and this machine has {memory:,}")


class _ForeignError(CheckpointDamagedError):
    """The file is of another format; a search for a good checkpoint skips it like a damaged one."""


@contextmanager
def _opened(path: AsPath, content: memoryview | None = None) -> Iterator[tuple[BinaryIO, int, Header, int]]:
    """Open a checkpoint and read its header; yield the file, its size, the header and the CRC-32 of that."""
    there = None if content is None else nullcontext((io.BytesIO(content), len(content)))
    with there or open_file(as_path(path)) as (file, size):
        try:
            try:
                prefix = file.read(LENGTH_BYTES)
                if prefix.startswith((ZIP, LEGACY)):
                    name = Path(str(path)).with_suffix(".safetensors").name
                    raise _ForeignError(
                        f"{path} is a file of torch.save: `trainbus checkpoint import {path} {name}` converts it"
                    )
                text = read_exactly(file, container.header_bytes(prefix, size))
                yield file, size, container.parse(text, size - LENGTH_BYTES - len(text)), crc32((prefix, text))
            except container.NewerError as error:  # unless a bit has flipped
                file.seek(0)
                _read_checked(file, 0, size - DIGEST_BYTES)
                raise CheckpointError(f"{path} cannot be read here: {error}") from None
        except _ForeignError:
            raise
        except CheckpointDamagedError as error:
            raise CheckpointDamagedError(f"{path} is damaged: {error}") from error.__cause__
        except MemoryError as error:
            raise CheckpointDamagedError(f"{path} is damaged, or too large for the memory of this machine") from error
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise CheckpointDamagedError(f"{path} is damaged: its disk cannot read it ({error})") from error


def _read_checked(file: BinaryIO, crc: int, size: int, into: Sequence[memoryview] = ()) -> None:
    """Read ``size`` bytes, ``into`` memory or through a small buffer, and the digest; check it from ``crc`` on."""
    scratch = memoryview(bytearray(min(size, _TOGETHER if into else CHUNK)))
    for parts in _groups(into) if into else ([scratch[: size - start]] for start in range(0, size, CHUNK)):
        together = parts[0] if len(parts) == 1 else scratch[: sum(map(len, parts))]
        crc = crc32((read_exactly(file, len(together), together),), crc)  # while it is still in the processor's cache
        begin = 0
        for part in parts if len(parts) > 1 else ():
            part[:] = scratch[begin : begin + len(part)]
            begin += len(part)
    if crc != (written := _read_digest(file)):
        raise CheckpointDamagedError(f"its bytes have the digest {readable(crc)}, but {readable(written)} was written")


def _groups(into: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Divide memory to read into: chunks of large parts, and small ones together, since each read may be a request."""
    group: list[memoryview] = []
    held = 0
    for part in into:
        if group and held + len(part) > _TOGETHER:
            yield group
            group, held = [], 0
        if len(part) > _TOGETHER:
            yield from ([chunk] for chunk in chunks(part))
        else:
            group.append(part)
            held += len(part)
    if group:
        yield group


def _read_digest(file: BinaryIO) -> int:
    return int.from_bytes(read_exactly(file, DIGEST_BYTES), "little")


def read_exactly(file: BinaryIO, size: int, into: memoryview | None = None) -> memoryview:
    """Return the next ``size`` bytes, read ``into`` memory of that size."""
    data = rest = memoryview(bytearray(size)) if into is None else into
    while rest:
        count = file.readinto(rest)  # type: ignore[attr-defined]  # typeshed leaves it out of BinaryIO
        if not count:
            raise CheckpointDamagedError("the file ended while it was being read")
        rest = rest[count:]
    return data


@contextmanager
def _rebuilding() -> Iterator[None]:
    # The digest was right, so the disk is not damaged: another program wrote a file of this format.
    try:
        yield
    except (ValueError, TypeError, LookupError, OverflowError, RuntimeError, struct.error, msgspec.MsgspecError) as error:
        first = str(error).partition("\n")[0][:200]  # torch adds a trace of its own
        raise CheckpointDamagedError(f"the tree cannot be rebuilt ({type(error).__name__}: {first})") from error


def _body(packed: memoryview) -> _Tree:
    check_packed(packed)
    return msgspec.msgpack.decode(packed, type=_Tree)


def _forms(header: Header, body: _Tree) -> Iterator[_Form]:
    """Yield the forms of the tensors in the order of the file."""
    for rank, info in enumerate(header.tensors.values()):
        foreign = body.foreign.get(rank)
        if foreign is None:
            dtype, shape = container.SAFE_DTYPES[info.dtype], info.shape
        elif foreign.dtype in container.FOREIGN_DTYPES:
            dtype, shape = container.FOREIGN_DTYPES[foreign.dtype], foreign.shape
        else:
            raise container.NewerError(
                f"it holds a tensor of dtype {foreign.dtype[:60]!r}, which torch {torch.__version__} lacks; upgrade torch"
            )
        begin, end = info.data_offsets
        # The header is checked already, but not the tree.
        if container.elements(shape, end - begin) * dtype.itemsize != end - begin:
            raise ValueError(f"a {dtype} tensor of {len(shape)} dimensions in {end - begin} bytes")
        yield _Form(dtype, shape, body.strides.get(rank), begin)
