"""Export checkpoints to files for other programs: ``.pth`` for ``torch.load(weights_only=True)``, and plain safetensors."""

from __future__ import annotations

import io
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import orjson
import torch

from trainbus.eventloop.checkpoint.commit import commit_file, crc32, write_all
from trainbus.eventloop.checkpoint.container import LENGTH_BYTES, METADATA, SAFE_NAMES
from trainbus.eventloop.checkpoint.layout import with_length
from trainbus.eventloop.checkpoint.load import inspect, load
from trainbus.eventloop.checkpoint.objects import ObjectParts, together_if_known
from trainbus.eventloop.checkpoint.rebuild import convert_parts
from trainbus.eventloop.checkpoint.scores import as_metadata, scores_of
from trainbus.eventloop.checkpoint.shards import sharded_in, verify_shards
from trainbus.eventloop.checkpoint.store import AnyPath, AsPath, as_path, link
from trainbus.eventloop.checkpoint.tree import text_of
from trainbus.eventloop.checkpoint.wrappers import without_wrappers
from trainbus.eventloop.errors import CheckpointError, CheckpointValueError

WEIGHTS: Final = "state_dict"
"""The key under which a checkpoint has the weights of its model, or a mapping of names to weights."""

_PTH: Final = (".pth", ".pt")
_SAFETENSORS: Final = ".safetensors"
_Fill = Callable[[int], object]
_LONGEST_INT: Final = 255 * 8 - 1  # bits; weights_only knows the pickle of no longer one
_AS_IT_IS: Final = frozenset(
    {type(None), bool, float, complex, str, torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device, torch.Size}
)


def load_whole(path: AsPath) -> Any:
    """Read a checkpoint on one process, with whole tensors also where the run that wrote it had them sharded.

    A value whose class is not imported is left in parts.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointDamagedError: the file or a part beside it is damaged.
    """
    state = load(path, make=together_if_known)
    if sharded_in(state) is None:
        return state
    verify_shards(state, path)
    from trainbus.eventloop.checkpoint.sharded import put_shards  # takes a second to import

    return put_shards(state, as_path(path), lambda keys, shape, dtype: torch.empty(shape, dtype=dtype))


def export_tree(path: AsPath, out: AsPath) -> None:
    """Write a whole checkpoint, durably and atomically, as a file that ``torch.load(out, weights_only=True)`` opens.

    ``weights_only`` lists the types that are converted. The scores of the checkpoint are added under ``"scores"``.

    Args:
        path: a checkpoint, or its URL. It is verified.
        out: the new file, ``.pth`` or ``.pt``, or a URL. A file of that name is replaced.

    Raises:
        FileNotFoundError: the checkpoint does not exist.
        CheckpointDamagedError: the checkpoint is damaged.
        CheckpointValueError: for a value that such a file cannot hold, with its path.
        CheckpointError: ``out`` has another suffix, or cannot be written.
    """
    out, tree, scores = _checked_out(out, _PTH), load_whole(path), scores_of(path)
    if scores and isinstance(tree, dict):
        tree = {"scores": scores, **tree}
    _write(tree, path, out)


def export_weights(path: AsPath, out: AsPath, *, key: str = WEIGHTS, strip: bool = False, model: str | None = None) -> None:
    """Write the weights in a checkpoint, a plain ``state_dict``, as ``.pth`` or plain ``.safetensors``.

    Args:
        path: a checkpoint, or its URL. It is verified.
        out: the new file, or its URL; the suffix (``.pth``, ``.pt`` or ``.safetensors``) decides. Tied weights stay tied in a
            ``.pth`` and are written under each name in a ``.safetensors``, whose metadata have the scores.
        key: the checkpoint's key of the weights; a hook may keep other weights under another key.
        strip: leave ``module.`` and ``_orig_mod.``, the names of wrappers, out of the keys.
        model: the name of the model, where the checkpoint has several.

    Raises:
        CheckpointError: the checkpoint lacks these weights; else see ``export_tree``.
    """
    out = _checked_out(out, (*_PTH, _SAFETENSORS))
    _write(pick_weights(load_whole(path), key=key, strip=strip, model=model), path, out)


def pick_weights(tree: Any, *, key: str = WEIGHTS, strip: bool = False, model: str | None = None) -> dict[str, Any]:
    """Return the weights in the tree of a checkpoint, a plain ``state_dict``; for the arguments see ``export_weights``.

    Raises:
        CheckpointError: the checkpoint lacks these weights.
    """
    weights = dict(_weights(tree, key, model))
    return _strip_wrappers(weights) if strip else weights


def is_weights(value: object) -> bool:
    """Return whether it is a plain ``state_dict``: a mapping with tensors, and perhaps the extra state of modules."""
    return isinstance(value, Mapping) and any(isinstance(each, torch.Tensor) for each in value.values())


def _strip_wrappers(weights: Mapping[str, Any]) -> dict[str, Any]:
    origin: dict[str, str] = {}
    for name, short in without_wrappers(weights).items():
        if (first := origin.setdefault(short, name)) != name:
            raise CheckpointError(f"without the names of wrappers {first!r} and {name!r} would both be {short!r}")
    return {short: weights[name] for short, name in origin.items()}


