"""From checkpoints to files for other programs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from eventloop.checkpoint.load import inspect
from eventloop.checkpoint.plain import weights_only, write_pth, write_safetensors
from eventloop.checkpoint.store import AnyPath, as_path, store_of
from eventloop.checkpoint.tree import text_of
from eventloop.checkpoint.whole import load_whole
from eventloop.checkpoint.wrappers import without_wrappers
from eventloop.errors import CheckpointError

WEIGHTS: Final = "state_dict"
"""The key under which a checkpoint has the weights of its model, or a mapping of names to weights."""

_Path = str | os.PathLike[str] | AnyPath
_PTH: Final = (".pth", ".pt")
_SAFETENSORS: Final = ".safetensors"


def export_tree(path: _Path, out: _Path) -> None:
    """Write a whole checkpoint as a file that ``torch.load(out, weights_only=True)`` opens.

    What is converted is listed at `plain.weights_only`. The file is written durably and atomically, and replaces what has
    its name.

    Args:
        path: a checkpoint, or its URL. It is verified.
        out: the new file, ``.pth`` or ``.pt``, or a URL.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        CheckpointDamagedError: the checkpoint is damaged.
        CheckpointValueError: it holds what such a file cannot, with its path.
        CheckpointError: ``out`` has another suffix, or cannot be written.
    """
    place = _checked_out(out, _PTH)
    tree, size = weights_only(load_whole(path)), inspect(path).bytes
    _write(place, lambda file: write_pth(tree, file, size))


def export_weights(path: _Path, out: _Path, *, key: str = WEIGHTS, strip: bool = False, model: str | None = None) -> None:
    """Write the weights in a checkpoint, a plain ``state_dict``, as ``.pth`` or plain ``.safetensors``.

    Args:
        path: a checkpoint, or its URL. It is verified.
        out: the new file, or its URL; the suffix (``.pth``, ``.pt`` or ``.safetensors``) decides. Tied weights stay tied in a
            ``.pth`` and are written under each name in a ``.safetensors``.
        key: under which the checkpoint has them; a hook may keep other weights under a key of its own.
        strip: leave ``module.`` and ``_orig_mod.``, the names of wrappers, out of the keys.
        model: the name of the model, where the checkpoint has several.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        CheckpointDamagedError: the checkpoint is damaged.
        CheckpointValueError: the weights hold what such a file cannot, with its path.
        CheckpointError: there are no such weights, ``out`` has another suffix, or cannot be written.
    """
    place = _checked_out(out, (*_PTH, _SAFETENSORS))
    weights = _weights(load_whole(path), key, model)
    if strip:
        weights = strip_wrappers(weights)
    if place.suffix == _SAFETENSORS:
        _write(place, lambda file: write_safetensors(weights, file))
    else:
        plain, size = weights_only(weights), inspect(path).bytes
        _write(place, lambda file: write_pth(plain, file, size))


def strip_wrappers(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights without ``module.`` and ``_orig_mod.`` (DataParallel's and torch.compile's) in their keys.

    Raises:
        CheckpointError: two would get one key.
    """
    stripped: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, short in without_wrappers(weights).items():
        if short in stripped:
            raise CheckpointError(f"without the names of wrappers {origin[short]!r} and {name!r} would both be {short!r}")
        stripped[short], origin[short] = weights[name], name
    return stripped


def is_weights(value: object) -> bool:
    """Whether it is a plain ``state_dict``: a mapping with tensors in it, and maybe what modules keep as extra state."""
    return isinstance(value, Mapping) and any(isinstance(each, torch.Tensor) for each in value.values())


def _weights(tree: Any, key: str, model: str | None) -> Mapping[str, Any]:
    there = tree if isinstance(tree, Mapping) else {}
    if key not in there:
        raise CheckpointError(f"the checkpoint has no weights ({key}) but {', '.join(map(text_of, there)) or 'no keys'}")
    return _of_model(there[key], model)


def _of_model(weights: Any, model: str | None) -> Mapping[str, Any]:
    if is_weights(weights):
        if model is not None:
            raise CheckpointError(f"model {model!r}: the checkpoint has one model, without a name")
        return dict(weights)
    models = {str(name): each for name, each in weights.items() if is_weights(each)} if isinstance(weights, Mapping) else {}
    if model in models:
        return dict(models[model])
    if not models:
        raise CheckpointError("what the checkpoint has as weights holds no tensors")
    names = ", ".join(map(repr, models))
    if model is None:
        raise CheckpointError(f"the checkpoint has several models, {names}: say which one")
    raise CheckpointError(f"the checkpoint has no model {model!r} but {names}")


def _write(out: AnyPath, write: Callable[[Path], None]) -> None:
    if isinstance(out, Path):
        write(out)
        return
    with TemporaryDirectory() as directory:
        file = Path(directory) / out.name
        write(file)
        store_of(out).copy(file, out)


def _checked_out(out: _Path, suffixes: tuple[str, ...]) -> AnyPath:
    place = as_path(out)
    if place.suffix not in suffixes:
        raise CheckpointError(f"{out}: the name must end in {' or '.join(suffixes)}")
    return place
