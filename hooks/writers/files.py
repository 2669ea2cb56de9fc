"""Files in the work dir: files that grow, small files that are replaced, and the id of a tracked run."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO, ClassVar, Final

from trainbus.eventloop import ConfigurationError, get_logger, platform
from trainbus.eventloop.checkpoint import commit_bytes, keep_as_old
from trainbus.eventloop.events import RunView, Slot
from trainbus.hooks.writers.base import RunFacts, Where, Writer

_UNUSABLE: Final = (errno.EACCES, errno.EPERM, errno.EIO, errno.EISDIR)

log = get_logger()


class FileWriter(Writer):
    """Base class of writers of one growing file in the work dir. The first line opens it and makes its folders.

    An incomplete last line of a killed process is cut off. A file that cannot be read or continued (a bad sector, no
    permission, a directory) is kept under another name, with a warning. A symbolic link, or what else is not a regular file, is
    an ``OSError``.
    """

    needs_work_dir = True

    of_run: ClassVar = {"_file": NoneType, "_trains": bool}

    def __init__(self, filename: str, interval: int | None) -> None:
        super().__init__(interval)
        self.filename = filename
        self._file: BinaryIO | None = None
        self._trains = False  # a training line was written since the writer was opened

    def files(self) -> Collection[str]:
        return (self.filename,)

    def open(self, run: RunFacts) -> None:
        self._trains = False
        self.directory = run.folder
        self.path = self.directory / self.filename

    def repeats(self, scalars: Mapping[str, float], step: int, where: Where) -> bool:
        """Return True if the file has this line: of a validation that a run repeats, as it was saved before its end.

        Only lines before the first one of a training are looked for. Durations may differ.
        """
        self._trains = self._trains or where.stage == "train"
        if self._trains or self._file is not None or not self.path.is_file():
            return False
        wanted = {name: value for name, value in scalars.items() if name.rpartition("/")[2] not in ("time", "data_time")}
        wanted |= {"step": step, "epoch": where.epoch, "iter": where.iter}
        read = self.line_reader()
        for line in _backwards(self.path):
            with suppress(ValueError, KeyError, TypeError, IndexError):  # damage, or a line of something else
                row = read(line)
                if float(row["iter"]) < where.iter:
                    return False
                if all(_is_same(float(row[name]), float(value)) for name, value in wanted.items()):
                    return True
        return False

    def line_reader(self) -> Callable[[bytes], Mapping[str, Any]]:
        """Return a function that reads a line of the file, and returns its values by name; it raises ValueError for damage."""
        raise NotImplementedError

    def append(self, line: bytes) -> None:
        self._file = self._file or self.open_file()
        self._file.write(line)

    def open_file(self) -> BinaryIO:
        """Open the file at its end."""
        try:
            return self.open_to_append()
        except OSError as error:
            if error.errno not in _UNUSABLE:
                raise
            kept = keep_as_old(self.path)
            log.warning(
                "a file cannot be continued, and is kept",
                id="writer-file-set-aside",
                path=str(self.path),
                to=str(kept),
                error=str(error),
            )
            return self.open_to_append()

    def open_to_append(self) -> BinaryIO:
        """Open the file, or create it, and cut off an incomplete last line; a subclass may read what it has."""
        path = self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = platform.open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise OSError(error.errno, "the file is a symbolic link, which is not followed; remove it", str(path)) from None
        file = os.fdopen(descriptor, "ab")
        try:
            _cut_incomplete_line(descriptor, path)
        except BaseException:
            file.close()
            raise
        return file

    def flush(self) -> None:
        """Flush the lines to the operating system.

        Raises:
            FileNotFoundError: the file was removed or replaced.
        """
        if self._file is None:
            return
        try:
            in_place = os.path.samestat(os.fstat(self._file.fileno()), self.path.lstat())
        except FileNotFoundError:
            in_place = False
        if not in_place:
            raise FileNotFoundError(errno.ENOENT, "the file was removed or replaced while the run wrote to it", str(self.path))
        self._file.flush()

    def sync(self) -> None:
        self.flush()
        if self._file is not None:
            platform.sync(self._file.fileno())

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


FILES = Slot("files of writers", dict)
"""The files in the work dir that a run's hooks write, each with its writer."""


def claim(run: RunView, owner: str, files: Iterable[str]) -> None:
    """Note the files that a writer has to itself in this run.

    Raises:
        ConfigurationError: another writer writes one of them.
    """
    taken = run.shared[FILES] = run.shared.get(FILES, {})
    for name in files:
        if name in taken:
            raise ConfigurationError(
                f"{taken[name]} and {owner} write the same file, {name!r}: remove one of them, or give one another file "
                "name, such as JSONLinesWriter(filename=...)"
            )
        taken[name] = owner


def replace(path: Path, content: bytes) -> None:
    """Create or replace a small file and its folders; a symbolic link is replaced, not followed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    commit_bytes(path, content)


def run_id(work_dir: Path | None, filename: str, make: Callable[[], str], exists: Callable[[str], bool] = bool) -> str:
    """Return the id of a tracking tool's run from a file in the work dir, so that a resumed run continues it.

    Without a stored id, or if ``exists`` returns False for it, ``make`` returns a new one. Without a work dir it is not stored.
    """
    path = None if work_dir is None else work_dir / filename
    known = ""
    try:
        known = path.read_text(encoding="utf-8").strip() if path is not None and path.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        log.warning(
            "the id of the run at its tracker cannot be read; a new one begins",
            id="tracker-id-unreadable",
            path=str(path),
            error=str(error),
        )
    if known and exists(known):
        return known
    made = make()
    if path is not None:
        replace(path, f"{made}\n".encode())
    return made


def _backwards(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, the last one first."""
    rest = b""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            begin = max(0, end - (1 << 16))
            file.seek(begin)
            rest, *lines = (file.read(end - begin) + rest).split(b"\n")
            yield from reversed(lines)
            end = begin
    yield rest


def _is_same(one: float, other: float) -> bool:
    return one == other or (one != one and other != other)


def _cut_incomplete_line(descriptor: int, path: Path) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "the path is not a regular file; remove it", str(path))
    size = end = status.st_size
    while end:
        begin = max(0, end - 4096)
        newline = platform.read_at(descriptor, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            end = begin + newline + 1
            break
        end = begin
    if end < size:
        lost = platform.read_at(descriptor, min(size - end, 200), end).decode(errors="replace")
        log.warning(
            "removed an incomplete last line, which a killed process left",
            id="incomplete-line-removed",
            path=str(path),
            line=lost,
        )
        os.ftruncate(descriptor, end)
