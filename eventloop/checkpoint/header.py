"""What the header of a checkpoint tells, and its digest: what can be read without torch. The errors are those of ``load``."""

from __future__ import annotations

import errno
import io
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from itertools import cycle
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

import msgspec

from trainbus.eventloop.checkpoint import container
from trainbus.eventloop.checkpoint.commit import CHUNK, DIGEST_BYTES, chunks, crc32, readable
from trainbus.eventloop.checkpoint.container import LENGTH_BYTES, Header, TensorInfo
from trainbus.eventloop.checkpoint.store import AnyPath, AsPath, as_path, list_files, open_file
from trainbus.eventloop.checkpoint.unpack import body_of, plain
from trainbus.eventloop.errors import CheckpointDamagedError, CheckpointError
from trainbus.eventloop.platform import memory_of_machine
from trainbus.eventloop.user_errors import contextmanager

Kind = Literal["checkpoint", "plain safetensors", "torch.save", "unknown"]

ZIP: Final = b"PK\x03\x04"
"""How files of ``torch.save`` begin, since torch 1.6;"""
LEGACY: Final = b"\x80\x02\x8a\x0a"
"""and before."""
_TOGETHER: Final = 1 << 20
"""Bytes of small tensors that are read by one call, which stay in the processor's cache until they are copied."""
_AT_ONCE: Final = 1 << 18
"""Bytes up to which the digest takes about as long as handing it to a thread."""
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


def content_of(path: AsPath) -> memoryview:
    """Return all bytes of a checkpoint, unverified."""
    with open_file(as_path(path)) as (file, size):
        return read_exactly(file, size)


def verify(path: AsPath) -> None:
    """Read a checkpoint through a small buffer and check its header and every byte."""
    with opened(path) as (file, size, header, crc):
        read_checked(file, crc, size - header.bytes - DIGEST_BYTES)


def inspect(path: AsPath) -> CheckpointInfo:
    """Describe a checkpoint from its header alone. The data are not read, so damage to them is not seen."""
    path = as_path(path)
    with opened(path) as (file, size, header, _):
        file.seek(size - DIGEST_BYTES)
        digest = readable(_read_digest(file))
    return CheckpointInfo(path, size, header.version, digest, header.tensors)


def plain_tree(path: AsPath) -> Any:
    """Rebuild the tree of a checkpoint with its numbers, texts and containers, without a tensor and without torch.

    Only the header and the tree are read. What is an object (see ``objects``) is left in parts, and a tensor has none.
    """
    with opened(path) as (file, _, header, _):
        packed = read_tree(file, header)
        with rebuilding():
            return plain(body_of(packed).tree)


def load_plain(path: AsPath) -> Any:
    """Read and verify a checkpoint, and rebuild its tree as ``plain_tree`` does."""
    with opened(path) as (file, size, header, crc):
        check_memory(size)
        data = memoryview(bytearray(size - header.bytes - DIGEST_BYTES))
        read_checked(file, crc, len(data), [data])
        start, end = header.tree
        with rebuilding():
            return plain(body_of(data[start:end]).tree)


def read_tree(file: BinaryIO, header: Header) -> memoryview:
    """Return the packed tree of an open checkpoint."""
    start, end = header.tree
    file.seek(header.bytes + start)
    return read_exactly(file, end - start)


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
    memory = memory_of_machine()
    if memory is not None and size > memory:
        raise CheckpointDamagedError(f"it needs {size:,} bytes of memory, and this machine has {memory:,}")


class _ForeignError(CheckpointDamagedError):
    """The file is of another format; a search for a good checkpoint skips it like a damaged one."""


@contextmanager
def opened(path: AsPath, content: memoryview | None = None) -> Iterator[tuple[BinaryIO, int, Header, int]]:
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
                read_checked(file, 0, size - DIGEST_BYTES)
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


def read_checked(file: BinaryIO, crc: int, size: int, into: Sequence[memoryview] = ()) -> None:
    """Read ``size`` bytes, ``into`` memory or through a small buffer, and the digest; check it from ``crc`` on."""
    # The digest of a piece is made while the next one is read: both release the GIL, and fresh memory makes reading slow.
    most = _TOGETHER if into else CHUNK // 2
    buffers = cycle([memoryview(bytearray(min(size, most))) for _ in range(2)])
    with ThreadPoolExecutor(1, "trainbus-digest") as thread:
        digest = _digest_of(memoryview(b""), crc, thread)
        for parts in _groups(into) if into else ([next(buffers)[: size - start]] for start in range(0, size, most)):
            together = parts[0] if len(parts) == 1 else next(buffers)[: sum(map(len, parts))]
            read_exactly(file, len(together), together)
            digest = _digest_of(together, digest.result(), thread)
            begin = 0
            for part in parts if len(parts) > 1 else ():
                part[:] = together[begin : begin + len(part)]
                begin += len(part)
        crc = digest.result()
    if crc != (written := _read_digest(file)):
        raise CheckpointDamagedError(f"its bytes have the digest {readable(crc)}, but {readable(written)} was written")


def _digest_of(piece: memoryview, crc: int, thread: ThreadPoolExecutor) -> Future[int]:
    """Begin the CRC-32 of what has ``crc`` and a piece."""
    if len(piece) > _AT_ONCE:
        with suppress(RuntimeError):  # the interpreter is shutting down, and starts no thread
            return thread.submit(crc32, (piece,), crc)
    made = Future[int]()
    made.set_result(crc32((piece,), crc))
    return made


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
def rebuilding() -> Iterator[None]:
    """Report an error of a tree's contents as damage."""
    # The digest was right, so the disk is not damaged: another program wrote a file of this format.
    try:
        yield
    except (ValueError, TypeError, LookupError, OverflowError, RuntimeError, struct.error, msgspec.MsgspecError) as error:
        first = str(error).partition("\n")[0][:200]  # torch adds a trace of its own
        raise CheckpointDamagedError(f"the tree cannot be rebuilt ({type(error).__name__}: {first})") from error