def _weights(tree: Any, key: str, model: str | None) -> Any:
    there = tree if isinstance(tree, Mapping) else {}
    if key not in there:
        raise CheckpointError(f"the checkpoint has no weights ({key}) but {', '.join(map(text_of, there)) or 'no keys'}")
    weights = there[key]
    if is_weights(weights):
        if model is not None:
            raise CheckpointError(f"model {model!r}: the checkpoint has one model, without a name")
        return weights
    models = {str(name): each for name, each in weights.items() if is_weights(each)} if isinstance(weights, Mapping) else {}
    if model in models:
        return models[model]
    if not models:
        raise CheckpointError(f"the checkpoint has no tensors under {key!r}")
    names = ", ".join(map(repr, models))
    problem = (
        f"the checkpoint has several models, {names}; give the name of one"
        if model is None
        else f"{model!r} is not a model of the checkpoint; its models are {names}"
    )
    raise CheckpointError(problem)


def _checked_out(out: AsPath, suffixes: tuple[str, ...]) -> AnyPath:
    path = as_path(out)
    if path.suffix not in suffixes:
        raise CheckpointError(f"{out}: the name must end in {' or '.join(suffixes)}")
    return path


def _write(value: Any, path: AsPath, out: AnyPath) -> None:
    """Write a tree of the checkpoint ``path``, in the format that the suffix of ``out`` names."""
    fill: _Fill
    if out.suffix == _SAFETENSORS:
        size, fill = safetensors_file(value, as_metadata(scores_of(path)))
    else:
        size, fill = inspect(path).bytes, partial(_fill_pth, weights_only(value))
    if isinstance(out, Path):
        commit_file(out, size, fill)
        return
    with TemporaryDirectory() as directory:
        file = Path(directory) / out.name
        commit_file(file, size, fill)
        link(file, out)


def _fill_pth(value: Any, descriptor: int) -> None:
    try:
        torch.save(value, _File(descriptor))  # type: ignore[arg-type]  # it calls write and flush only
    except RuntimeError as error:  # torch closes its archive while the error of the system is on its way, and has another then
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


class _File(io.RawIOBase):
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: Any) -> int:
        write_all(self._descriptor, memoryview(data))
        return len(data)


def safetensors_file(
    tensors: Mapping[str, Any], metadata: Mapping[str, str], read: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach
) -> tuple[int, Callable[[int], int]]:
    """Return the size of a plain safetensors file, and what writes it to a file descriptor and returns the CRC-32 of all of it.

    Tied tensors are written under each of their names. ``read`` gives each tensor its data when it is written.
    """
    for name, tensor in tensors.items():
        _check_storable(name, tensor)
    # The widest elements first: so each tensor is aligned without holes, which the format forbids.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, Any] = {METADATA: dict(metadata)}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": _name_of(tensor.dtype), "shape": tuple(tensor.shape), "data_offsets": (begin, end)}
    start = with_length(orjson.dumps(header))

    def fill(descriptor: int) -> int:
        write_all(descriptor, start)
        crc = crc32((start,))
        for _, tensor in ordered:
            if tensor.numel():
                data = read(tensor).resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().data
                write_all(descriptor, data)
                crc = crc32((data,), crc)
                del data  # before the next one is read
        return crc

    return len(start) + end, fill


@cache
def _name_of(dtype: torch.dtype) -> str | None:
    """Return the name of a dtype in a safetensors file; of one that older packages lack, what the installed package writes."""
    if dtype in SAFE_NAMES:
        return SAFE_NAMES[dtype]
    try:
        from safetensors.torch import save

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about dtypes that no file will have
            written = save({"x": torch.empty(2, dtype=dtype)})
    except Exception:  # noqa: BLE001 - it is not installed, or refuses the dtype by errors of several kinds
        return None
    info = orjson.loads(written[LENGTH_BYTES : LENGTH_BYTES + int.from_bytes(written[:LENGTH_BYTES], "little")])["x"]
    return str(info["dtype"]) if info["shape"] == [2] else None


def _check_storable(name: Any, tensor: Any) -> None:
    problem = ""
    if not isinstance(tensor, torch.Tensor):
        kind = tensor.type if isinstance(tensor, ObjectParts) else type(tensor).__name__
        problem = f"is a {kind}, and a safetensors file holds dense tensors only"
    elif tensor.layout is not torch.strided:
        problem = f"is a {tensor.layout} tensor, and a safetensors file holds dense ones only"
    elif _name_of(tensor.dtype) is None:
        problem = f"is a tensor of {tensor.dtype}, which safetensors lacks"
    elif not isinstance(name, str) or name == METADATA or any("\ud800" <= character <= "\udfff" for character in name):
        problem = "cannot name a tensor in a safetensors file"
    if problem:
        raise CheckpointValueError(f"{name!r} {problem}; export to a .pth file instead")


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
