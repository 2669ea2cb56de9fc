"""``RankLayout``: which ranks hold which weights of the models.

Most often each rank has all names: it holds whole weights, or a part of each. Pipeline stages and local experts are *apart*:
ranks hold tensors that others lack, each under the name that it has in the whole model. Such names tell what is the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from trainbus.eventloop.checkpoint import WrapperNames, is_dtensor, is_sharded


class RankLayout:
    """What the ranks of a run hold; by default, all hold the same whole weights.

    Args:
        sharded: whether weights of any rank are spread over processes.
        own: the names of this rank's weights, if ranks have different ones.
        holders: the first rank that holds each name of any rank, likewise.
    """

    def __init__(self, *, sharded: bool = False, own: Collection[str] = (), holders: Mapping[str, int] | None = None) -> None:
        self.apart = holders is not None
        """True if ranks hold weights that others lack."""
        self.in_parts = sharded or self.apart
        """True if a checkpoint has parts of several ranks."""
        self.own = frozenset(own)
        self.holders: dict[str, int] = dict(holders or {})
        """The first rank that holds each weight, as far as that may be another one than rank 0."""

    def is_elsewhere(self, name: str) -> bool:
        """Return True for weights that this rank lacks and another one holds."""
        return self.apart and name in self.holders and name not in self.own


def find_layout(models: Mapping[str, torch.nn.Module], distinct: Callable[[Any], Mapping[int, Any]]) -> RankLayout:
    """Compare the names of the models' weights on all ranks, by ``Coordinator.distinct``. A collective.

    The usual case takes one exchange of a few bytes, and no look at a ``state_dict``.
    """
    found = distinct((_digest(models), any(map(is_sharded, models.values()))))
    sharded = any(one for _, one in found.values())
    if len({digest for digest, _ in found.values()}) == 1:
        return RankLayout(sharded=sharded)
    weights = dict(named_weights(models))
    own = [name for name, value in weights.items() if not (is_dtensor(value) and value.device_mesh.get_coordinate() is None)]
    holders: dict[str, int] = {}
    for rank, names in distinct(own).items():
        for name in names:
            holders.setdefault(name, rank)
    return RankLayout(sharded=sharded, own=weights, holders=holders)


def named_weights(models: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield each value in the ``state_dict`` of the models, by its key in checkpoints; of several, behind the model's name."""
    for model_name, model in models.items():
        prefix, state = "" if set(models) == {"model"} else f"{model_name}.", model.state_dict()
        for name, key in WrapperNames(model, state).short.items():
            yield f"{prefix}{key}", state[name]


def _digest(models: Mapping[str, torch.nn.Module]) -> bytes:
    found = hashlib.sha256()
    for model_name, model in models.items():
        names = sorted(name for name, _ in model.named_parameters(remove_duplicate=False))
        found.update("\n".join([model_name, *names, ""]).encode("utf-8", "surrogatepass"))
    return found.digest()
