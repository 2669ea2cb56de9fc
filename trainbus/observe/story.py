"""``RunStory``: what happened in a run, as its events come, or as its files have it.

The record, the report, the dashboard, the metrics and ``trainbus runs`` read it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from threading import Lock
from typing import Any, NamedTuple

import msgspec

from trainbus.eventloop.bounds import Count, Time
from trainbus.observe.environment import Environment
from trainbus.observe.record import (
    AnyLine,
    Begin,
    Checkpoint,
    Compared,
    End,
    Entry,
    Evaluation,
    FailedCheckpoint,
    L,
    Line,
    Measured,
    NotWritten,
    Pause,
    Resume,
    Stage,
    Validation,
)
from trainbus.observe.states import ENDED, RunStatus


class RunSession(msgspec.Struct, kw_only=True):
    """One process of a run, from ``before_run`` to its end. Times are seconds since 1970."""

    began: Time
    environment: Environment
    world_size: Count = 1
    stages: list[str] = []
    resumed_from: str = ""
    ended: Time | None = None
    state: RunStatus = RunStatus.RUNNING
    reason: str = ""
    """The error, or the reason given to ``run.stop()``."""
    epoch: Count = 0
    iter: Count = 0
    settings: dict[str, Any] = {}
    """The settings of this session by dotted name, such as ``"lr"``, ``"batch_size"`` and ``"hooks.EMAHook.momentum"``."""

    def __post_init__(self) -> None:
        if self.state not in (RunStatus.RUNNING, *ENDED):
            raise ValueError(f"a session does not end as {self.state}")

    @property
    def state_now(self) -> RunStatus:
        """The state; ``killed`` if the process no longer runs, ``unknown`` if it is on another machine."""
        if self.state is not RunStatus.RUNNING:
            return self.state
        lives = self.environment.process.lives()
        return RunStatus.UNKNOWN if lives is None else RunStatus.RUNNING if lives else RunStatus.KILLED


class RunManifest(msgspec.Struct, kw_only=True):
    """The content of ``run.json``."""

    format: int = 1
    name: str
    seed: int | None = None
    config: dict[str, Any] = {}
    sessions: list[RunSession] = []


class Cut(NamedTuple):
    """A resume: its time, the position of the checkpoint, its path, and the number of iterations that were abandoned."""

    time: float
    epoch: int
    iter: int
    path: str
    lost: int


class RunStory:
    """What happened in a run: its sessions, states, evaluations, checkpoints and resumes.

    - Of a live run, :meth:`add` takes what happens, from any thread. Only counts and the last values are kept.
    - Of a run in files (:meth:`trainbus.observe.RunFolder.story`), ``lines`` has all of it. A resume abandons what came before
      it and is beyond the position of its checkpoint; a validation that it repeats counts once.

    Args:
        manifest: the content of ``run.json``; None for a live run.
        lines: the lines of the record, in their order.
        ends: the end of each session, in seconds since 1970.
        seen: times, epochs and iterations that other files have, of a last session that recorded no end.
    """

    def __init__(
        self,
        manifest: RunManifest | None = None,
        lines: Iterable[AnyLine] = (),
        ends: Sequence[float] = (),
        seen: Iterable[tuple[float, int, int]] = (),
    ) -> None:
        self.manifest = manifest or RunManifest(name="")
        self.state = RunStatus.RUNNING
        self.run: Callable[[], Any] = lambda: None
        """Returns the live run; None if there is none."""
        self.metrics: dict[str, Any] = {}
        """The metrics of the last validation and the last test, such as ``"val/accuracy"``."""
        self.outcomes: Counter[str] = Counter(committed=0, failed=0, skipped=0)
        """Numbers of checkpoints."""
        self.stalled = self.wrote = 0.0
        """Seconds that checkpoints held up training, and seconds of writing them."""
        self.last_checkpoint: Checkpoint | None = None
        self._lock = Lock()  # the checkpoints' events come from another thread
        self._session: RunSession | None = None
        self._loaded: Resume | None = None
        self._trains = False
        self._stage_began: dict[str, float] = {}
        self.changed = False
        """True if ``run.json`` lacks a change; its writer sets it to False."""
        found = list(lines)
        begins = [*(one.began for one in self.sessions[1:]), math.inf]
        for session, following in zip(self.sessions, begins, strict=False):
            if session.state is RunStatus.RUNNING:
                _complete(session, [line for line in found if session.began <= line.time < following])
        if manifest is not None:
            self.state = self.sessions[-1].state_now if self.sessions else RunStatus.UNKNOWN
        self.ends = list(ends)
        self._seen = list(seen)
        self.cuts = list(_cuts(found))
        """The resumes whose position is known."""
        self.lines: list[AnyLine] = []
        """The lines of the present timeline."""
        self.abandoned: list[AnyLine] = []
        self._within: list[float] = []  # times of lines up to the positions of the checkpoints, also of repeated ones
        self._divide(found)

    @property
    def sessions(self) -> list[RunSession]:
        """The sessions of the run, one per process."""
        return self.manifest.sessions

    # ----------------------------------------------------------------------------------------------------- a live run

    def open(self, session: RunSession, earlier: Sequence[RunSession]) -> RunSession:
        """Begin a session after earlier ones; in the process of the last one, that one continues."""
        if earlier and earlier[-1].environment.process == session.environment.process:  # a test after the training
            session = earlier[-1]
            session.state, session.ended = RunStatus.RUNNING, None
        else:
            earlier = [*earlier, session]
        self.manifest.sessions = list(earlier)
        self._session, self.changed = session, True
        return session

    def add(self, entry: Entry) -> list[Line]:
        """Take what happens next; return the lines that the record gets for it."""
        with self._lock:
            match entry:
                case Begin():
                    self.manifest = RunManifest(name=entry.name, seed=entry.seed, config=entry.config)
                    self.run, self.state = entry.run, RunStatus.RUNNING
                    self._session, self._loaded, self._trains = None, None, False
                    return []
                case Resume():
                    self._loaded = entry  # a line only once a training begins with it: a test of a checkpoint resumes nothing
                case _:
                    self._count(entry)
            return [] if self._session is None else self._follow(self._session, entry)

    def _count(self, entry: Entry) -> None:
        match entry:
            case Evaluation():
                self.metrics = self.metrics | {f"{entry.stage}/{name}": value for name, value in entry.metrics.items()}
            case Checkpoint() if entry.bytes:  # not a further name of a file that is counted
                self.outcomes["committed"] += 1
                self.stalled, self.wrote = self.stalled + entry.stall, self.wrote + entry.seconds
                self.last_checkpoint = entry
            case NotWritten():
                self.outcomes["failed" if isinstance(entry, FailedCheckpoint) else "skipped"] += 1
            case Pause() if entry.begins or self.state is not RunStatus.STOPPING:
                self.state = RunStatus.PAUSED if entry.begins else RunStatus.RUNNING
            case End():
                self.state = RunStatus(entry.state)

    def _follow(self, session: RunSession, entry: Entry) -> list[Line]:
        """Keep up the session; return the lines for the record."""
        self._trains = self._trains or (isinstance(entry, Stage) and entry.name == "train")
        is_of_checkpoint = isinstance(entry, Checkpoint | NotWritten)  # maybe of an earlier iteration
        if not is_of_checkpoint and (self._trains or "train" not in session.stages):  # a test may be of an earlier checkpoint
            session.epoch, session.iter = entry.epoch, entry.iter
        match entry:
            case Stage():
                return self._begin_stage(session, entry)
            case Resume() | Pause():
                return []
            case Evaluation():
                entry.seconds = entry.time - self._stage_began.get(entry.stage, entry.time)
            case Measured() | Compared():
                entry.epoch, entry.iter = session.epoch, session.iter
            case End():
                session.state, session.reason, session.ended = self.state, entry.reason, entry.time
                self.changed = True
        return [entry]

    def _begin_stage(self, session: RunSession, stage: Stage) -> list[Line]:
        self._stage_began[stage.name] = stage.time
        loaded, self._loaded = self._loaded, None
        if stage.name not in session.stages:
            session.stages.append(stage.name)
            self.changed = True
        if not stage.settings.items() <= session.settings.items():
            session.settings, self.changed = session.settings | stage.settings, True
        if loaded is None or stage.name != "train":
            return []
        session.resumed_from, self.changed = loaded.path, True
        return [loaded]

    # -------------------------------------------------------------------------------------------------- a run in files

    def of(self, kind: type[L]) -> list[L]:
        """Return the lines of one kind, such as ``Validation``, without what the run abandoned."""
        return [line for line in self.lines if isinstance(line, kind)]

    def checkpoints(self) -> list[Checkpoint]:
        """Return the written checkpoints, each with all names of its file."""
        found: list[Checkpoint] = []
        for line in self.of(Checkpoint):
            if line.bytes or not found:
                found.append(line)
            else:  # further names of the file that was written last
                found[-1] = msgspec.structs.replace(found[-1], names=[*found[-1].names, *line.names])
        return found

    @cached_property
    def spans(self) -> list[tuple[float, float]]:
        """When each stretch of the present timeline began and ended, in seconds since 1970."""
        sessions = [(one.began, end) for one, end in zip(self.sessions, self.ends, strict=True)]
        edges: list[tuple[float, float]] = []
        for (began, ended), (after, _) in pairwise([*sessions, (math.inf, math.inf)]):
            resumes = [cut.time for cut in self.cuts if began < cut.time < min(ended, after)]
            edges += pairwise([began, *resumes, ended])
        found = []
        for (began, ended), (after, _) in pairwise([*edges, (math.inf, math.inf)]):
            times = [time for time in self._within if began <= time < after]
            cut = any(began <= line.time < after for line in self.abandoned)
            found.append((began, min(ended, max(times, default=began)) if cut else ended))
        return found

    @property
    def seconds(self) -> float:
        """The time of all sessions together, without what the run abandoned."""
        return sum(end - began for began, end in self.spans)

    def reached(self) -> list[tuple[int, int]]:
        """Return the last epoch and iteration of each session that no later one has abandoned."""
        begins = [*(one.began for one in self.sessions[1:]), math.inf]
        reached = []
        for one, until in zip(self.sessions, begins, strict=False):
            places = [(one.epoch, one.iter), *((cut.epoch, cut.iter) for cut in self.cuts if cut.time >= until)]
            reached.append((min(epoch for epoch, _ in places), min(iteration for _, iteration in places)))
        return reached

    @property
    def came_to(self) -> tuple[int, int]:
        """The numbers of epochs and iterations that the run completed, without what it abandoned."""
        since = max([*(cut.time for cut in self.cuts), *(one.began for one in self.sessions[-1:])], default=0.0)
        places = [*self.reached(), *((line.epoch, line.iter) for line in self.lines)]
        places += [(epoch, iteration) for time, epoch, iteration in self._seen if time >= since]
        return max((epoch for epoch, _ in places), default=0), max((iteration for _, iteration in places), default=0)

    def _divide(self, found: Sequence[AnyLine]) -> None:
        """Divide the lines into those of the present timeline and the abandoned ones."""
        cuts, limit = list(self.cuts), math.inf
        validated: set[int] = set()
        repeated: set[int] = set()
        for line in reversed(found):
            is_beyond = line.iter > limit
            if not is_beyond:
                self._within.append(line.time)
            is_repeated = isinstance(line, Validation) and line.iter in repeated
            (self.abandoned if is_beyond or is_repeated else self.lines).append(line)
            if isinstance(line, Resume) and cuts and cuts[-1].time == line.time:
                at = cuts.pop().iter
                limit = min(limit, at)
                repeated |= validated & {at}
            elif isinstance(line, Validation):
                validated.add(line.iter)
        self.lines.reverse()
        self.abandoned.reverse()


def _complete(session: RunSession, lines: Sequence[AnyLine]) -> None:
    """Take the end of a session from its lines if ``run.json`` lacks it, as on a disk that was full then."""
    own = [line for line in lines if not isinstance(line, Checkpoint | NotWritten)]  # the last file may come after the end
    if own and isinstance(end := own[-1], End):
        session.state, session.reason, session.ended = RunStatus(end.state), end.reason, end.time
        session.epoch, session.iter = end.epoch, end.iter


def _cuts(lines: Iterable[AnyLine]) -> Iterator[Cut]:
    reached = 0
    for line in lines:
        if isinstance(line, Resume) and line.iter:  # until 0.2 the line had no position, only zeros
            yield Cut(line.time, line.epoch, line.iter, line.path, max(0, reached - line.iter))
            reached = line.iter
        reached = max(reached, line.iter)
