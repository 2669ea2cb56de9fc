"""``Places``: which process holds a tensor of a tree that several of them save together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainbus.eventloop.checkpoint.pieces import Keys


class Places:
    """The places of tensors in a tree. This class is that of a tree with the same paths on all processes."""

    def owner(self, keys: Keys) -> int | None:
        """Return the first process that holds the tensor at ``keys``; None if only its mesh tells."""
        return None

    def named(self, keys: Keys) -> Keys:
        """Return a path that is the same on all processes for one tensor, and another one for another tensor."""
        return keys

    def graft(self, tree: dict[str, Any]) -> dict[str, Any] | None:
        """Return what the tree of process 0 may lack of this one, without tensors; None if it lacks nothing."""
        return None

    def joined(self, tree: dict[str, Any], grafts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the tree of process 0 with what it lacks of others; its own tensors keep their order."""
        return tree
