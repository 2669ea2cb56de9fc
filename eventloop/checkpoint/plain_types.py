"""Convert a tree to one that ``torch.load(weights_only=True)`` reads once ``torch.save`` has written it."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from typing import Any, Final

import numpy as np
import torch

from trainbus.eventloop.checkpoint.rebuild import convert_parts
from trainbus.eventloop.checkpoint.unpack import ObjectParts
from trainbus.eventloop.errors import CheckpointValueError

_LONGEST_INT: Final = 255 * 8 - 1  # bits; weights_only knows the pickle of no longer one
_AS_IT_IS: Final = frozenset(
    {type(None), bool, float, complex, str, torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device, torch.Size}
)


def weights_only(value: Any, path: str = "") -> Any:
    """Return a copy of a tree without the types that ``torch.load(weights_only=True)`` refuses. Tensors are not copied.

    Tensors, numbers, text, bytes, lists, tuples, sets, dicts, ``OrderedDict``, ``Counter``, ``torch.Size``, dtypes and devices
    stay what they are. Converted are numpy arrays (tensors, in this machine's byte order), numpy scalars (numbers),
    ``defaultdict`` (dict), ``frozenset`` (set) and empty bytes (an empty ``bytearray``).

    Raises:
        CheckpointValueError: for a value that can be neither, with its path.
    """
    kind = type(value)
    if kind in _AS_IT_IS:
        return value
    if kind is int and value.bit_length() <= _LONGEST_INT:
        return value
    if kind is bytes:
        return value or bytearray()  # the pickle of b"" is a call of bytes(), which is not allowed
    if kind in (dict, OrderedDict, Counter, defaultdict, list, tuple, set, frozenset):
        return convert_parts(value, path, weights_only)
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(value.astype(value.dtype.newbyteorder("="), order="C"))
        except TypeError as error:
            raise CheckpointValueError(f"{path or 'the tree'}: an array of {value.dtype} cannot be a tensor") from error
    if isinstance(value, np.generic):
        if type(number := value.item()) in (bool, int, float, complex):
            return number
        what = f"a {value.dtype}: Python has no number of this type"
    elif kind is int:
        what = f"an integer of {value.bit_length():,} bits; the limit is {_LONGEST_INT:,}"
    else:
        what = f"a {value.type if isinstance(value, ObjectParts) else kind.__qualname__}"
    raise CheckpointValueError(f"{path or 'the tree'}: torch.load(weights_only=True) refuses {what}")
