"""How ``torch.distributed.checkpoint`` stores sharded tensors here: in its own files, with our index instead of its pickle."""

from __future__ import annotations

import errno
import io
import os
import zipfile
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import msgspec
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from eventloop.checkpoint.commit import commit_bytes
from eventloop.checkpoint.pth import check_stored
from eventloop.checkpoint.shard_index import INDEX, Indexed, Piece, all_pieces, dtype_of


class ShardWriter(FileSystemWriter):
    """Writes our index where torch writes a pickle, which it runs when it reads it."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index."""
        stored = {result.index: result.storage_data for of_rank in results for result in of_rank}
        index = {
            name: Indexed(
                str(tensor.properties.dtype).removeprefix("torch."),
                tuple(tensor.size),
                [_piece(chunk, stored[MetadataIndex(name, chunk.offsets)]) for chunk in tensor.chunks],
            )
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        commit_bytes(Path(self.path) / INDEX, msgspec.json.encode(index))


def _piece(chunk: ChunkStorageMetadata, stored: Any) -> Piece:
    return Piece(tuple(chunk.offsets), tuple(chunk.sizes), stored.relative_path, stored.offset, stored.length)


class _Stored(NamedTuple):
    """What torch's reader wants to know of a piece."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class ShardReader(FileSystemReader):
    """Reads by our index.

    The index names tensors only: those torch reads with ``weights_only=True``, and any other object without it.
    """

    def __init__(self, directory: Path, index: Mapping[str, Indexed]) -> None:
        super().__init__(directory)
        self._index = index

    def read_metadata(self) -> Metadata:
        """Return the index in torch's form. Without ``**kwargs`` torch looks for no other metadata, which it would unpickle."""
        self._check_pieces()
        tensors: dict[str, STORAGE_TYPES] = {
            name: TensorStorageMetadata(
                TensorProperties(dtype_of(tensor)),
                torch.Size(tensor.shape),
                [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.shape)) for piece in tensor.pieces],
            )
            for name, tensor in self._index.items()
        }
        stored = {
            MetadataIndex(name, piece.offsets): _Stored(piece.file, piece.begin, piece.bytes)
            for name, tensor in self._index.items()
            for piece in tensor.pieces
        }
        return Metadata(tensors, storage_data=stored)

    def _check_pieces(self) -> None:
        """Refuse pieces that become larger when they are read."""
        pieces = sorted(all_pieces(self._index), key=lambda piece: piece.file)
        for name, group in groupby(pieces, key=lambda piece: piece.file):
            with (Path(self.path) / name).open("rb") as file:
                for piece in group:
                    check_stored(zipfile.ZipFile(cast(IO[bytes], _Window(file, piece.begin, piece.bytes))), piece.bytes)


class _Window(io.RawIOBase):
    """A part of a file, for reading; torch's own miscounts from the end."""

    def __init__(self, file: IO[bytes], begin: int, size: int) -> None:
        self._file, self._begin, self._size, self._at = file, begin, size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if at < 0:
            raise OSError(errno.EINVAL, "a place before the beginning")
        self._at = at
        return at

    def readinto(self, buffer: Any, /) -> int:
        self._file.seek(self._begin + self._at)
        part = self._file.read(max(0, min(len(buffer), self._size - self._at)))
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)
