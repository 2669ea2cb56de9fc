"""A checkpoint that is a folder of files written by a library: copied at once, written beside the training.

The library calls ``torch.save`` and safetensors' ``save_file`` as usual. During :meth:`FolderFiles.recorded`, these two
functions only record their arguments, and :meth:`FolderFiles.write` writes the same files from the copies later. Small files
of the library are written at once. A last file has the digests of all.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import wraps
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import torch

from trainbus.convert.export import safetensors_file
from trainbus.convert.torch_file import Pickled
from trainbus.eventloop.checkpoint.commit import CHUNK, crc32, discard, failing, readable
from trainbus.eventloop.checkpoint.folder import commit_folder
from trainbus.eventloop.checkpoint.staging import CommitInfo, StagedTree
from trainbus.eventloop.checkpoint.store import AnyPath
from trainbus.eventloop.errors import CheckpointDamagedError
from trainbus.eventloop.user_errors import contextmanager

DIGESTS_FILE: Final = "trainbus-digests.json"
"""The file in such a folder that holds the size and the digest of each other file."""
_NAMES: Final = ("save", "save_file", "safe_save_file")
"""The names of the recorded functions in modules."""

_Save = Callable[..., Any]
_Keep = Callable[..., None]


class FileDigest(msgspec.Struct, frozen=True):
    """Size in bytes and digest of one file."""

    bytes: int
    digest: str


class FolderFiles:
    """The files of one checkpoint folder.

        files = FolderFiles(temporary)                  # a folder beside the final one
        with files.recorded():
            model.save_pretrained(temporary)
            torch.save(optimizer.state_dict(), temporary / "optimizer.pt")
        saver.save(files.tree, final, write=files.write)

    Args:
        folder: the folder that the library writes. It is renamed when all files are durable.
    """

    def __init__(self, folder: Path) -> None:
        self.folder: Final = folder
        self._pickled: dict[str, Pickled] = {}
        self._metadata: dict[str, Mapping[str, str]] = {}
        #: By the name of the file, the tensors to be staged.
        self.tree: dict[str, Any] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record this thread's calls of ``torch.save`` and safetensors' ``save_file`` for files in the folder."""
        thread = threading.get_ident()
        try:
            with _lock:
                _recording[thread] = (*_recording.get(thread, ()), self)
                _install()
            yield
        finally:
            with _lock:
                _recording[thread] = tuple(files for files in _recording.get(thread, ()) if files is not self)
                if not any(_recording.values()):
                    _recording.clear()
                    _uninstall()

    def _keep_tree(self, name: str, tree: Any) -> None:
        self._pickled[name] = pickled = Pickled(tree)
        self.tree[name] = pickled.storages

    def _keep_weights(self, name: str, tensors: Mapping[str, torch.Tensor], metadata: Any = None) -> None:
        self._metadata[name] = dict(metadata or {})
        self.tree[name] = dict(tensors)

    def write(self, staged: StagedTree, path: AnyPath) -> CommitInfo:
        """Write the files, make them durable, and rename the folder to ``path``; a writer for ``AsyncSaver.save``.

        A folder that is at ``path`` is replaced; one that has other files than a checkpoint is kept as ``former-<name>``. If
        the save fails, the temporary folder is removed.

        Args:
            staged: of ``tree``.
            path: the final folder, on the same file system.

        Raises:
            CheckpointError: from the error of the step that failed.
        """
        start = time.perf_counter()
        try:
            with failing(f"cannot write {path}"):
                digests = self._write_files(staged.tree())
                encoded = msgspec.json.format(msgspec.json.encode(digests))
                (self.folder / DIGESTS_FILE).write_bytes(encoded)
            final = Path(str(path))
            known: Collection[str] = ()
            with suppress(CheckpointDamagedError, OSError):
                known = _read_digests(final)
            commit_folder(self.folder, final, replace=True, known=known)
        except BaseException as error:
            discard(str(self.folder), shutil.rmtree, error)
            raise
        size = sum(each.bytes for each in digests.values())
        return CommitInfo(path, size, readable(crc32((encoded,))), time.perf_counter() - start)

    def _write_files(self, copies: Mapping[str, Any]) -> dict[str, FileDigest]:
        digests: dict[str, FileDigest] = {}
        for name, copy in copies.items():
            pickled = self._pickled.get(name)
            size, fill = safetensors_file(copy, self._metadata[name]) if pickled is None else pickled.file(copy)
            with (self.folder / name).open("wb", buffering=0) as opened:  # commit_folder() syncs it
                digests[name] = FileDigest(size, readable(fill(opened.fileno())))
        for file in sorted(self.folder.rglob("*")):
            name = file.relative_to(self.folder).as_posix()
            if name not in digests and file.is_file():
                digests[name] = _digest_of(file)
        return digests

    def _name(self, file: Any) -> str | None:
        """Return the name of a file in the folder; None for another one, or an open file."""
        if not isinstance(file, str | os.PathLike):
            return None
        with suppress(ValueError):
            return Path(os.fspath(file)).absolute().relative_to(self.folder.absolute()).as_posix()
        return None


