"""Which checkpoint files of a directory stay: nothing is removed before its successor is durable."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

from eventloop import CheckpointError, get_logger
from eventloop.checkpoint import AnyPath, as_path, check_regular, is_plain_name
from eventloop.events import Slot
from hooks.rules import BestMetrics

log = get_logger()

SUFFIX = ".safetensors"

KEPT = Slot("kept checkpoints", list)
"""The policies of all of a run's hooks: a file that one of them keeps, no other removes."""

REGULAR = ""
"""The kind of the files that are no best ones; the kind of those is the name of the metric."""


class KeptFile(msgspec.Struct):
    """A file that was requested, and becomes durable later."""

    name: str
    score: float | None = None
    durable: bool = False


class RetentionPolicy:
    """The files that one hook keeps: the newest durable ones, and the best durable one by each metric.

    The training thread requests files, the committing thread reports their fate.

    Args:
        keep: how many regular files stay; None keeps all.
        best: the metrics.
    """

    def __init__(self, keep: int | None, best: BestMetrics) -> None:
        self.directory: AnyPath | None = None
        self.best = best
        self._keep = keep
        self._files: dict[str, list[KeptFile]] = {REGULAR: []}  # by kind, the oldest first
        self._of_run: list[RetentionPolicy] = [self]
        self._lock = threading.Lock()

    def begin(self, directory: AnyPath | None, of_run: list[RetentionPolicy]) -> None:
        """Begin a run. If it saves to another directory than the run before, that one's files and scores are forgotten.

        Args:
            directory: of the files.
            of_run: the policies of the run's other hooks, to which this one is added.
        """
        self._of_run = of_run
        of_run.append(self)
        if directory != self.directory:
            self.directory = directory
            self.best.reset()
            with self._lock:
                self._files = {REGULAR: []}

    @property
    def best_scores(self) -> dict[str, float | None]:
        """The score of the newest file of each metric."""
        with self._lock:
            return {kind: files[-1].score for kind, files in self._files.items() if kind != REGULAR and files}

    def newest(self, *, regular: bool) -> list[str]:
        """Return the best file of each metric, with ``regular`` after the newest regular one; durable ones only."""
        with self._lock:
            newest = [files[-1] for kind, files in self._files.items() if files and (regular or kind != REGULAR)]
            return [file.name for file in newest if file.durable]

    def has(self, name: str) -> bool:
        with self._lock:
            return any(file.name == name for files in self._files.values() for file in files)

    def put(self, name: str, kind: str = REGULAR, score: float | None = None) -> None:
        """Note a requested file; it replaces one of the same name."""
        with self._lock:
            files = self._files.setdefault(kind, [])
            if score is None and files and files[-1].name == name:
                return  # requested again: if the second save is not written, the first one's file is still there
            self._files[kind] = [*(file for file in files if file.name != name), KeptFile(name, score)]

    def own(self, paths: Iterable[str]) -> Collection[str]:
        """Return the names of those files that are in the directory."""
        return {path.name for path in map(as_path, paths) if path.parent == self.directory}

    def committed(self, paths: Iterable[str]) -> list[str]:
        """Note that files are durable; return the names of those that no hook of the run keeps any more."""
        own, gone = self.own(paths), []
        with self._lock:
            for kind, files in self._files.items() if own else ():
                for file in files:
                    file.durable = file.durable or file.name in own
                keep = self._keep if kind == REGULAR else 1
                replaced = [] if keep is None else [file.name for file in files if file.durable][:-keep]
                self._files[kind] = [file for file in files if file.name not in replaced]
                gone += replaced
        here = [policy for policy in self._of_run if policy.directory == self.directory]
        return [name for name in gone if not any(policy.has(name) for policy in here)]

    def forget(self, paths: Iterable[str]) -> None:
        own = self.own(paths)
        with self._lock:
            for kind, files in self._files.items():
                self._files[kind] = [file for file in files if file.durable or file.name not in own]

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the files, also of requested ones, the best scores, and the metric that ``"auto"`` was."""
        with self._lock:
            files = {kind: [{"name": one.name, "score": one.score} for one in files] for kind, files in self._files.items()}
        return {"files": files.pop(REGULAR), "best": files, "metrics": self.best.names or None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it back, without lost files and without names that this hook cannot have given, as it removes these files."""
        self.best.found(state["metrics"])
        wanted = {kind: files for kind, files in state["best"].items() if kind in self.best.names}
        for kind, files in {REGULAR: state["files"], **wanted}.items():
            there = [KeptFile(one["name"], one["score"], durable=True) for one in files if self._exists(one["name"])]
            with self._lock:
                self._files[kind] = there

    def _exists(self, name: object) -> bool:
        problem = "the name is not one that this hook gives"
        if is_plain_name(name) and name.endswith(SUFFIX) and not name.startswith("."):
            if self.directory is None:
                return False
            try:
                check_regular(self.directory / name)
                return (self.directory / name).is_file()
            except CheckpointError as error:
                problem = str(error)
            except OSError:
                return False
        log.warning("the checkpoint names a file that is not one of this hook's; it is left alone", name=name, error=problem)
        return False
