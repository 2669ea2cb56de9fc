"""The directory with the sharded tensors of a checkpoint, beside its file: its index, its verification, its removal.

Each process's part is a checkpoint of its own, ``__RANK.safetensors``, and so is the index, which tells where each piece of a
tensor is. Both have a digest. 0.2 wrote the parts by ``torch.distributed.checkpoint`` (``.distcp``), with an index in JSON and
digests beside it; those are read. ``sharded`` writes and reads the tensors; it is apart because it needs DTensors, which most
runs never import.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from trainbus.eventloop.checkpoint.commit import CHUNK, TEMPORARY_PREFIX, crc32, readable
from trainbus.eventloop.checkpoint.container import ITEM_BYTES, elements
from trainbus.eventloop.checkpoint.header import file_kind, load_plain, plain_tree, verify
from trainbus.eventloop.checkpoint.remote import RemotePath
from trainbus.eventloop.checkpoint.store import (
    AnyPath,
    as_path,
    file_size,
    is_plain_name,
    list_directories,
    list_files,
    read_small,
    remove,
    remove_directory,
)
from trainbus.eventloop.checkpoint.unpack import ObjectParts
from trainbus.eventloop.errors import CheckpointDamagedError, CheckpointError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.user_errors import contextmanager

SHARDS: Final = "shards"
"""Key of the tree under which the directory is named."""
MARK: Final = "__sharded__"
"""Key of the dict that stands in the tree for a sharded tensor, with its name."""
SHARDS_SUFFIX: Final = ".shards"
"""End of the names of directories with parts."""
INDEX: Final = "index.safetensors"
COMMITTED: Final = "committed"
"""Empty file in the directory of a rank whose machine may not have the file that names it: that file exists, or did."""
OLD_PART: Final = ".distcp"

_OLD_INDEX: Final = "index.json"
_OLD_DIGESTS: Final = "digests.json"
_MAX_INDEX_BYTES: Final = 1 << 30

_NAME: Final = re.compile(rf".+-[0-9a-f]{{8}}{re.escape(SHARDS_SUFFIX)}", re.DOTALL)
"""Names of directories: the name of the file, and a token."""
_TENSORS: Final = re.compile(r"__\d+\.safetensors|__\d+_\d+\.distcp")
_OTHERS: Final = re.compile(
    rf"index\.safetensors|committed|index\.json|(\d+|index)\.digests\.json|{re.escape(TEMPORARY_PREFIX)}.+\.tmp", re.DOTALL
)
"""Names of the files in them."""

log = get_logger()

_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Shape = tuple[_Size, ...]


class Piece(msgspec.Struct, frozen=True):
    """A part of a tensor: where it begins in the tensor, its shape, and its bytes in a file."""

    offsets: _Shape
    shape: _Shape
    file: str
    begin: _Size
    """From the beginning of the file."""
    bytes: _Size


class Indexed(msgspec.Struct, frozen=True):
    """A sharded tensor: its dtype (``"float32"``), its whole shape, and its pieces."""

    dtype: str
    shape: _Shape
    pieces: list[Piece]


def marks_in(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield what stands in a tree for tensors in the directory."""
    if isinstance(tree, Mapping) and MARK in tree:
        yield dict(tree)
    elif isinstance(tree, Mapping):
        yield from chain.from_iterable(map(marks_in, tree.values()))
    elif isinstance(tree, list | tuple):
        yield from chain.from_iterable(map(marks_in, tree))
    elif isinstance(tree, ObjectParts):
        yield from marks_in(tree.content)


def sharded_in(state: object) -> str | None:
    """Return the name of the directory with the sharded tensors of a checkpoint; None if it has no sharded tensors."""
    if not isinstance(state, Mapping) or SHARDS not in state:
        return None
    return name if isinstance(name := state[SHARDS], str) else f"({type(name).__name__})"


def shards_of(state: Mapping[str, Any], path: AnyPath) -> AnyPath:
    """Return the directory with the sharded tensors of the checkpoint ``path``, which must be beside it."""
    name = state[SHARDS]
    if not (is_plain_name(name) and name.endswith(SHARDS_SUFFIX)):
        raise CheckpointDamagedError(f"{name!r} does not name a directory with sharded tensors beside it")
    directory = path.with_name(name)
    if isinstance(directory, Path) and directory.is_symlink():
        raise CheckpointDamagedError(f"{directory} is a link, which is not followed")
    return directory


