"""The files that a CheckpointHook keeps: regular ones and the best, in one directory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from eventloop import CheckpointError, get_logger
from eventloop.checkpoint import AnyPath, as_path, check_regular, is_plain_name
from eventloop.events import Slot
from hooks.best import Best
from hooks.checkpoint_options import SUFFIX
from hooks.retention import Shelf

log = get_logger()

KEPT = Slot("kept checkpoints", list)
"""By all of a run's hooks: what one of them keeps, no other removes."""


class Kept:
    """The shelves of one hook.

    Args:
        keep: how many regular files; None keeps all.
        new_best: makes what knows of the best ones.
    """

    def __init__(self, keep: int | None, new_best: Callable[[], Best]) -> None:
        self.directory: AnyPath | None = None
        self.best = new_best()
        self.files = Shelf(keep)
        self._keep = keep
        self._new_best = new_best
        self._all: list[Kept] = [self]

    def begin(self, directory: AnyPath | None, everybody: list[Kept]) -> None:
        """Begin a run; if it saves elsewhere than the one before, that one's files and scores are forgotten.

        Args:
            directory: of the files.
            everybody: those of the other hooks of the run, to which this is added.
        """
        self._all = everybody
        everybody.append(self)
        if directory != self.directory:
            self.directory = directory
            self.best, self.files = self._new_best(), Shelf(self._keep)

    @property
    def shelves(self) -> list[Shelf]:
        """Of the regular files, and of each metric."""
        return [self.files, *self.best.shelves]

    def own(self, paths: Iterable[str]) -> Collection[str]:
        """Return the names of those files that are in the directory."""
        return {path.name for path in map(as_path, paths) if path.parent == self.directory}

    def committed(self, paths: Iterable[str]) -> list[str]:
        """Note that files are durable; return the names of those that nobody keeps any more."""
        own = self.own(paths)
        gone = [name for shelf in self.shelves for name in shelf.committed(own)] if own else []
        everywhere = [shelf for kept in self._all if kept.directory == self.directory for shelf in kept.shelves]
        return [name for name in gone if not any(shelf.has(name) for shelf in everywhere)]

    def forget(self, paths: Iterable[str]) -> None:
        """Forget files that were not written."""
        own = self.own(paths)
        for shelf in self.shelves:
            shelf.forget(own)

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the files that stay, and the best scores."""
        return {"files": self.files.state_dict(), **self.best.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it back, but for files that are gone, and for names that this hook cannot have given: it removes these files."""
        self.files.load_state_dict(state["files"], self._exists)
        self.best.load_state_dict(state, self._exists)

    def _exists(self, name: object) -> bool:
        if not (is_plain_name(name) and name.endswith(SUFFIX)) or name.startswith("."):
            log.warning("the checkpoint names a file that is not one of this hook's; it is left alone", name=name)
            return False
        if self.directory is None:
            return False
        path = self.directory / name
        try:
            check_regular(path)
        except CheckpointError as error:
            log.warning("the checkpoint names a file that is not one of this hook's; it is left alone", error=str(error))
            return False
        except OSError:
            return False
        return path.is_file()
