"""Export checkpoints to files for other programs: ``.pth`` for ``torch.load(weights_only=True)``, and plain safetensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import orjson
import torch

from trainbus.convert.torch_file import Pickled
from trainbus.eventloop.checkpoint.commit import commit_file, crc32, write_all
from trainbus.eventloop.checkpoint.container import LENGTH_BYTES, METADATA
from trainbus.eventloop.checkpoint.dtypes import SAFE_NAMES
from trainbus.eventloop.checkpoint.layout import with_length
from trainbus.eventloop.checkpoint.plain_types import weights_only
from trainbus.eventloop.checkpoint.scores import as_metadata, scores_of
from trainbus.eventloop.checkpoint.store import AnyPath, AsPath, as_path, link
from trainbus.eventloop.checkpoint.unpack import ObjectParts
from trainbus.eventloop.checkpoint.weights import WEIGHTS, load_whole, pick_weights
from trainbus.eventloop.errors import CheckpointError, CheckpointValueError

_PTH: Final = (".pth", ".pt")
_SAFETENSORS: Final = ".safetensors"


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


def _checked_out(out: AsPath, suffixes: tuple[str, ...]) -> AnyPath:
    path = as_path(out)
    if path.suffix not in suffixes:
        raise CheckpointError(f"{out}: the name must end in {' or '.join(suffixes)}")
    return path


def _write(value: Any, path: AsPath, out: AnyPath) -> None:
    """Write a tree of the checkpoint ``path``, in the format that the suffix of ``out`` names."""
    if out.suffix == _SAFETENSORS:
        size, fill = safetensors_file(value, as_metadata(scores_of(path)))
    else:
        pickled = Pickled(weights_only(value))
        size, fill = pickled.file(pickled.storages)
    if isinstance(out, Path):
        commit_file(out, size, fill)
        return
    with TemporaryDirectory() as directory:
        file = Path(directory) / out.name
        commit_file(file, size, fill)
        link(file, out)


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