def part_name(rank: int) -> str:
    """Return the name of the file with one process's part."""
    return f"__{rank}.safetensors"


def packed_index(index: Mapping[str, Indexed]) -> dict[str, bytes]:
    """Return the tree of the checkpoint that an index is saved as."""
    return {"index": msgspec.json.encode(index)}


def read_index(directory: AnyPath) -> dict[str, Indexed]:
    """Read the index of a directory, and check it against itself and the sizes of the files there."""
    old = isinstance(directory, Path) and (directory / _OLD_INDEX).exists()
    path = directory / (_OLD_INDEX if old else INDEX)
    try:
        text = read_small(Path(str(path)), _MAX_INDEX_BYTES) if old else load_plain(path)["index"]
        index = msgspec.json.decode(text, type=dict[str, Indexed])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError, KeyError) as error:
        raise CheckpointDamagedError(f"{path} cannot be read: {error}") from error
    for piece in all_pieces(index):
        if not is_plain_name(piece.file):
            raise CheckpointDamagedError(f"{path} names {piece.file!r}, which is not a file of that directory")
    check_index(index, directory, path)
    return index


def read_shards(state: Mapping[str, Any], path: AnyPath) -> tuple[AnyPath, dict[str, Indexed]]:
    """Return the directory with the sharded tensors of the checkpoint ``path``, and its index, checked against the tree.

    Raises:
        CheckpointDamagedError: the tree, the index and the files do not agree.
    """
    with naming_damage(path):
        directory = shards_of(state, path)
        index, seen = read_index(directory), set[str]()
        for found in marks_in(state):
            name = found[MARK]
            one = index.get(name)
            if one is None or name in seen or (list(one.shape), one.dtype) != (found["shape"], found["dtype"]):
                raise CheckpointDamagedError(f"the file and the index do not agree on {name!r}")
            seen.add(name)
    return directory, index


def part_files(directory: AnyPath) -> set[str]:
    """Return the names of the files with the parts, by the index; the files themselves may be elsewhere.

    Raises:
        FileNotFoundError: the index is not here.
        CheckpointDamagedError: it is damaged.
    """
    path = directory / INDEX
    try:
        index = msgspec.json.decode(load_plain(path)["index"], type=dict[str, Indexed])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError, KeyError) as error:
        raise CheckpointDamagedError(f"{path} cannot be read: {error}") from error
    return {piece.file for piece in all_pieces(index)}


def check_index(
    index: Mapping[str, Indexed], directory: AnyPath, path: AnyPath, further: Mapping[str, Piece] | None = None
) -> None:
    """Check an index against itself and the sizes of the files in ``directory``.

    Args:
        index: the tensors.
        directory: where the files are.
        path: the file that the index was read from, for errors.
        further: other parts of these files, by name. Given for folders of other programs, whose files may be links.

    Raises:
        CheckpointDamagedError: it contradicts itself or the files.
    """
    others = further or {}
    sizes = _sizes(directory, {piece.file for piece in (*all_pieces(index), *others.values())}, follow=further is not None)
    # Tied tensors have the same pieces, and are one when read; others that overlap could need more memory than the files have.
    distinct = {(tensor.dtype, tensor.shape, *tensor.pieces): tensor for tensor in index.values()}
    if sum(piece.bytes for piece in (*all_pieces(distinct), *others.values())) > sum(sizes.values()):
        raise CheckpointDamagedError(f"{path} promises more bytes than the files beside it have")
    outside = (name for name, piece in others.items() if piece.begin + piece.bytes > sizes[piece.file])
    unsound = (name for name, tensor in index.items() if not is_sound(tensor, sizes))
    for name in chain(outside, unsound):
        raise CheckpointDamagedError(f"{path} contradicts itself or the files beside it at {name!r}")


def _sizes(directory: AnyPath, names: set[str], *, follow: bool) -> dict[str, int]:
    if isinstance(directory, RemotePath):
        found = directory.sizes()  # one request, however many processes there were
        if missing := names - found.keys():
            raise CheckpointDamagedError(f"{directory} lacks {', '.join(sorted(missing))}")
        return {name: found[name] for name in names}
    return {name: file_size(directory / name, follow=follow) for name in names}


