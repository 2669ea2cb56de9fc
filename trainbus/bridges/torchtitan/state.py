"""The state of a bus as an entry of a checkpoint of ``torch.distributed.checkpoint`` (DCP)."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any, Final

import torch

from trainbus.eventloop.checkpoint import is_dtensor, weights_only
from trainbus.eventloop.checkpoint.rebuild import convert_parts

KEY: Final = "trainbus"
"""The name of the state of the bus in a checkpoint."""
_SHARDED: Final = f"{KEY}.sharded"
"""In a checkpoint, the names of sharded tensors begin with it; in the rest, it is the key of such a name."""

_CONTAINERS: Final = (dict, OrderedDict, Counter, defaultdict, list, tuple, set, frozenset)


class SplitEntry:
    """An entry, divided into sharded tensors, which all ranks write together, and the rest, of which each rank has its own.

    DCP loads by the names and shapes that it is given, and the state of hooks has no fixed ones. So the rest is one value,
    bytes of ``torch.save``. The names and shapes of the sharded tensors are read from the checkpoint.
    """

    def __init__(self, entry: Any) -> None:
        self.sharded: dict[str, torch.Tensor] = {}
        """The sharded tensors by the path to them."""
        self.rest = self._without_sharded(entry)
        """The entry with a path in the place of each sharded tensor."""

    def _without_sharded(self, value: Any, path: str = "") -> Any:
        if is_dtensor(value):
            self.sharded[path] = value
            return {_SHARDED: path}
        return convert_parts(value, path, self._without_sharded) if type(value) in _CONTAINERS else weights_only(value, path)

    def stored(self, rank: int, **more: Any) -> dict[str, Any]:
        """Return the values for the checkpoint, of which only the sharded tensors change later."""
        written = io.BytesIO()
        torch.save({"entry": self.rest, **more}, written)
        return {f"rank_{rank}": written.getvalue(), "sharded": self.sharded}


def wanted(saved: Mapping[str, Any], rank: int, own: Mapping[str, torch.Tensor]) -> dict[str, Any] | None:
    """Return what DCP fills with the state of the bus, from the names that a checkpoint has; None if it has no such state.

    Sharded tensors of the present run (``own``) are read as they are divided now, others whole.
    """
    mine = next((name for name in (f"rank_{rank}", "rank_0") if f"{KEY}.{name}" in saved), None)
    if mine is None:
        return None
    names = [name.removeprefix(f"{_SHARDED}.") for name in saved if name.startswith(f"{_SHARDED}.")]
    return {mine: b"", "sharded": {name: _empty(saved[f"{_SHARDED}.{name}"], own.get(name)) for name in names}}


def _empty(saved: Any, own: torch.Tensor | None) -> torch.Tensor:
    if own is not None and own.shape == saved.size:
        return torch.empty_like(own, dtype=saved.properties.dtype)
    return torch.empty(saved.size, dtype=saved.properties.dtype)


def restored(filled: Mapping[str, Any]) -> Any:
    """Return the entry and what was stored beside it, from what DCP has filled."""
    sharded, (rest,) = filled["sharded"], (value for name, value in filled.items() if name != "sharded")
    tree = torch.load(io.BytesIO(rest), map_location="cpu", weights_only=True)
    return _with_tensors(tree, sharded)


def _with_tensors(value: Any, sharded: Mapping[str, torch.Tensor]) -> Any:
    if type(value) is dict and value.keys() == {_SHARDED}:
        return sharded[value[_SHARDED]]
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(part, sharded) for part in value)
    if isinstance(value, dict):
        for key, part in value.items():
            value[key] = _with_tensors(part, sharded)
    return value
