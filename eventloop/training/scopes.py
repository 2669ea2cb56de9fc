"""The open scopes of a run, and what has to be undone when one ends."""

from __future__ import annotations

from collections.abc import Callable

from eventloop.log import get_logger

log = get_logger()


class Scopes:
    """A stack of named scopes (run, train, epoch, iteration, validation …), each with functions to call when it ends."""

    def __init__(self) -> None:
        self._stack: list[tuple[str, list[Callable[[], object]]]] = []

    def __contains__(self, name: str) -> bool:
        return any(name == open_name for open_name, _ in self._stack)

    @property
    def innermost(self) -> str:
        """Name of the innermost open scope, or ""."""
        return self._stack[-1][0] if self._stack else ""

    def enter(self, name: str) -> None:
        """Open a scope inside the innermost one."""
        self._stack.append((name, []))

    def defer(self, undo: Callable[[], object]) -> None:
        """Call ``undo`` when the innermost scope ends; last registered, first called.

        Raises:
            RuntimeError: no scope is open.
        """
        if not self._stack:
            raise RuntimeError("run.defer() was called outside of a run: nothing would ever call it back")
        self._stack[-1][1].append(undo)

    def leave(self, name: str) -> None:
        """End the scope ``name`` and every scope still open inside it.

        All deferred functions are called; the first error among them is raised once they all were.
        """
        first: Exception | None = None
        while name in self:
            undos = self._stack[-1][1]
            while undos:  # one by one: what Ctrl-C keeps from being called here is left for unwind()
                try:
                    undos.pop()()
                except Exception as error:
                    log.exception("a deferred function failed", scope=name)
                    first = first or error
            self._stack.pop()
        if first is not None:
            raise first

    def unwind(self) -> None:
        """End all scopes after an exception, which is the one the user must see: errors here are only logged."""
        while self._stack:
            try:
                self.leave(self._stack[-1][0])
            except Exception:  # noqa: BLE001, S112 - logged by leave()
                continue
