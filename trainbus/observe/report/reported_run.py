"""``ReportedRun``: the files of a run's folder, combined for a report."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from trainbus.observe.costs import Costs, Durations, LaneCosts, Part
from trainbus.observe.curves import Array, Curve, read_curves
from trainbus.observe.media import present
from trainbus.observe.record import Measured
from trainbus.observe.run_folder import Damage, RunFolder


class StepTimes(NamedTuple):
    """Durations of the iterations in one stretch of the run. It ended at ``epoch``, ``iter`` and ``time``."""

    epoch: int
    iter: int
    time: float
    steps: Durations


class ReportedRun:
    """A run, read from its folder: its story, its curves, its costs, and the images, histograms and texts that it reported."""

    def __init__(self, folder: Path) -> None:
        run = RunFolder(folder)
        self.path = folder
        self.story = story = run.story()
        self.curves: dict[str, Curve] = read_curves(run.scalars(), story.cuts)
        self.media = present(run.media(), story.cuts)
        self.picture = run.picture
        self.damaged: dict[str, Damage] = run.damaged
        measured = [line for line in (*story.lines, *story.abandoned) if isinstance(line, Measured)]
        measured.sort(key=lambda line: line.time)
        self._stretches = _stretches(measured, [one.began for one in story.sessions[1:]])
        self._epochs = _epochs(self.curves.values())

    @cached_property
    def seconds(self) -> float:
        """The time of all sessions together, without what was abandoned.

        Of a run without ``run.json``, from its first to its last scalar.
        """
        if self.story.sessions:
            return self.story.seconds
        return max((float(np.nanmax(self.elapsed(one.times))) for one in self._timed()), default=0.0)

    @cached_property
    def began(self) -> float:
        """When the run began, in seconds since 1970; 0 if that is unknown."""
        if self.story.sessions:
            return self.story.sessions[0].began
        return min((float(np.nanmin(one.times)) for one in self._timed()), default=0.0)

    @cached_property
    def iterations(self) -> int:
        """The number of iterations that the run completed."""
        if self.story.sessions:
            return self.story.came_to[1]
        return max((int(one.iterations[-1]) for one in self.curves.values()), default=0)

    @cached_property
    def epochs(self) -> int:
        """The number of epochs that the run completed."""
        if self.story.sessions:
            return self.story.came_to[0]
        known = (float(np.nanmax(one.epochs)) for one in self.curves.values() if np.isfinite(one.epochs).any())
        return int(max(known, default=0.0))

    @cached_property
    def costs(self) -> Costs | None:
        """The costs of all sessions together, also of what was abandoned; None if they were not measured."""
        return _sum([one[-1].costs for one in self._stretches])

    def step_times(self) -> list[StepTimes]:
        """Return the durations of the iterations between any two measurements of the costs."""
        kept = {line.time for line in self.story.of(Measured)}
        found = []
        for stretch in self._stretches:
            before = Durations()
            for line in stretch:
                steps = line.costs.steps.since(before)
                if steps.total and line.time in kept:
                    found.append(StepTimes(line.epoch, line.iter, line.time, steps))
                before = line.costs.steps
        return found

    def elapsed(self, times: Array) -> Array:
        """Return times since 1970 as seconds of the run, without pauses and without what was abandoned."""
        passed = times - self.began
        for (_, end), (after, _) in pairwise(self.story.spans):
            passed = passed - np.where(times >= after, max(0.0, after - end), 0.0)
        return np.maximum(passed, 0.0)

    def epochs_at(self, curve: Curve) -> Array:
        """Return the position of points in epochs, with fractions where the ends of epochs are known."""
        if len(self._epochs) < 2:
            return curve.epochs
        ends = np.array(sorted(self._epochs.items()), np.float64)
        numbers, last = ends[:, 0], np.maximum.accumulate(ends[:, 1])
        length = (last[-2] - (last[-3] if len(last) > 2 else 0)) / (numbers[-2] - (numbers[-3] if len(last) > 2 else 0))
        last[-1] = max(last[-1], last[-2] + length * (numbers[-1] - numbers[-2]))  # the last epoch may be incomplete
        fractions = np.interp(curve.iterations, np.append(0, last), np.append(0, numbers))
        return np.where(np.isfinite(curve.epochs), fractions, np.nan)

    def _timed(self) -> Iterable[Curve]:
        return (one for one in self.curves.values() if np.isfinite(one.times).any())


def _stretches(lines: Iterable[Measured], begins: Sequence[float]) -> list[list[Measured]]:
    """Split costs where they restart from zero: in another session, or with another bus in the same process."""
    stretches: list[list[Measured]] = []
    for line in lines:
        last = stretches[-1][-1] if stretches else None
        if last is None or line.costs.wall < last.costs.wall or any(last.time < begin <= line.time for begin in begins):
            stretches.append([])
        stretches[-1].append(line)
    return stretches


def _sum(all_costs: Sequence[Costs]) -> Costs | None:
    if len(all_costs) < 2:
        return all_costs[0] if all_costs else None
    wall = sum(one.wall for one in all_costs)
    parts: dict[tuple[str, ...], list[Part]] = defaultdict(list)
    lanes: dict[str, list[LaneCosts]] = defaultdict(list)
    for costs in all_costs:
        for part in costs.parts:
            parts[part.group, part.name, part.mount_point].append(part)
        for lane in costs.lanes:
            lanes[lane.name].append(lane)
    steps: Counter[int] = sum((Counter(one.steps.counts) for one in all_costs), Counter())
    added = sorted((_add_parts(own, wall) for own in parts.values()), key=lambda part: -part.seconds)
    # Ranks and memory are not sums: a short last session may not have measured them.
    ranked = max(all_costs, key=lambda one: (one.ranks is not None, one.wall))
    grown = max(all_costs, key=lambda one: (bool(one.growth), one.wall))
    return msgspec.structs.replace(
        all_costs[-1],
        ranks=ranked.ranks,
        memory=grown.memory,
        growth=grown.growth,
        wall=wall,
        parts=added,
        steps=Durations(dict(steps), sum(one.steps.seconds for one in all_costs)),
        lanes=[_add_lanes(own) for own in lanes.values()],
        dropped=sum(one.dropped for one in all_costs),
    )


def _add_parts(parts: Sequence[Part], wall: float) -> Part:
    calls, seconds = sum(one.calls for one in parts), sum(one.seconds for one in parts)
    p99 = max(one.p99 for one in parts)
    return msgspec.structs.replace(parts[0], calls=calls, seconds=seconds, share=seconds / max(wall, 1e-9), p99=p99)


def _add_lanes(lanes: Sequence[LaneCosts]) -> LaneCosts:
    """Add up counts and times, take the greatest of maxima, and average means weighted by their events."""
    weights = np.maximum([one.delivered + one.failed for one in lanes], 1e-9)  # no event: a plain mean
    added = {name: sum(getattr(one, name) for one in lanes) for name in ("delivered", "failed", "dropped", "seconds", "waited")}
    most = {name: max(getattr(one, name) for one in lanes) for name in ("depth_max", "age_max")}
    means = {
        name: float(np.average([getattr(one, name) for one in lanes], weights=weights)) for name in ("depth_mean", "age_mean")
    }
    return msgspec.structs.replace(lanes[-1], **added, **most, **means)


def _epochs(curves: Iterable[Curve]) -> dict[float, float]:
    """Return the last iteration of each epoch in the scalars."""
    ends: dict[float, float] = {}
    for curve in curves:
        known = np.isfinite(curve.epochs) & (curve.epochs > 0)
        epochs, iterations = curve.epochs[known], curve.iterations[known]
        last = np.append(np.diff(epochs) != 0, True)[: len(epochs)]
        for epoch, iteration in zip(epochs[last].tolist(), iterations[last].tolist(), strict=True):
            ends[epoch] = max(ends.get(epoch, 0.0), iteration)
    return ends
