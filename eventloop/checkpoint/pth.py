"""Reading what ``torch.save`` has written, without running any of it."""

from __future__ import annotations

import os
import pickle
import re
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any, Final

import torch

from eventloop.checkpoint.bounds import check_memory
from eventloop.checkpoint.inert import revive, stand_ins
from eventloop.checkpoint.store import store_of
from eventloop.errors import CheckpointDamagedError, CheckpointError

_REFUSED: Final = re.compile(r"GLOBAL (\S+)")
ZIP: Final = b"PK\x03\x04"
"""How files of ``torch.save`` begin, since torch 1.6;"""
LEGACY: Final = b"\x80\x02\x8a\x0a"
"""and before."""
# What a pickle that was not made by torch.save can make of the unpickler.
_NONSENSE: Final = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    EOFError,
    MemoryError,
    struct.error,
)


def load_pth(path: str | os.PathLike[str]) -> Any:
    """Read a file of ``torch.save`` by ``torch.load(weights_only=True)``, and check the checksums in it first.

    Beyond what torch allows, numpy's arrays and scalars and the objects of every `ForeignFormat` are read, through stand-ins
    (see `inert`): no code of the file runs, and the system that wrote it is not needed. For the time of the call the stand-ins
    are in ``torch.serialization``'s list, which is one for all threads.

    Returns:
        The tree, with all tensors on the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointDamagedError: the bytes are not those that were written.
        CheckpointError: not of ``torch.save``, or it names code that would have to be run (all names are listed).
    """
    path = Path(path)
    zipped = _check(path)
    size = path.stat().st_size
    with torch.serialization.safe_globals(list(stand_ins())):
        try:
            tree = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(_refusal(path, str(error), zipped=zipped)) from error
        except _NONSENSE as error:
            raise CheckpointDamagedError(f"{path} is damaged, or torch.save did not write it: {_first_line(error)}") from error
    try:
        return revive(tree, size)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except MemoryError as error:
        raise CheckpointDamagedError(f"{path} is damaged, or too large for the memory of this machine") from error


def _check(path: Path) -> bool:
    """Whether it is a zip file, as torch writes since 1.6, with every checksum right (torch.load does not look at them)."""
    with store_of(path).opened(path) as (file, size):
        start = file.read(len(ZIP))
    check_memory(size)
    if start == LEGACY:
        return False
    if start != ZIP:
        raise CheckpointError(f"{path} is not a file that torch.save wrote (it begins with {start!r})")
    try:
        with zipfile.ZipFile(path) as archive:
            check_stored(archive, size)
            broken = archive.testzip()
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, zlib.error) as error:
        raise CheckpointDamagedError(f"{path} is damaged: {error}") from error
    if broken is not None:
        raise CheckpointDamagedError(
            f"{path} is damaged: the checksum of {broken} in it is wrong. (Or it was written without checksums, see "
            "torch.serialization.set_crc32_options; then save it again with them.)"
        )
    return True


def check_stored(archive: zipfile.ZipFile, size: int) -> None:
    """Refuse parts that become larger when they are read: torch.save compresses none, and each of its bytes is of one part.

    Raises:
        ValueError: ``archive``, a file of ``size`` bytes, has such parts.
    """
    parts = archive.infolist()
    if any(part.compress_type != zipfile.ZIP_STORED for part in parts) or sum(part.file_size for part in parts) > size:
        raise ValueError("its parts are compressed, or larger than the file; torch.save writes them as they are")


def _refusal(path: Path, message: str, *, zipped: bool) -> str:
    names = _refused_names(path, zipped=zipped) or sorted(set(_REFUSED.findall(message)))
    if not names:
        detail = message.partition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
        return f"{path} cannot be read without running it: {detail or message.partition(chr(10))[0]}"
    return (
        f"{path} names code, which may do anything when it is run, so it is not: {', '.join(names)}. If you trust the file, "
        "keep its plain parts where that code is installed: "
        "c = torch.load(FILE, weights_only=False); torch.save({'state_dict': c['state_dict']}, 'plain.pth'), and import that"
    )


def _refused_names(path: Path, *, zipped: bool) -> list[str]:
    if not zipped:
        return []
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except (*_NONSENSE, pickle.UnpicklingError):
        return []


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
