"""Copies of buffers (statistics of batch norms) from the beginning of a step, which its forward pass changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from trainbus.eventloop.privates import foreach_copy_, tree_map


class Buffers:
    """Keep the buffers of models as they were at the beginning of a step.

    All those that a ``state_dict()`` has are copied each time: a batch norm changes its statistics without counting their
    versions up.
    """

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        self._places = list(dict.fromkeys(place for model in models for place in _places(model)))
        self._buffers: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []

    @torch.no_grad()
    def keep_copies(self) -> None:
        """Copy the buffers."""
        before, self._buffers = self._buffers, [getattr(module, name) for module, name in self._places]
        if [*map(id, before)] != [*map(id, self._buffers)]:
            self._copies = [*map(torch.empty_like, self._buffers)]
        if self._buffers:
            foreach_copy_(self._copies, self._buffers)

    @torch.no_grad()
    def put_back(self) -> None:
        """Undo the changes since :meth:`keep_copies`."""
        if self._buffers:
            foreach_copy_(self._buffers, self._copies)

    def put_in(self, tree: Any) -> Any:
        """Return a tree with the copies in place of the buffers."""
        copies = {(one.data_ptr(), one.shape): copied for one, copied in zip(self._buffers, self._copies, strict=True)}

        def instead(leaf: Any) -> Any:
            return copies.get((leaf.data_ptr(), leaf.shape), leaf) if isinstance(leaf, torch.Tensor) else leaf

        return tree_map(instead, tree)


def _places(model: torch.nn.Module) -> Iterable[tuple[torch.nn.Module, str]]:
    saved = model.state_dict()
    for path, _ in model.named_buffers():
        if path in saved:
            owner, _, name = path.rpartition(".")
            yield model.get_submodule(owner), name
