"""Forms that other programs read: trees that ``torch.load(weights_only=True)`` opens, and plain safetensors files."""

from __future__ import annotations

import math
import os
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import orjson
import torch

from eventloop.checkpoint.commit import commit_file, write_all
from eventloop.checkpoint.header import LENGTH_BYTES, METADATA, SAFE_NAMES
from eventloop.checkpoint.tree import join
from eventloop.errors import CheckpointValueError

_LONGEST_INT: Final = 255 * 8 - 1  # bits; weights_only knows the pickle of no longer one
_AS_IT_IS: Final = frozenset(
    {type(None), bool, float, complex, str, torch.Tensor, torch.dtype, torch.device, torch.Size},
)


def weights_only(value: Any, path: str = "") -> Any:
    """Return a copy of a tree with nothing in it that ``torch.load(weights_only=True)`` refuses. Tensors are not copied.

    Tensors, numbers, text, bytes, lists, tuples, sets, dicts, ``OrderedDict``, ``Counter``, ``torch.Size``, dtypes and devices
    stay what they are. Converted are numpy arrays (tensors, in this machine's byte order), numpy scalars (numbers),
    ``defaultdict`` (dict), ``frozenset`` (set) and empty bytes (an empty ``bytearray``).

    Raises:
        CheckpointValueError: for a value that can be neither, with its path.
    """
    kind = type(value)
    if kind in _AS_IT_IS:
        return value
    if kind is int:
        return _checked_int(value, path)
    if kind is bytes:
        return value or bytearray()  # the pickle of b"" is a call of bytes(), which is not allowed
    if kind in (dict, OrderedDict, Counter, defaultdict):
        return _mapping(value, path)
    if kind in (list, tuple):
        return kind(weights_only(each, join(path, index)) for index, each in enumerate(value))
    if kind in (set, frozenset):
        return {_hashable(each, join(path, "(item)")) for each in value}
    if isinstance(value, np.ndarray | np.generic):
        return _from_numpy(value, path)
    raise CheckpointValueError(f"{path or 'the tree'}: torch.load(weights_only=True) takes no {kind.__qualname__}")


def _checked_int(value: int, path: str) -> int:
    if value.bit_length() > _LONGEST_INT:
        raise CheckpointValueError(
            f"{path or 'the tree'}: an integer of {value.bit_length():,} bits; torch.load(weights_only=True) takes up to "
            f"{_LONGEST_INT:,}"
        )
    return value


def _mapping(value: Mapping[Any, Any], path: str) -> Any:
    plain: dict[Any, Any] = OrderedDict() if type(value) is OrderedDict else {}
    for key, each in value.items():
        plain[_hashable(key, join(path, "(key)"))] = weights_only(each, join(path, key))
    if type(value) is OrderedDict:  # nn.Module.state_dict() keeps versions of modules in an attribute
        vars(plain).update(_mapping(vars(value), join(path, "(attributes)")))
    return Counter(plain) if type(value) is Counter else plain


def _hashable(value: Any, path: str) -> Any:
    if isinstance(value, frozenset) or (value == b"" and isinstance(value, bytes)):
        raise CheckpointValueError(f"{path}: torch.load(weights_only=True) takes no {value!r} there, only what is hashable")
    return weights_only(value, path)


def _from_numpy(value: Any, path: str) -> Any:
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(value.astype(value.dtype.newbyteorder("="), order="C"))
        except TypeError as error:
            raise CheckpointValueError(f"{path or 'the tree'}: an array of {value.dtype} cannot be a tensor") from error
    number = value.item()
    if type(number) not in (bool, int, float, complex):
        raise CheckpointValueError(f"{path or 'the tree'}: a {value.dtype} has no number of Python's for it")
    return number


def write_pth(value: Any, path: str | os.PathLike[str], size: int) -> None:
    """Write `value` by ``torch.save``, durably and atomically; ``size`` in bytes, about, is for errors.

    Raises:
        CheckpointError: from the `OSError` of the step that failed.
    """

    def fill(descriptor: int) -> None:
        file = _File(descriptor)
        try:
            torch.save(value, file)  # type: ignore[arg-type]  # it calls write and flush only
        except RuntimeError:  # torch closes its archive while the error is on its way, and then has another one
            if file.error is not None:
                raise file.error from None
            raise

    commit_file(path, size, fill)


class _File:
    """As much of a file as ``torch.save`` needs. It remembers the error that the system has given."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            write_all(self._descriptor, memoryview(data))
        except OSError as error:
            self.error = error
            raise
        return len(data)

    def flush(self) -> None:
        """Nothing waits."""


def write_safetensors(tensors: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a plain safetensors file, durably and atomically. Tied tensors are written under each of their names.

    Raises:
        CheckpointValueError: for what no safetensors file can hold, with its name.
        CheckpointError: from the `OSError` of the step that failed.
    """
    for name, tensor in tensors.items():
        _check_storable(name, tensor)
    # The widest elements first: so each tensor is aligned without holes, which the format forbids.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + math.prod(tensor.shape) * tensor.dtype.itemsize
        header[name] = {"dtype": SAFE_NAMES[tensor.dtype], "shape": tuple(tensor.shape), "data_offsets": (begin, end)}
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)

    def fill(descriptor: int) -> None:
        write_all(descriptor, memoryview(len(text).to_bytes(LENGTH_BYTES, "little") + text))
        for _, tensor in ordered:
            if tensor.numel():
                write_all(descriptor, tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    commit_file(path, LENGTH_BYTES + len(text) + end, fill)


def _check_storable(name: Any, tensor: Any) -> None:
    problem = ""
    if not isinstance(tensor, torch.Tensor):
        problem = f"is a {type(tensor).__name__}, and a safetensors file holds tensors only"
    elif tensor.dtype not in SAFE_NAMES:
        problem = f"is a tensor of {tensor.dtype}, which safetensors lacks"
    elif not isinstance(name, str) or name == METADATA or not _is_unicode(name):
        problem = "cannot name a tensor in a safetensors file"
    if problem:
        raise CheckpointValueError(f"{name!r} {problem}; the way out: export to a .pth file")


def _is_unicode(name: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in name)
