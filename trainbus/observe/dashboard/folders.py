"""``FolderWatcher``: fill the pages of a board from the folders of runs, and follow the runs that go on."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from trainbus.eventloop.log import get_logger
from trainbus.hooks.writers.media import PLACES, SCALARS
from trainbus.observe.compared import settings_of
from trainbus.observe.dashboard.page import Board, RunPage
from trainbus.observe.dashboard.watcher import shortened
from trainbus.observe.record import Begin, End, Measured
from trainbus.observe.run_folder import MANIFEST, RECORD, RunFolder, RunFolderError, find_runs
from trainbus.observe.states import ENDED, RunStatus
from trainbus.observe.story import Cut, RunSession, RunStory

log = get_logger()

PACE: Final = 2.0  # least seconds between two looks at the folders
_SHARE: Final = 5  # a look takes at most one of so many seconds: long files are read as a whole
_OVER: Final = (*ENDED, RunStatus.KILLED)
_EVALUATED: Final = ("val/", "test/")


class _Followed:
    """One run: its page, and how much of its files the page has."""

    def __init__(self, board: Board, path: Path, name: str) -> None:
        self._path, self._board, self._name = path, board, name
        self.page: RunPage | None = None
        self._marks: tuple[int, ...] = ()  # sizes and times of the files when they were read last
        self._lines = self._scalars = self._cuts = 0
        self._last: RunSession | None = None

    def read_new(self) -> None:
        """Read what has come; begin the page anew when the run has gone back, or on after its end."""
        marks = tuple(_mark(self._path / name) for name in (MANIFEST, RECORD, SCALARS))
        if marks == self._marks and (self.page is None or self.page.over or self._goes_on()):
            return
        self._marks = marks
        folder = RunFolder(self._path)
        story = folder.story()
        lines = story.lines
        rows = [*_kept(list(folder.scalars()), story.cuts)]
        is_over = story.state in _OVER
        goes_back = len(lines) < self._lines or len(rows) < self._scalars or len(story.cuts) != self._cuts
        self._last = story.sessions[-1] if story.sessions else None
        if self.page is None or goes_back or (self.page.over and not is_over):
            self._begin(story)
        page = self.page
        if page is None or page.over:
            return
        page.settings = settings_of(story)
        page.messages.add(point for point in map(_point, rows[self._scalars :]) if point[3])
        for line in lines[self._lines :]:
            if isinstance(line, Measured):
                page.costs(shortened(line.costs))
            elif not isinstance(line, End):
                page.add(line)
        self._lines, self._scalars, self._cuts = len(lines), len(rows), len(story.cuts)
        for row in rows[-1:]:
            page.iter, page.epoch = max(page.iter, _point(row)[0]), max(page.epoch, _point(row)[1])
        if is_over:
            last = story.sessions[-1]
            page.end = End(time=story.ends[-1], state=story.state, reason=last.reason)
            page.close()

    def _goes_on(self) -> bool:
        """Return False if the process of the run has died since the last look."""
        return self._last is None or self._last.state_now not in _OVER

    def _begin(self, story: RunStory) -> None:
        if self.page is not None:
            self._board.remove(self.page)
        began = story.sessions[0].began if story.sessions else 0.0
        begin = Begin(time=began, name=self._name, work_dir=str(self._path))
        self.page = self._board.begin(None, begin)
        self._lines = self._scalars = 0


class FolderWatcher:
    """Show the runs in folders on a board, also those that come later, and what they write from then on.

    Args:
        board: the board with their pages.
        folders: folders of runs, or folders that contain some.
    """

    def __init__(self, board: Board, folders: Sequence[Path]) -> None:
        self._board, self._folders = board, folders
        self._runs: dict[Path, _Followed] = {}
        self._damaged: set[str] = set()
        self._ended = threading.Event()

    def read_new(self) -> int:
        """Read what the runs have written since the last look; return the number of runs."""
        for folder, path in ((above, path) for above in self._folders for path in find_runs(above)):
            if path not in self._runs:
                name = str(path if path == folder else path.relative_to(folder))
                self._runs[path] = _Followed(self._board, path, name)
            try:
                self._runs[path].read_new()
            except RunFolderError as error:  # a damaged run, or one that was removed meanwhile
                if str(error) not in self._damaged:
                    self._damaged.add(str(error))
                    log.warning("a run cannot be shown", id="run-not-shown", error=str(error))
        return sum(one.page is not None for one in self._runs.values())

    def follow(self) -> None:
        """Look again and again, until :meth:`end`."""
        wait = 0.0
        while not self._ended.wait(wait):
            began = time.monotonic()
            self.read_new()
            wait = max(PACE, _SHARE * (time.monotonic() - began))

    def end(self) -> None:
        """End :meth:`follow`. Idempotent."""
        self._ended.set()


def _mark(path: Path) -> int:
    try:
        status = path.stat()
    except OSError:
        return 0
    return hash((status.st_size, status.st_mtime_ns))


def _kept(rows: Sequence[dict[str, Any]], cuts: Iterable[Cut]) -> Iterator[dict[str, Any]]:
    """Yield the scalars of the present timeline: without what a resume abandoned or repeats."""
    cuts = list(cuts)
    until = float("inf")
    kept = []
    for row in reversed(rows):
        at = row.get("iter", row.get("step"))
        if not isinstance(at, int) or at > until:
            continue
        if any(_number(row, "time") < cut.time and at > cut.iter for cut in cuts):
            continue
        until = at
        kept.append(row)
    yield from reversed(kept)


def _point(row: dict[str, Any]) -> tuple[int, int, float, dict[str, float]]:
    """Return the training scalars in a line; the record has those of validations and tests."""
    values = {
        name.removeprefix("train/"): value
        for name, value in row.items()
        if name not in PLACES and isinstance(value, int | float) and not name.startswith(_EVALUATED)
    }
    return int(row.get("iter", row.get("step", 0))), int(_number(row, "epoch")), _number(row, "time"), values


def _number(row: dict[str, Any], name: str) -> float:
    """Return a number in a line; 0 if it is missing or damaged."""
    value = row.get(name)
    return value if isinstance(value, int | float) and math.isfinite(value) else 0