def check_parts(directory: AnyPath, names: set[str]) -> None:
    """Raise CheckpointError if a store that all processes have written to lacks a part; see ``sharded``."""
    if isinstance(directory, RemotePath) and (missing := names - directory.sizes().keys()):
        raise CheckpointError(
            f"the store has no {', '.join(sorted(missing))} of other processes, which see another one: give a URL that is the "
            "same store for all, not memory:// or a disk that each machine has"
        )


def all_pieces(index: Mapping[Any, Indexed]) -> Iterator[Piece]:
    """Yield the pieces of all tensors."""
    for tensor in index.values():
        yield from tensor.pieces


def is_sound(tensor: Indexed, sizes: Mapping[str, int]) -> bool:
    """Return whether pieces make up a tensor exactly, within files of these ``sizes`` in bytes."""
    itemsize = ITEM_BYTES.get(tensor.dtype)
    if itemsize is None:
        return False
    held = 0
    for piece in tensor.pieces:
        count = elements(piece.shape, piece.bytes)
        inside = len(piece.offsets) == len(piece.shape) == len(tensor.shape) and all(
            offset + size <= whole for offset, size, whole in zip(piece.offsets, piece.shape, tensor.shape, strict=True)
        )
        size = count * itemsize
        fits = size <= piece.bytes if piece.file.endswith(OLD_PART) else size == piece.bytes  # those were files of torch.save
        if not (inside and fits) or piece.begin + piece.bytes > sizes[piece.file]:
            return False
        held += count
    return elements(tensor.shape, held) == held and not _overlap([piece for piece in tensor.pieces if 0 not in piece.shape])


def _overlap(pieces: list[Piece]) -> bool:
    """Return True if pieces share an element: then others are missing, whose memory would be read as it happens to be."""
    if not pieces or not pieces[0].shape:
        return False
    # Along the dimension that divides them most, so that few are compared with each.
    along = max(range(len(pieces[0].shape)), key=lambda dim: len({piece.offsets[dim] for piece in pieces}))
    near: list[Piece] = []
    for piece in sorted(pieces, key=lambda one: one.offsets[along]):
        near = [one for one in near if one.offsets[along] + one.shape[along] > piece.offsets[along]]
        if any(_meet(one, piece) for one in near):
            return True
        near.append(piece)
    return False


def _meet(one: Piece, other: Piece) -> bool:
    sides = zip(one.offsets, one.shape, other.offsets, other.shape, strict=True)
    return all(begin < start + size and start < begin + length for begin, length, start, size in sides)


def verify_shards(state: Any, path: object, *, share: tuple[int, int] = (0, 1)) -> None:
    """Read the sharded tensors of a checkpoint once, if it has any, and compare their digests.

    Several processes can divide the parts: ``share`` is the number of this one and how many there are.

    Raises:
        CheckpointDamagedError: a part is missing or damaged.
    """
    if sharded_in(state) is None:
        return
    file = as_path(str(path))
    with naming_damage(file):
        directory, index = read_shards(state, file)
        parts = {piece.file for piece in all_pieces(index)}
        old = {part for part in parts if part.endswith(OLD_PART)}
        if old or (isinstance(directory, Path) and (directory / _OLD_INDEX).exists()):
            _verify_old(Path(str(directory)), old, share)
        for part in sorted(parts - old)[share[0] :: share[1]]:
            verify(directory / part)


def _verify_old(directory: Path, parts: set[str], share: tuple[int, int]) -> None:
    wanted: dict[str, str] = {}
    for digests in directory.glob(f"*.{_OLD_DIGESTS}"):
        wanted |= msgspec.json.decode(read_small(digests, _MAX_INDEX_BYTES), type=dict[str, str])
    if _OLD_INDEX not in wanted:
        raise CheckpointDamagedError(f"{directory} is not complete")
    if unknown := parts - wanted.keys():
        raise CheckpointDamagedError(f"{directory} has no digests of {', '.join(sorted(unknown))}")
    for name, digest in sorted(wanted.items())[share[0] :: share[1]]:
        if not is_plain_name(name):
            raise CheckpointDamagedError(f"{directory} has a digest of {name!r}, which is not a file of it")
        file_size(directory / name)  # it is a regular file
        with (directory / name).open("rb", buffering=0) as opened:
            crc = crc32(iter(lambda: opened.read(CHUNK), b""))
        if readable(crc) != digest:
            raise CheckpointDamagedError(f"{directory / name} has other bytes than were written")


