"""The weights in a checkpoint, whole also where the run that wrote it had them sharded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from trainbus.eventloop.checkpoint.objects import together_if_known
from trainbus.eventloop.checkpoint.reading import load
from trainbus.eventloop.checkpoint.shards import sharded_in, verify_shards
from trainbus.eventloop.checkpoint.store import AsPath, as_path
from trainbus.eventloop.checkpoint.unpack import text_of
from trainbus.eventloop.checkpoint.wrappers import without_wrappers
from trainbus.eventloop.errors import CheckpointError

WEIGHTS: Final = "state_dict"
"""The key under which a checkpoint has the weights of its model, or a mapping of names to weights."""


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
