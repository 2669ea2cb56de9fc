"""Decide which checkpoint files stay, and remove files that killed processes left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Protocol, TypeGuard

import msgspec

from trainbus.eventloop import CheckpointError, get_logger
from trainbus.eventloop.checkpoint import (
    TEMPORARY_PREFIX,
    AnyPath,
    RemotePath,
    check_regular,
    is_folder,
    is_plain_name,
    list_files,
    remove,
    sweep_shards,
)
from trainbus.eventloop.events import Progress, Slot
from trainbus.hooks.copies import CopiedAnew
from trainbus.hooks.scores import BestMetrics

log = get_logger()

SUFFIX = ".safetensors"

_STILL = 60.0  # seconds without a change after which no process is writing a temporary file

KEPT = Slot("kept checkpoints", list)
"""The policies of all hooks of a run. A hook does not remove a file that another one keeps."""

REGULAR = ""  # the kind of regular files. The kind of a best file is the name of its metric.


class Store(Protocol):
    """Where files go from their directory: :class:`trainbus.hooks.mirror.Mirror`."""

    policies: list[RetentionPolicy]
    store: RemotePath
    replaced: list[str]

    @property
    def there(self) -> Mapping[str, int]: ...
    def path(self, name: str) -> AnyPath: ...
    def keep(self, name: str, progress: Progress, size: int = 0) -> None: ...
    def waits_for(self, name: str) -> bool: ...
    def drop(self, name: str) -> None: ...


class KeptFile(msgspec.Struct):
    """A requested file, and whether it is durable yet."""

    name: str
    score: float | None = None
    durable: bool = False


class RetentionPolicy(CopiedAnew):
    """The files that one hook keeps: the newest ``keep`` durable ones, and the ``keep_best`` best by each metric (None: all).

    A file that no hook requests, as that of ``checkpoints.save()``, counts among the regular files of the first hook with a
    limit in its directory.

    The training thread requests files. The committing thread reports whether they are durable or have failed.
    """

    of_run: ClassVar = {"_lock": threading.Lock, "of_hooks": list, "mirror": NoneType}

    def __init__(self, keep: int | None, best: BestMetrics, keep_best: int | None = 1) -> None:
        self.directory: Path | None = None
        self.mirror: Store | None = None
        """What brings the files to a store."""
        self._prefix: str | None = None  # of the paths in it, as text: pathlib would hold the GIL beside the training
        self._suffix = SUFFIX
        self.best = best
        self._keep = keep
        self._keep_best = keep_best
        self._files: dict[str, list[KeptFile]] = {REGULAR: []}  # by kind, oldest first
        self._lost: dict[str, str] = {}  # by kind, the newest file if it was not written
        self._looks = True
        self.of_hooks: list[RetentionPolicy] = [self]
        """The policies of all hooks of the run."""
        self._lock = threading.Lock()

    def begin(
        self,
        directory: Path | None,
        of_hooks: list[RetentionPolicy],
        suffix: str,
        mirror: Store | None = None,
        *,
        looks: bool = True,
    ) -> None:
        """Begin a run, whose files end in ``suffix``, and add this policy to those ``of_hooks``.

        In a new directory, forget the files of the run before. Unless it ``looks``, all files in a restored state count as
        there: the disk may be another than that of rank 0.
        """
        self._looks = looks
        self._suffix = suffix
        self.of_hooks = of_hooks
        of_hooks.append(self)
        self.mirror = mirror
        if mirror is not None:
            mirror.policies.append(self)
        if directory != self.directory:
            self.directory = directory
            self._prefix = None if directory is None else str(directory / "x").removesuffix("x")
            self.best.reset()
            with self._lock:
                self._files, self._lost = {REGULAR: []}, {}

    def path(self, name: str) -> AnyPath:
        """Return the path of a file where it can be read."""
        assert self.directory is not None  # noqa: S101 - it has files
        return self.directory / name if self.mirror is None else self.mirror.path(name)

    def durable(self) -> list[str]:
        """Return the names of the files that are durable."""
        with self._lock:
            return [file.name for files in self._files.values() for file in files if file.durable]

    def improved(self, metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
        """Yield name and score of each metric whose file would be one of the best."""
        scores = dict[str, float | None]()
        with self._lock:
            for kind, files in self._files.items():
                if kind != REGULAR and self._keep_best is not None and len(files) >= self._keep_best:
                    scores[kind] = self._ranked(kind)[self._keep_best - 1].score
        return self.best.improved(metrics, scores)

    @property
    def top(self) -> tuple[str, KeptFile] | None:
        """The first metric and its best file that is durable; where the disk of rank 0 is not seen, the best one requested."""
        metric = next(iter(self.best.names), REGULAR)
        with self._lock:
            files = self._ranked(metric) if metric != REGULAR else []
        found = next((file for file in files if file.durable or not self._looks), None)
        return None if found is None else (metric, found)

    def _ranked(self, kind: str) -> list[KeptFile]:
        """Return the files of a kind: the newest regular one first, the best first."""
        files = self._files.get(kind, [])
        return files[::-1] if kind == REGULAR or len(files) < 2 else self.best.ranked(kind, files)

    def newest(self, *, regular: bool) -> tuple[list[str], list[str]]:
        """Return the names of the best files, and with ``regular`` first the newest regular one: the durable, and the rest."""
        with self._lock:
            kinds = [kind for kind in self._files if regular or kind != REGULAR]
            newest = [files[0] for kind in kinds if (files := self._ranked(kind)) and kind not in self._lost]
            lost = [self._lost[kind] for kind in kinds if kind in self._lost]
        return [file.name for file in newest if file.durable], lost + [file.name for file in newest if not file.durable]

    def has(self, name: str) -> bool:
        with self._lock:
            return any(file.name == name for files in self._files.values() for file in files)

    def release(self, name: str) -> None:
        """Forget a regular file, which somebody else counts, unless the number of files is limited here or it is the newest."""
        with self._lock:
            if self._keep is None:
                files = self._files[REGULAR]
                self._files[REGULAR] = [file for file in files if file.name != name or file is files[-1]]

    def needs(self, name: str) -> bool:
        """Return True if a file is one of the best, or the newest regular one."""
        with self._lock:
            best = (file for kind, files in self._files.items() if kind != REGULAR for file in files)
            return any(file.name == name for file in (*best, *self._files[REGULAR][-1:]))

    def give_up(self, name: str) -> None:
        """Forget a regular file."""
        with self._lock:
            self._files[REGULAR] = [file for file in self._files[REGULAR] if file.name != name]

    def put(self, name: str, kind: str = REGULAR, score: float | None = None) -> None:
        with self._lock:
            files = self._files.setdefault(kind, [])
            if score is None and files and files[-1].name == name:
                return  # requested again: if the second save fails, the file of the first one still exists
            self._files[kind] = [*(file for file in files if file.name != name), KeptFile(name, score)]

    def adopt(self, name: str) -> None:
        """Count a durable file that the run saved by itself, as for ``checkpoints.save()``, among the regular ones.

        Unless all regular files stay here, or a hook of the run has it.
        """
        if (self._keep is None and self.mirror is None) or self.directory is None or self._is_kept(name):
            return
        with self._lock:
            files = self._files[REGULAR]
            at = next((index for index, file in enumerate(files) if not file.durable), len(files))  # the others are newer
            self._files[REGULAR] = [*files[:at], KeptFile(name, durable=True), *files[at:]]

    def adopt_if_there(self, names: Iterable[str]) -> None:
        """Adopt those of these names that have a file. A save in which they are not listed has these names, too."""
        for name in names:
            if self._looks and not self._is_kept(name) and self.knows(name):
                self.adopt(name)

    def _is_kept(self, name: str) -> bool:
        of_place = (one for one in self.of_hooks if one.directory == self.directory and one.mirror is self.mirror)
        return any(policy.has(name) for policy in of_place)

    def own(self, paths: Iterable[str]) -> Collection[str]:
        prefixes: tuple[str, ...] = () if self._prefix is None else (self._prefix,)
        if self.mirror is not None:
            prefixes += (f"{self.mirror.store}/",)
        names = {path.removeprefix(one) for path in paths for one in prefixes if path.startswith(one)}
        return {name for name in names if "/" not in name}

    def committed(self, own: Collection[str]) -> list[str]:
        """Mark files as durable; return the names of files that no hook of the run keeps any more."""
        gone = list[str]()
        with self._lock:
            for kind, files in self._files.items() if own else ():
                for file in files:
                    file.durable = file.durable or file.name in own
                if not any(file.name in own for file in files):
                    continue  # last_checkpoint may still name a file of this kind
                ranked = self._ranked(kind)
                if ranked[0].name in own:
                    self._lost.pop(kind, None)
                keep = self._keep if kind == REGULAR else self._keep_best
                replaced = [] if keep is None else [file.name for file in ranked if file.durable][keep:]
                self._files[kind] = [file for file in files if file.name not in replaced]
                gone += replaced
        return [name for name in gone if not self._is_kept(name)]

    def forget(self, paths: Iterable[str]) -> list[str]:
        """Forget files that are not durable; return the names of those that would not stay for good."""
        own, limited = self.own(paths), list[str]()
        with self._lock:
            for kind, files in self._files.items():
                if files and (first := self._ranked(kind)[0]).name in own and not first.durable:
                    self._lost[kind] = first.name
                gone = [file.name for file in files if file.name in own and not file.durable]
                self._files[kind] = [file for file in files if file.name not in gone]
                limited += gone if kind != REGULAR or self._keep is not None else []
        return limited

    def state_dict(self) -> dict[str, Any]:
        """Return the names of all files (also of requested ones), the best scores, and the metric chosen by ``"auto"``."""
        with self._lock:
            files = {kind: [{"name": one.name, "score": one.score} for one in files] for kind, files in self._files.items()}
        return {"files": files.pop(REGULAR), "best": files, "metrics": self.best.names or None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the files, without missing ones and without names of another form: this hook removes these files later."""
        self.best.choose(state["metrics"])
        wanted = {kind: files for kind, files in state["best"].items() if kind in self.best.names}
        for kind, files in {REGULAR: state["files"], **wanted}.items():
            known = [one for one in files if kind == REGULAR or isinstance(one["score"], int | float)]
            found = [KeptFile(one["name"], one["score"], durable=self.knows(one["name"])) for one in known]
            with self._lock:
                self._files[kind] = [file for file in found if file.durable]

    def knows(self, name: object) -> TypeGuard[str]:
        """Return True if a file is there, and its name is one that the hook may have given."""
        problem = "not a name that the hook gives"
        if is_plain_name(name) and name.endswith(self._suffix) and not name.startswith("."):
            if self.directory is None or not self._looks:
                return self.directory is not None
            if is_folder(self.directory / name):
                return True
            try:
                check_regular(self.directory / name)
                return (self.directory / name).is_file()
            except CheckpointError as error:
                problem = str(error)
            except OSError:
                return self.mirror is not None and name in self.mirror.there
        log.warning(
            "the checkpoint names a file that this hook did not write; the hook ignores it",
            id="file-of-another-hook",
            name=name,
            error=problem,
        )
        return False


def sweep(directory: AnyPath) -> bool:
    """Remove what a killed process left in ``directory``; return True if that has sharded tensors of checkpoints.

    It is temporary files, and sharded tensors without their checkpoint. What has changed within the last minute stays, because
    another process may be writing it, and so do files without a time.
    """
    for path, changed in list_files(directory):
        leftover = path.name.startswith(TEMPORARY_PREFIX) and path.suffix == ".tmp"
        if not leftover or changed is None or time.time() - changed <= _STILL:
            continue
        try:
            remove(path)
            log.info("removed a file that a killed process left behind", path=str(path))
        except CheckpointError as error:
            log.warning("cannot remove a temporary file", id="temporary-file-left", path=str(path), error=str(error))
    try:
        return sweep_shards(directory, still=_STILL)
    except CheckpointError as error:
        log.warning(
            "cannot remove the sharded tensors of a checkpoint that does not exist", id="old-parts-left", error=str(error)
        )
        return True