class FolderChanges(NamedTuple):
    """The names of the files in a folder that its digests do not fit."""

    missing: list[str]
    changed: list[str]


def verify_folder(folder: Path, reads: Collection[str] = ("*",)) -> FolderChanges:
    """Compare a folder with its digests, if it has them.

    Args:
        folder: the folder.
        reads: patterns of the names of files that its reader reads. The others may change.

    Returns:
        The files that are missing, which is for the reader to judge, and the changed files that it does not read.

    Raises:
        CheckpointDamagedError: files that are read have changed. The error names them.
    """
    differing = FolderChanges([], [])
    for name, expected in sorted(_read_digests(folder).items()):
        try:
            if _digest_of(folder / name) != expected:
                differing.changed.append(name)
        except FileNotFoundError:
            differing.missing.append(name)
        except OSError as error:
            raise CheckpointDamagedError(f"{folder / name} cannot be read: {error}") from error
    damaged = [name for name in differing.changed if any(fnmatchcase(Path(name).name, pattern) for pattern in reads)]
    if damaged:
        raise CheckpointDamagedError(
            f"{folder} is damaged: {', '.join(damaged)} changed after it was saved. If that was on purpose, "
            f"remove {DIGESTS_FILE} from the folder; else resume from another checkpoint"
        )
    return differing


def _read_digests(folder: Path) -> dict[str, FileDigest]:
    try:
        encoded = (folder / DIGESTS_FILE).read_bytes()
    except FileNotFoundError:
        return {}
    try:
        return msgspec.json.decode(encoded, type=dict[str, FileDigest])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointDamagedError(
            f"{folder / DIGESTS_FILE} cannot be read: {error}. Remove it to load the folder unchecked, or load another one"
        ) from error


_lock: Final = threading.Lock()
_recording: Final[dict[int, tuple[FolderFiles, ...]]] = {}
"""The recordings of each thread, innermost last. The replaced functions look here, so one set of them serves all threads."""
_installed: Final[list[tuple[_Save, _Save, _Aliases]]] = []
"""The replacements, with the original functions and their names."""


class _Aliases:
    """The modules that have a function, and its names there: ``from … import save_file as …`` makes another one.

    A process has thousands of modules, so each is searched once. A module that gets the function later writes at once, which is
    slower, and correct. Its function may be a replacement, which without a recording calls the original.
    """

    def __init__(self) -> None:
        self._searched: set[str] = set()
        self._modules: tuple[int, str] | None = None
        """The number of modules when they were searched, and the newest one's name."""
        self._found: list[tuple[Any, str]] = []

    def replace(self, function: _Save, other: _Save) -> None:
        modules = len(sys.modules), list(sys.modules)[-1]  # reversed() fails if another thread imports
        if self._modules != modules:  # to go through all names takes 0.1 ms, and a save replaces four times
            self._search(function)
            self._modules = modules
        for module, alias in self._found:
            if vars(module).get(alias) is function:
                setattr(module, alias, other)

    def _search(self, function: _Save) -> None:
        for name in set(sys.modules) - self._searched:
            self._searched.add(name)
            module = sys.modules.get(name)
            if type(getattr(module, "__dict__", None)) is dict:
                self._found += [(module, alias) for alias in _NAMES if vars(module).get(alias) is function]


_aliases: Final[defaultdict[_Save, _Aliases]] = defaultdict(_Aliases)
"""The names of each original function."""


def _install() -> None:
    """Replace the functions in modules that still have the originals."""
    stand_ins: tuple[tuple[Any, str, _Keep, frozenset[str]], ...] = (
        (torch, "save", FolderFiles._keep_tree, frozenset()),
        (sys.modules.get("safetensors.torch"), "save_file", FolderFiles._keep_weights, frozenset({"metadata"})),
    )
    for library, name, keep, options in stand_ins:
        original = getattr(library, name, None)
        if original is None or any(original is one for one, *_ in _installed):  # not imported, or another thread was here
            continue
        stand_in = _stand_in(original, keep, options)
        _installed.append((stand_in, original, _aliases[original]))
        _aliases[original].replace(original, stand_in)


def _uninstall() -> None:
    """Restore the functions, also in modules that were imported meanwhile."""
    while _installed:
        stand_in, original, aliases = _installed[-1]
        aliases.replace(stand_in, original)
        _installed.pop()


def _stand_in(original: _Save, keep: _Keep, options: frozenset[str]) -> _Save:
    """Return a function that records its arguments instead of writing, if its thread records the folder of the file."""

    @wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        if 2 <= len(args) <= 2 + len(options) and kwargs.keys() <= options:
            for files in reversed(_recording.get(threading.get_ident(), ())):
                if (name := files._name(args[1])) is not None:
                    return keep(files, name, args[0], *args[2:], **kwargs)
        return original(*args, **kwargs)

    return save


def _digest_of(file: Path) -> FileDigest:
    size = crc = 0
    with file.open("rb", buffering=0) as opened:
        while chunk := opened.read(CHUNK):
            size, crc = size + len(chunk), crc32((chunk,), crc)
    return FileDigest(size, readable(crc))