def sweep_shards(directory: AnyPath, *, still: float = 60.0) -> bool:
    """Remove directories of sharded tensors that no checkpoint in ``directory`` names; return True if there were any at all.

    A checkpoint counts under any name, also one such as ``epoch_1.bak``.

    Only a directory that ``sharded`` has named and filled, with nothing else in it, is one. One that has changed in the last
    ``still`` seconds is being written, and stays. So do those that are older than a file that cannot be read, and those whose
    file may be on another machine. Each removal is logged.

    Raises:
        CheckpointError: a directory cannot be removed.
    """
    found = {one: parts for one in list_directories(directory) if (parts := own_parts(one))}
    if not found:
        return False
    named, since = set(), -math.inf
    for file, changed in list_files(directory):
        try:
            if file.suffix != ".safetensors" and (not file.is_file() or file_kind(file) != "checkpoint"):
                continue
            tree = plain_tree(file)
        except (CheckpointError, OSError) as error:
            if _is_foreign(file):
                continue
            log.warning(
                "sharded tensors of old checkpoints stay: a file cannot be read",
                id="old-shards-kept",
                path=str(file),
                error=str(error),
            )
            since = math.inf if changed is None else max(since, changed)  # it may name any that were there before it
            continue
        named.add(sharded_in(tree))
    for one, parts in found.items():
        older = any(changed is None or changed <= since for changed in parts.values())
        if (
            one.name not in named
            and not older
            and one / COMMITTED not in parts
            and (not still or _unchanged(one, parts) >= still)
        ):
            remove_directory(one, list(parts))
            log.info("removed the sharded tensors of a checkpoint that does not exist", path=str(one))
    return True


def stranded(directory: Path) -> list[Path]:
    """Return the notes of parts that a file has named, which may be on another machine."""
    return [*directory.glob(f"*{SHARDS_SUFFIX}/{COMMITTED}")]


def remove_parts(directory: AnyPath) -> None:
    """Remove a directory with parts, if it is there and has nothing else.

    Raises:
        CheckpointError: it cannot be removed.
    """
    if parts := own_parts(directory):
        remove_directory(directory, list(parts))


def remove_whole(path: AnyPath) -> None:
    """Remove a checkpoint, or what another trainer has under this name, with its sharded tensors if it has any.

    Raises:
        CheckpointError: it cannot be removed.
    """
    try:
        name = sharded_in(plain_tree(path)) if path.suffix == ".safetensors" else None
    except (CheckpointError, OSError):
        name = None
    remove(path)
    if name is not None:
        remove_parts(path.with_name(name))


def _is_foreign(file: AnyPath) -> bool:
    """Return True if a file is of another program; False also if that cannot be seen."""
    try:
        return file_kind(file) in ("plain safetensors", "torch.save")
    except (CheckpointError, OSError):
        return False


def own_parts(directory: AnyPath) -> dict[AnyPath, float | None]:
    """Return the files in a directory, and when each has changed, if its name and all its files are of ``sharded``."""
    if not _NAME.fullmatch(directory.name) or list_directories(directory):
        return {}
    # Tensors last, so that what is left after a kill is still known.
    parts = dict(sorted(list_files(directory), key=lambda part: bool(_TENSORS.fullmatch(part[0].name))))
    return parts if all(map(_is_own, parts)) and any(_TENSORS.fullmatch(part.name) for part in parts) else {}


def _unchanged(directory: AnyPath, parts: Mapping[AnyPath, float | None]) -> float:
    """Return for how many seconds nothing has changed in a directory; 0 if a store does not tell."""
    times = [*parts.values(), *([directory.stat().st_mtime] if isinstance(directory, Path) else [])]
    return time.time() - max(time.time() if at is None else at for at in times)


def _is_own(part: AnyPath) -> bool:
    named = _TENSORS.fullmatch(part.name) or _OTHERS.fullmatch(part.name)
    return bool(named) and (isinstance(part, RemotePath) or (part.is_file() and not part.is_symlink()))


@contextmanager
def naming_damage(path: AnyPath) -> Iterator[None]:
    """Report errors of reading sharded tensors as damage to the checkpoint ``path``, unless a store does not answer."""
    try:
        yield
    except CheckpointDamagedError as error:
        raise CheckpointDamagedError(f"{path} is damaged: {error}") from error
    except CheckpointError:  # also a RuntimeError
        raise
    except (OSError, ValueError, TypeError, LookupError, RuntimeError, msgspec.MsgspecError) as error:
        raise CheckpointDamagedError(f"{path} is damaged: its sharded tensors cannot be read ({error})") from error
