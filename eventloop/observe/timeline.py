"""``Timeline``: the record of a run without what it abandoned, because it was resumed from an earlier checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from eventloop.observe.record import AnyLine, Resume, Validation


class Cut(NamedTuple):
    """A resume: its time, the position of the checkpoint, its path, and the number of iterations that were abandoned."""

    time: float
    epoch: int
    iter: int
    path: str
    lost: int


class Timeline:
    """Divide the lines of a run's record.

    A resume abandons what came before it and is beyond the position of its checkpoint. A validation that it repeats counts
    once.

    Args:
        lines: the lines, in their order.
    """

    def __init__(self, lines: Iterable[AnyLine]) -> None:
        found = list(lines)
        self.cuts: list[Cut] = list(_cuts(found))
        """The resumes whose position is known."""
        self.lines: list[AnyLine] = []
        """The lines of the present timeline."""
        self.abandoned: list[AnyLine] = []
        self._within: list[float] = []  # times of lines up to the positions of the checkpoints, also of repeated ones
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

    def spans(self, sessions: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """Return the begins and ends of the stretches of the timeline, from those of the sessions."""
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

    def limit(self, time: float) -> tuple[float, float]:
        """Return the last epoch and iteration before ``time`` that a later resume has not abandoned; infinite without one."""
        places = [(cut.epoch, cut.iter) for cut in self.cuts if cut.time >= time]
        return min(places, key=lambda place: place[1], default=(math.inf, math.inf))


def _cuts(lines: Sequence[AnyLine]) -> Iterable[Cut]:
    reached = 0
    for line in lines:
        if isinstance(line, Resume) and line.iter:  # until 0.2 the line had no position, only zeros
            yield Cut(line.time, line.epoch, line.iter, line.path, max(0, reached - line.iter))
            reached = line.iter
        reached = max(reached, line.iter)
