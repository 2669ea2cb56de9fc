"""Read a file of ``torch.save`` without running any of it.

``torch.load(weights_only=True)`` calls only a list of torch's own functions. Any other name in a pickle must be added to that
list. Here the added object is never the real one, but a placeholder that records its arguments, from which plain data are made.
So numpy's arrays are read without numpy's unpickler, and objects of other training systems without these systems.
``register_format`` adds a system; ``trainbus.compat`` does so for those that it supports.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final, Literal, NamedTuple, Self

import torch

from trainbus.eventloop.checkpoint.load import LEGACY, ZIP, check_memory
from trainbus.eventloop.checkpoint.rebuild import convert_parts, number_array
from trainbus.eventloop.checkpoint.store import open_file
from trainbus.eventloop.checkpoint.tree import MAX_DEPTH, MAX_VALUES
from trainbus.eventloop.errors import CheckpointDamagedError, CheckpointError

_REFUSED: Final = re.compile(r"GLOBAL (\S+)")
_CONTAINERS: Final = frozenset({dict, OrderedDict, Counter, list, tuple, set})
_REPEATED: Final = 1_000_000
"""Values beyond the size of the file: a container that is held several times is copied each time."""

Converted = tuple[dict[str, Any], dict[str, str]]
"""The state of a run, and notes for the user: a text for each heading."""
ToPlain = Callable[[tuple[Any, ...], Any], Any]
"""Makes plain data of an object's construction arguments and state."""


class ForeignFormat(NamedTuple):
    """The functions that read the checkpoints of another system."""

    recognises: Callable[[Any], bool]
    """Returns True for a tree of this format, as ``load_pth`` returns it."""
    convert: Callable[[Any], Converted]
    """Returns the state of a run that continues from such a tree, and notes for the user."""
    objects: Mapping[str, ToPlain] = {}
    """For each class that its pickles name."""


_formats: list[ForeignFormat] = []


def register_format(foreign: ForeignFormat) -> None:
    """Register a format for ``load_pth``, ``convert_foreign`` and thereby ``trainbus checkpoint import``."""
    _formats.append(foreign)


def convert_foreign(tree: Any) -> Converted | None:
    """Return the state of a run that continues from ``tree``; None if no registered format recognises it."""
    return next((known.convert(tree) for known in _formats if known.recognises(tree)), None)


def load_pth(path: str | os.PathLike[str]) -> Any:
    """Read a file of ``torch.save`` by ``torch.load(weights_only=True)``, and check the checksums in it first.

    Beyond what torch allows, numpy's arrays and scalars and the objects of every ``ForeignFormat`` are read. A ``bytearray``
    becomes bytes. For the time of the call the stand-ins are in ``torch.serialization``'s list, which is one for all threads.

    Returns:
        The tree, with all tensors on the CPU.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointDamagedError: the bytes differ from those that were written.
        CheckpointError: not a file of ``torch.save``, or it names code that would have to be run (the error lists all names).
    """
    path = Path(path)
    with open_file(path) as (file, size):
        _check(file, size, path)
    return _load(path, size, path)


def load_pickled(data: bytes | memoryview, name: str) -> Any:
    """Read a file of ``torch.save`` that is in memory as ``load_pth`` does; ``name`` names it in errors."""
    file = io.BytesIO(data)
    _check(file, len(data), name)
    file.seek(0)
    return _load(file, len(data), name)


