"""The open scopes of a run, and what has to be undone when one ends."""

from __future__ import annotations

from collections.abc import Callable

from eventloop.errors import stopped
from eventloop.log import get_logger

log = get_logger()


class Scopes:
    """A stack of named scopes (run, train, epoch, iteration, validation …), each with functions to call when it ends."""

    def __init__(self) -> None:
        # Two lists side by side: several look-ups an iteration, so they must be quick.
        self._names: list[str] = []
        self._undos: list[list[Callable[[], object]]] = []
        self._cut_short: Callable[[], object] | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._names

    @property
    def innermost(self) -> str:
        """Name of the innermost open scope, or ""."""
        return self._names[-1] if self._names else ""

    def enter(self, name: str) -> None:
        """Open a scope inside the innermost one."""
        self._undos.append([])
        self._names.append(name)

    def defer(self, undo: Callable[[], object]) -> None:
        """Call ``undo`` when the innermost scope ends; last registered, first called.

        Register it before what it undoes, and let it find out what there is to undo: Ctrl-C may strike at any moment. If
        it strikes while ``undo`` is called, it is called once more.

        Raises:
            RuntimeError: no scope is open.
            TypeError: ``undo`` is the result of a call instead of a function.
        """
        if not callable(undo):
            raise TypeError(f"run.defer() takes a function to call later, not {undo!r}: write run.defer(f), not run.defer(f())")
        if not self._names:
            raise RuntimeError("run.defer() was called outside of a run: nothing would ever call it back")
        self._undos[-1].append(undo)

    def leave(self, name: str) -> None:
        """End the scope ``name`` and every scope still open inside it.

        All deferred functions are called; the first error among them is raised once they all were.
        """
        first: Exception | None = None
        while name in self._names:
            undos = self._undos[-1]
            while undos:
                try:
                    self._call(undos)
                except Exception as error:
                    log.exception("a deferred function failed", scope=name)
                    first = first or error
            self._names.pop()
            self._undos.pop()
        if first is not None:
            raise first

    def unwind(self) -> None:
        """End all scopes after an exception, which is the one the user must see: errors here are only logged.

        Another Ctrl-C in here is raised once all is undone.
        """
        interrupted: BaseException | None = None
        while self._names:
            try:
                self.leave(self._names[-1])
            except Exception:  # noqa: BLE001, S112 - logged by leave()
                continue
            except BaseException as error:  # noqa: BLE001 - raised below
                interrupted = error
        if interrupted is not None:
            raise interrupted

    def _call(self, undos: list[Callable[[], object]]) -> None:
        """Call the last of ``undos``; what Ctrl-C cuts short stays in the list, once."""
        undo = undos[-1]
        try:
            undo()
        except Exception as error:
            undos.pop()
            if isinstance(error, StopIteration):  # the iterators of the run end scopes
                raise stopped(error, f"the deferred function {getattr(undo, '__qualname__', undo)!s}") from error
            raise
        except BaseException:
            if undo is self._cut_short:
                undos.pop()
            self._cut_short = undo
            raise
        undos.pop()
