"""Report saves to callbacks of Hugging Face's Trainer once the file is durable, with the saved state."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from copy import copy
from typing import Any


class SavedStates:
    """Keep the state of each save until its checkpoint is durable. A save begins on the training thread and ends on another."""

    def __init__(self) -> None:
        self.open: dict[str, Any] = {}
        """The states of checkpoints that are being written, by path."""
        self._durable: deque[Any] = deque()
        self._step = -1

    def begun(self, path: str, state: Any) -> None:
        self.open[path] = copy(state)

    def ended(self, path: str, *, durable: bool) -> None:
        state = self.open.pop(path, None)
        if durable and state is not None:
            self._durable.append(state)

    def completed(self) -> Iterator[Any]:
        """Yield the states of checkpoints that have become durable: one for each step."""
        while self._durable:
            state = self._durable.popleft()
            if state.global_step != self._step:
                self._step = state.global_step
                yield state