def _load(file: BinaryIO | Path, size: int, path: object) -> Any:
    known = {**_OBJECTS, **{name: plain for foreign in _formats for name, plain in foreign.objects.items()}}
    stand_ins: list[Any] = [(type("StandIn", (_Inert,), {"name": name}), name) for name in (*known, *_PARTS)]
    with torch.serialization.safe_globals(stand_ins):
        try:
            tree = torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(_refusal(file, path, str(error))) from error
        except OSError:
            raise
        except Exception as error:  # any: torch.save did not write this pickle
            first = str(error).partition("\n")[0] or type(error).__name__
            raise CheckpointDamagedError(f"{path} is damaged, or torch.save did not write it: {first}") from error
    try:
        return _Reviver(size, known).value(tree, "")
    except (CheckpointError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    except MemoryError as error:
        raise CheckpointDamagedError(f"{path} is damaged, or too large for the memory of this machine") from error


def _check(file: BinaryIO, size: int, path: object) -> None:
    """Check the checksums of a zip file, as torch writes since 1.6: torch.load does not."""
    start = file.read(len(ZIP))
    check_memory(size)
    if start == LEGACY:
        return
    if start != ZIP:
        raise CheckpointError(f"{path} is not a file that torch.save wrote (it begins with {start!r})")
    try:
        with zipfile.ZipFile(file) as archive:
            check_stored(archive, size)
            broken = archive.testzip()
    except (zipfile.BadZipFile, EOFError, ValueError, RuntimeError, zlib.error) as error:  # RuntimeError: encrypted
        raise CheckpointDamagedError(f"{path} is damaged: {error}") from error
    if broken is not None:
        raise CheckpointDamagedError(
            f"{path} is damaged: the checksum of {broken} in it is wrong. (Or it was written without checksums, see "
            "torch.serialization.set_crc32_options; then save it again with them.)"
        )


def check_stored(archive: zipfile.ZipFile, size: int) -> None:
    """Refuse parts that become larger when they are read: torch.save compresses none, and each of its bytes is of one part."""
    parts = archive.infolist()
    if any(part.compress_type != zipfile.ZIP_STORED for part in parts) or sum(part.file_size for part in parts) > size:
        raise ValueError("its parts are compressed, or larger than the file; torch.save writes them as they are")


def _refusal(file: BinaryIO | Path, path: object, message: str) -> str:
    names = set(_REFUSED.findall(message))  # the first one only
    with suppress(Exception):  # torch looks only into zip files
        if not isinstance(file, Path):
            file.seek(0)
        names.update(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    listed = ", ".join(sorted(names))
    if not listed:
        detail = message.partition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
        return f"{path} cannot be read without running it: {detail or message.partition(chr(10))[0]}"
    return (
        f"{path} names code, which may do anything when it is run, so it is not: {listed}. If you trust the file, "
        "keep its plain parts where that code is installed: "
        "c = torch.load(FILE, weights_only=False); torch.save({'state_dict': c['state_dict']}, 'plain.pth'), and import that"
    )


class _Inert:
    """A placeholder for an object in a pickle: the arguments of its construction, and its state."""

    name: ClassVar[str]
    args: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *args: Any) -> Self:
        self = object.__new__(cls)
        self.args = args
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reviver:
    """Copy a tree with plain data in place of placeholders. Tensors are not copied; they have at most ``size`` bytes."""

    def __init__(self, size: int, known: Mapping[str, ToPlain]) -> None:
        self._size = size
        self._known = known
        # A pickle may hold one list a thousand times within another that it holds a thousand times …; as a tree without end.
        # What it holds once takes a byte of it at least.
        self._left = self._most = min(MAX_VALUES, size + _REPEATED)
        self._seen: set[int] = set()
        self._stored = self._spread = 0

    def value(self, value: Any, path: str, depth: int = 0) -> Any:
        self._left -= 1
        if self._left < 0 or depth > MAX_DEPTH:
            where = path[:200] or "the tree"
            raise CheckpointError(f"{where}: nested deeper than {MAX_DEPTH} levels, or more than {self._most:,} values in all")
        if type(value) in _CONTAINERS:
            return convert_parts(value, path, partial(self.value, depth=depth + 1))
        if isinstance(value, torch.Tensor):
            self._weigh(path, value)
        asked = value if isinstance(value, type) else type(value)
        if issubclass(asked, _Inert):
            plain = None if asked is value else self._known.get(asked.name)
            if plain is None:
                raise CheckpointError(f"{path or 'the tree'}: a reference to {asked.name}, which is code, not data")
            try:
                return self.value(plain(value.args, value.state), path, depth + 1)
            except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
                raise CheckpointError(f"{path or 'the tree'}: this {asked.name} cannot be read ({error})") from error
        return bytes(value) if type(value) is bytearray else value

    def _weigh(self, path: str, tensor: torch.Tensor) -> None:
        """Refuse tensors that have more bytes than the file, or that the memory could not hold without their strides."""
        if tensor.layout is not torch.strided or tensor.is_meta:
            return  # no checkpoint holds it; saving it is an error
        storage = tensor.untyped_storage()
        if id(tensor) not in self._seen:
            self._spread += tensor.numel() * tensor.itemsize
        if storage.data_ptr() not in self._seen:
            self._stored += storage.nbytes()
        self._seen |= {id(tensor), storage.data_ptr()}
        if self._stored > self._size:
            raise CheckpointError(f"{path or 'the tree'}: its tensors have more bytes than the file")
        check_memory(self._spread)


def _array(args: tuple[Any, ...], state: Any) -> Any:
    _, shape, dtype, fortran, data = state
    return _numbers(dtype, data, tuple(shape), "F" if fortran else "C")


def _numbers(dtype: _Inert, data: bytes | _Inert, shape: tuple[int, ...] = (), order: Literal["C", "F"] = "C") -> Any:
    (code, *_), (_, bytes_order, *_) = dtype.args, dtype.state
    data = _bytes(data.args, data.state) if isinstance(data, _Inert) else data
    return number_array(f"{bytes_order}{code}", shape, data, order)


def _bytes(args: tuple[Any, ...], state: Any) -> bytes:
    # Protocol 2 has no bytes: it names _codecs.encode, which torch knows, and for none at all bytes().
    if args:
        raise ValueError("its bytes are made by a call with arguments; only empty ones can be read")
    return b""


# numpy 2 has renamed numpy.core.
_OBJECTS: Final[dict[str, ToPlain]] = {
    "numpy.core.multiarray._reconstruct": _array,
    "numpy._core.multiarray._reconstruct": _array,
    "numpy.core.multiarray.scalar": lambda args, state: _numbers(*args)[()],
    "numpy._core.multiarray.scalar": lambda args, state: _numbers(*args)[()],
    "builtins.bytes": _bytes,
}
# These mean something only within one of the above. getattr: how protocol 2 names the methods of objects.
_PARTS: Final = ("numpy.ndarray", "numpy.dtype", "builtins.getattr")
