"""Read files of ``torch.save`` without running them. 0.2 wrote the parts of sharded tensors so."""

from __future__ import annotations

import io
import pickle
import re
import zipfile
import zlib
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from trainbus.eventloop.checkpoint.header import LEGACY, ZIP, check_memory
from trainbus.eventloop.checkpoint.store import open_file
from trainbus.eventloop.errors import CheckpointDamagedError, CheckpointError

_REFUSED: Final = re.compile(r"GLOBAL (\S+)")


def load_pickled(source: Path | bytes | memoryview, name: object) -> Any:
    """Read a file of ``torch.save`` by ``torch.load(weights_only=True)``, and check the checksums in it first.

    The tensors of a file on a disk are mapped: their bytes are read when they are used.

    Args:
        source: the file, or its bytes.
        name: names it in errors.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointDamagedError: the bytes differ from those that were written.
        CheckpointError: not a file of ``torch.save``, or it names code that would have to be run (the error lists all names).
    """
    with open_file(source) if isinstance(source, Path) else nullcontext((io.BytesIO(source), len(source))) as (file, size):
        zipped = _check(file, size, name)
    again: Path | BinaryIO = source if isinstance(source, Path) else io.BytesIO(source)
    try:
        return torch.load(again, map_location="cpu", weights_only=True, mmap=zipped and again is source)
    except pickle.UnpicklingError as error:
        raise CheckpointError(_refusal(again, name, str(error))) from error
    except OSError:
        raise
    except Exception as error:  # any: torch.save did not write this pickle
        first = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointDamagedError(f"{name} is damaged, or torch.save did not write it: {first}") from error


def _check(file: BinaryIO, size: int, name: object) -> bool:
    """Check the checksums of a zip file, as torch writes since 1.6: torch.load does not. Return False for an older file."""
    start = file.read(len(ZIP))
    check_memory(size)
    if start == LEGACY:
        return False
    if start != ZIP:
        raise CheckpointError(f"{name} is not a file that torch.save wrote (it begins with {start!r})")
    try:
        with zipfile.ZipFile(file) as archive:
            # A compressed part may become larger than the memory, and cannot be mapped.
            compressed = any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist())
            broken = None if compressed else archive.testzip()
    except (zipfile.BadZipFile, EOFError, ValueError, RuntimeError, zlib.error) as error:  # RuntimeError: encrypted
        raise CheckpointDamagedError(f"{name} is damaged: {error}") from error
    if compressed:
        raise CheckpointDamagedError(f"{name} is damaged: its parts are compressed; torch.save writes them as they are")
    if broken is not None:
        raise CheckpointDamagedError(
            f"{name} is damaged: the checksum of {broken} in it is wrong. (Or it was written without checksums, see "
            "torch.serialization.set_crc32_options; then save it again with them.)"
        )
    return True


def _refusal(file: BinaryIO | Path, name: object, message: str) -> str:
    names = set(_REFUSED.findall(message))  # the first one only
    with suppress(Exception):  # torch looks only into zip files
        if not isinstance(file, Path):
            file.seek(0)
        names.update(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    listed = ", ".join(sorted(names))
    if not listed:
        detail = message.partition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
        return f"{name} cannot be read without running it: {detail or message.partition(chr(10))[0]}"
    return (
        f"{name} names code, which may do anything when it is run, so it is not: {listed}. If you trust the file, "
        "keep its plain parts where that code is installed: "
        "c = torch.load(FILE, weights_only=False); torch.save({'state_dict': c['state_dict']}, 'plain.pth'), and import that"
    )
