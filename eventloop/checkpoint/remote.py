"""Files in stores that fsspec reaches (``s3://``, ``gs://``, ``memory://`` …).

A store has no fsync: a file is durable when its upload has ended. In an object store it gets its name at that moment, complete.
Elsewhere the file is uploaded under a temporary name, its size is compared, and then a move gives it its name. If a step before
that fails, the name keeps what it had.

A failure of a store, of any type (OSError, HTTP, time-outs, credentials …), arrives as a ``CheckpointError`` that is
chained from it.
"""

from __future__ import annotations

import errno
import importlib
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

from trainbus.eventloop.checkpoint.commit import DIGEST_BYTES, TEMPORARY_PREFIX, discard, failing, note_step
from trainbus.eventloop.errors import CheckpointError, ConfigurationError, cannot_import
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.user_errors import contextmanager, described

_BLOCK: Final = 16 << 20
"""Bytes per part of an upload, or of what is read."""
_OBJECT_STORES: Final = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"})
"""Protocols of stores in which an upload appears under its name when it ends, and not before."""
_CREATE: Final = ("s3fs", "gcsfs", "fsspec.implementations.memory")
"""Where the file systems are that can write a file only if there is none of its name."""
_RETRY_THEMSELVES: Final = _OBJECT_STORES - {"memory"}
"""Protocols whose libraries try again by themselves."""
_PATIENCE: Final = 60
"""Seconds after which a small request is given up."""
_SLOW: Final = 1 << 20
"""Bytes per second of an upload that is not given up."""
_PART: Final = 8 << 20
"""Bytes per part of an upload to S3; more for files with more than ``_MOST_PARTS`` of them."""
_MOST_PARTS: Final = 10_000
_AT_ONCE: Final = 8
"""Parts under way at a time."""
_WAITS: Final = (0.5, 1.5, 4.0)
"""At most so many seconds before each further try, and at least half of them."""

log = get_logger()


