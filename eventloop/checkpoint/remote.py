"""Files in stores that fsspec reaches (``s3://``, ``gs://``, ``memory://`` …).

Such a store has no rename that is safe everywhere and no fsync: a put counts when it has returned. So a file is uploaded
under a temporary name, its size is compared, and only then it gets its name, by a copy or move within the store. Whatever
fails before that, the name keeps what it had.

Failures of a store, of whatever type, arrive as `CheckpointError` chained from the original one.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

from eventloop.checkpoint.commit import TEMPORARY_PREFIX
from eventloop.checkpoint.header import DIGEST_BYTES
from eventloop.checkpoint.sealed import Pieces, sealed
from eventloop.errors import CheckpointError, ConfigurationError

_BLOCK: Final = 16 << 20
"""Bytes per part of an upload or a copy."""


class RemotePath:
    """A URL with the part of `pathlib.Path` that checkpoints need.

    Args:
        url: ``protocol://...``, as fsspec takes it.

    Raises:
        ConfigurationError: fsspec, or what it needs for this protocol, is not installed; or nobody knows the protocol.
    """

    def __init__(self, url: str) -> None:
        protocol, _, rest = url.partition("://")
        self._protocol = protocol
        self._rest = "/".join(part for part in rest.split("/") if part)
        self.fs = _file_system(url)

    @classmethod
    def _of(cls, path: RemotePath, rest: str) -> RemotePath:
        new = cls.__new__(cls)
        new._protocol, new._rest, new.fs = path._protocol, rest, path.fs
        return new

    def __str__(self) -> str:
        return f"{self._protocol}://{self._rest}"

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __reduce__(self) -> tuple[type[RemotePath], tuple[str]]:
        return RemotePath, (str(self),)  # to another process, which connects by itself

    def __truediv__(self, name: str) -> RemotePath:
        return self._of(self, f"{self._rest}/{name}")

    @property
    def parent(self) -> RemotePath:
        """The directory it is in."""
        return self._of(self, self._rest.rpartition("/")[0])

    @property
    def name(self) -> str:
        """The last part."""
        return self._rest.rpartition("/")[2]

    @property
    def stem(self) -> str:
        """The last part without its suffix."""
        return Path(self.name).stem

    @property
    def suffix(self) -> str:
        """The end of the last part, from its last dot on."""
        return Path(self.name).suffix

    def with_name(self, name: str) -> RemotePath:
        """What has another name in the same directory."""
        return self.parent / name

    def info(self) -> dict[str, Any]:
        """What the store says of it, asked anew.

        Raises:
            FileNotFoundError: there is nothing of that name.
            CheckpointError: the store does not answer.
        """
        with failing(f"cannot look at {self}", but=FileNotFoundError):
            return _info(self)

    def absolute(self) -> RemotePath:
        """The same: it depends on no current directory."""
        return self

    def exists(self) -> bool:
        """Whether there is something of that name."""
        return self._type() != ""

    def is_file(self) -> bool:
        """Whether it is a file."""
        return self._type() == "file"

    def is_dir(self) -> bool:
        """Whether there is something below it: stores of objects have no other directories."""
        return self._type() == "directory"

    def read_bytes(self) -> bytes:
        """The content.

        Raises:
            FileNotFoundError: there is no such file.
            CheckpointError: the store does not answer.
        """
        with failing(f"cannot read {self}", but=FileNotFoundError):
            content: bytes = self.fs.cat_file(str(self))
            return content

    def _type(self) -> str:
        try:
            return str(self.info()["type"])
        except FileNotFoundError:
            return ""


class RemoteStore:
    """Makes files durable in a store that fsspec reaches; see :class:`eventloop.checkpoint.store.Store`."""

    def make(self, directory: RemotePath) -> None:
        """Have a directory, where the store knows such a thing."""
        with failing(f"cannot make the directory {directory}"):
            directory.fs.makedirs(str(directory), exist_ok=True)

    def write(self, path: RemotePath, size: int, pieces: Pieces) -> bytes:
        """Create or replace a checkpoint, ``size`` bytes in all; return its digest."""
        last = b""

        def parts() -> Iterator[memoryview]:
            nonlocal last
            for part in sealed(pieces):
                yield part
                last = bytes(part[-DIGEST_BYTES:])

        self._upload(path, size, parts())
        return last

    def _upload(self, path: RemotePath, size: int, parts: Iterator[memoryview]) -> None:
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{os.urandom(8).hex()}.tmp")
        try:
            with failing(f"cannot write {path} ({size:,} bytes)"):
                with path.fs.open(str(temporary), "wb", block_size=_BLOCK) as file:
                    for part in parts:
                        file.write(part)
                _check_size(temporary, size)
                path.fs.mv(str(temporary), str(path))
                _check_size(path, size)
        except BaseException as error:
            _discard(temporary, error)
            raise

    def write_bytes(self, path: RemotePath, data: bytes) -> None:
        """Create or replace a small file by one put."""
        with failing(f"cannot write {path} ({len(data):,} bytes)"):
            path.fs.pipe_file(str(path), data)
            _check_size(path, len(data))

    def copy(self, existing: Path | RemotePath, new: RemotePath) -> None:
        """Give what is in ``existing`` the second name ``new``: within the store if it is the same, else by an upload."""
        if isinstance(existing, RemotePath) and existing.fs is new.fs:
            size = int(existing.info()["size"])
            with failing(f"cannot copy {existing} to {new}"):
                new.fs.cp_file(str(existing), str(new))
                _check_size(new, size)
            return
        if isinstance(existing, RemotePath):
            with self.opened(existing) as (file, size):
                self._upload(new, size, _parts(file))
            return
        with failing(f"cannot copy {existing}"):
            size = existing.stat().st_size
            with existing.open("rb") as file:
                self._upload(new, size, _parts(file))

    def remove(self, path: RemotePath) -> None:
        """Remove a file; a missing one is fine."""
        with failing(f"cannot remove {path}"):
            try:
                path.fs.rm_file(str(path))
            except FileNotFoundError:
                return

    @contextmanager
    def opened(self, path: RemotePath) -> Iterator[tuple[BinaryIO, int]]:
        """A file, for reading, and its size in bytes.

        Raises:
            FileNotFoundError: there is no such file.
            CheckpointError: the store does not answer.
        """
        size = int(path.info()["size"])
        with failing(f"cannot read {path}", but=FileNotFoundError), path.fs.open(str(path), "rb", block_size=_BLOCK) as file:
            yield file, size

    def files(self, directory: RemotePath) -> list[tuple[RemotePath, float | None]]:
        """The files in a directory, and when each was last changed (Unix time in s; None if it does not tell)."""
        with failing(f"cannot list {directory}"):
            try:
                directory.fs.invalidate_cache(str(directory))
                found = directory.fs.ls(str(directory), detail=True)
            except FileNotFoundError:
                return []
            names = [str(one["name"]).rpartition("/")[2] for one in found if one["type"] == "file"]
            return [(directory / name, _modified(directory / name)) for name in names]


@contextmanager
def failing(what: str, but: type[Exception] = CheckpointError) -> Iterator[None]:
    """Turn what a store raises into CheckpointError, except ``but``."""
    try:
        yield
    except (CheckpointError, but):
        raise
    except Exception as error:
        # Stores raise what their clients raise: OSError, but also errors of HTTP, of timeouts, of credentials.
        raise CheckpointError(f"{what}: {error or type(error).__name__}") from error


def _info(path: RemotePath) -> dict[str, Any]:
    path.fs.invalidate_cache(str(path.parent))
    found: dict[str, Any] = path.fs.info(str(path))
    return found


def _file_system(url: str) -> Any:
    try:
        core = importlib.import_module("fsspec.core")
    except ImportError as error:
        raise ConfigurationError(f'{url} needs fsspec: pip install "trainbus[remote]"') from error
    try:
        return core.url_to_fs(url)[0]
    except (ImportError, ValueError) as error:
        raise ConfigurationError(f"cannot reach {url}: {error}") from error


def _parts(file: BinaryIO) -> Iterator[memoryview]:
    while part := file.read(_BLOCK):
        yield memoryview(part)


def _check_size(path: RemotePath, size: int) -> None:
    found = _info(path)["size"]
    if found != size:
        raise CheckpointError(f"{path} has {found:,} bytes in the store, and {size:,} were written")


def _modified(path: RemotePath) -> float | None:
    try:
        return float(path.fs.modified(str(path)).timestamp())
    except (NotImplementedError, FileNotFoundError):
        return None


def _discard(temporary: RemotePath, error: BaseException) -> None:
    try:
        temporary.fs.rm_file(str(temporary))
    except FileNotFoundError:
        pass
    except Exception as second:  # noqa: BLE001 - the first failure is the one to tell
        error.add_note(f"and the temporary file {temporary} could not be removed: {second}")