class RemotePath:
    """A URL (``protocol://...``) with the part of ``pathlib.Path`` that checkpoints need, and with durable writes.

    Raises:
        ConfigurationError: fsspec, or its package for this protocol, is not installed, or the protocol is unknown.
    """

    def __init__(self, url: str, fs: Any = None) -> None:
        protocol, _, rest = url.partition("://")
        parts = [part for part in rest.split("/") if part]
        root = "/" if rest.startswith("/") else ""  # hdfs:///path has no host
        self._text = f"{protocol}://{root}{'/'.join(parts)}"
        self.fs = _file_system(url) if fs is None else fs
        self.name = parts[-1] if parts else ""
        """The last part."""
        self.stem, self.suffix = os.path.splitext(self.name)  # noqa: PTH122 - a URL

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"RemotePath({self._text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self}/{name}", self.fs)

    @property
    def parent(self) -> RemotePath:
        """The directory it is in."""
        return RemotePath(self._text.removesuffix(self.name), self.fs)

    def with_name(self, name: str) -> RemotePath:
        """Return the path with another last part."""
        return self.parent / name

    def absolute(self) -> RemotePath:
        """Return the same path: it depends on no current directory."""
        return self

    def info(self) -> dict[str, Any]:
        """Fetch the store's facts about the file; raise FileNotFoundError if it does not exist."""
        with failing(f"cannot look at {self}", Exception, but=FileNotFoundError):
            return self._info()

    def exists(self) -> bool:
        """Return whether it is a file or a directory."""
        return bool(self._type())

    def is_file(self) -> bool:
        """Return whether it is a file."""
        return self._type() == "file"

    def is_dir(self) -> bool:
        """Return whether there are files below it; object stores have no other directories."""
        return self._type() == "directory"

    def _type(self) -> str:
        try:
            return str(self.info()["type"])
        except FileNotFoundError:
            return ""

    def make_directory(self) -> None:
        """Make it a directory, where the store has directories; an object store might try to make a bucket."""
        if self._protocol in _OBJECT_STORES:
            return
        with failing(f"cannot make the directory {self}", Exception):
            self.fs.makedirs(str(self), exist_ok=True)

    def write_bytes(self, data: bytes) -> None:
        """Create or replace a small file by one put."""

        def put() -> None:
            self.fs.pipe_file(str(self), data, **self._limit)
            self._check_size(len(data))

        with failing(f"cannot write {self} ({len(data):,} bytes)", Exception):
            self._again(put)

    def upload(self, file: Path, *, create: bool = False) -> None:
        """Create or replace a file with the content of a local one.

        Raises:
            CheckpointError: from the error of the step that failed; or, with ``create`` and where ``can_create``, it exists.
        """
        with failing(f"cannot write {self}"):
            size = file.stat().st_size
        conditional = {"mode": "create"} if create and self.can_create else {}

        def put() -> None:
            if self._protocol not in _OBJECT_STORES:
                self._put_aside(file, size)
                return
            try:
                self._put(file, self, size, **conditional)
            except OSError as error:
                if not conditional or error.errno != errno.ENOSYS:
                    raise
                self._put(file, self, size)  # a server without conditional writes
            self._check_size(size)

        with failing(f"cannot write {self} ({size:,} bytes)", Exception):
            try:
                self._again(put)
            except (FileExistsError, FileNotFoundError) as error:
                # A request whose answer is lost is sent again, and then finds that its work is done.
                if not self.same_as(file):
                    if isinstance(error, FileNotFoundError):
                        raise
                    raise CheckpointError(
                        f"cannot write {self}: it exists, and this run did not write it. Another run saves to this directory: "
                        "end one of them, or give it an out_dir= or a work_dir of its own"
                    ) from error

    @property
    def can_create(self) -> bool:
        """Whether a file can be written here only if there is none of its name, by one step."""
        return type(self.fs).__module__.startswith(_CREATE)

    def same_as(self, file: Path) -> bool:
        """Return True if the file has the content of a local one; of our own format, its size and digest tell that."""
        with suppress(Exception), file.open("rb") as own:
            size = own.seek(0, os.SEEK_END)
            if self._info()["size"] != size:
                return False
            if file.suffix == ".safetensors" and size:
                own.seek(-DIGEST_BYTES, os.SEEK_END)
                return bool(self.fs.cat_file(str(self), start=size - DIGEST_BYTES) == own.read())
            own.seek(0)
            with self.opened() as (there, _):
                return all(there.read(_BLOCK) == part for part in iter(lambda: own.read(_BLOCK), b""))
        return False

    @property
    def _limit(self) -> dict[str, Any]:
        """The option that limits the seconds of one request, where the file system takes it (``fsspec.asyn.sync``)."""
        return {"timeout": _PATIENCE} if getattr(self.fs, "async_impl", False) else {}

    @property
    def _protocol(self) -> str:
        return self._text.partition("://")[0]

    def _again(self, put: Callable[[], None]) -> None:
        """Try a put again after time-outs and broken connections, unless the store's library does so."""
        for wait in () if self._protocol in _RETRY_THEMSELVES else _WAITS:
            try:
                put()
            except (ConnectionError, TimeoutError) as error:
                log.info("a store did not answer; trying again", path=str(self), error=str(error))
                time.sleep(random.uniform(wait / 2, wait))  # noqa: S311 - so that processes do not return at one moment
            else:
                return
        put()

    def _put(self, file: Path, to: RemotePath, size: int, **conditional: str) -> None:
        options: dict[str, Any] = {**conditional, "callback": _steps()}
        if getattr(self.fs, "async_impl", False):
            options["timeout"] = _PATIENCE + size / _SLOW
        if hasattr(self.fs, "call_s3"):
            options |= {"chunksize": max(_PART, -(-size // _MOST_PARTS)), "max_concurrency": _AT_ONCE}
        self.fs.put_file(str(file), str(to), **options)

    def _put_aside(self, file: Path, size: int) -> None:
        temporary = self.with_name(f"{TEMPORARY_PREFIX}{os.urandom(8).hex()}.tmp")
        try:
            self._put(file, temporary, size)
            temporary._check_size(size)
            self.fs.mv(str(temporary), str(self))
        except BaseException as error:
            discard(str(temporary), self.fs.rm_file, error)
            raise

    def copy_to(self, new: RemotePath) -> None:
        """Have the store copy the file, which takes no way over this machine. Some buckets refuse it."""
        with failing(f"cannot copy {self} to {new}", Exception):
            size = int(self._info()["size"])
            self.fs.copy(str(self), str(new))
            new._check_size(size)

    def remove(self) -> None:
        """Remove the file; a missing one is fine."""
        with suppress(FileNotFoundError), failing(f"cannot remove {self}", Exception, but=FileNotFoundError):
            self.fs.rm_file(str(self))

    @contextmanager
    def opened(self) -> Iterator[tuple[BinaryIO, int]]:
        """Open the file for reading; yield it with its size in bytes."""
        size = int(self.info()["size"])
        with (
            failing(f"cannot read {self}", Exception, but=FileNotFoundError),
            self.fs.open(str(self), "rb", block_size=_BLOCK) as file,
        ):
            yield file, size

    def files(self) -> list[tuple[RemotePath, float | None]]:
        """Return the files in it, and when each was last changed (Unix time in s; None if the store does not tell)."""
        with failing(f"cannot list {self}", Exception):
            return [(path, path._modified()) for path, one in self._listed() if one["type"] == "file"]

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the files in it, in bytes, by name."""
        return {path.name: int(one["size"]) for path, one in self._listed() if one["type"] == "file"}

    def directories(self) -> list[RemotePath]:
        """Return the directories in it."""
        return [path for path, one in self._listed() if one["type"] == "directory"]

    def remove_directory(self, files: Sequence[object]) -> None:
        """Remove it with all its files, which are these."""
        with failing(f"cannot remove {self}", Exception):
            self.fs.rm([str(file) for file in files])
            with suppress(FileNotFoundError, NotImplementedError):
                self.fs.rmdir(str(self))  # where the store has directories

    def _listed(self) -> list[tuple[RemotePath, dict[str, Any]]]:
        with suppress(FileNotFoundError), failing(f"cannot list {self}", Exception, but=FileNotFoundError):
            self.fs.invalidate_cache(str(self))
            found = self.fs.ls(str(self), detail=True)
            return [(self / str(one["name"]).rstrip("/").rpartition("/")[2], one) for one in found]
        return []

    def _modified(self) -> float | None:
        try:
            return float(self.fs.modified(str(self)).timestamp())
        except (NotImplementedError, FileNotFoundError):
            return None

    def _info(self) -> dict[str, Any]:
        self.fs.invalidate_cache(str(self.parent))
        found: dict[str, Any] = self.fs.info(str(self), **self._limit)
        return found

    def _check_size(self, size: int) -> None:
        found = self._info()["size"]
        if found != size:
            raise CheckpointError(f"{self} has {found:,} bytes in the store, but {size:,} were written")


def _steps() -> Any:
    """Return a callback of fsspec that counts what is uploaded as steps of a writer."""
    callback = importlib.import_module("fsspec.callbacks").Callback()
    callback.hooks["step"] = lambda *_, **__: note_step()
    return callback


def _file_system(url: str) -> Any:
    try:
        core = importlib.import_module("fsspec.core")
    except ImportError as error:
        raise cannot_import(url, "fsspec", "remote", error, "fsspec", "fsspec.core") from error
    try:
        return core.url_to_fs(url)[0]
    except (ImportError, ValueError) as error:
        # fsspec says "Install s3fs" of each ImportError within s3fs, whose own text is its cause.
        inner = error.__cause__ or error.__context__
        broken = isinstance(inner, ImportError) and not isinstance(inner, ModuleNotFoundError)
        raise ConfigurationError(f"cannot reach {url}: {described(inner) if inner and broken else error}") from error
