"""``verdict``: the outcome of a run in plain sentences, each with its figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from trainbus.observe.record import FailedCheckpoint, SkippedCheckpoint, Validation
from trainbus.observe.report.reported_run import ReportedRun
from trainbus.observe.states import RunStatus
from trainbus.observe.verdict import duration, expensive, held_up

Best = Callable[[Sequence[Mapping[str, float]]], tuple[str, int] | None]
"""Takes the metrics of all validations. Returns the best one as a text, such as ``"accuracy 0.97"``, and its index."""

_MOST: Final = 20  # findings: a page has room for all that matter


def verdict(run: ReportedRun, best: Best) -> list[str]:
    """Return the state of a run, its values that are not finite, its best metric, its costs, checkpoints, and what was lost."""
    return [_state(run), *_not_finite(run), *_abandoned(run), *_best(run, best), *_costs(run), *_checkpoints(run), *_lost(run)]


def _state(run: ReportedRun) -> str:
    came_to = [f"{run.iterations:,} iterations"] if run.iterations else []
    if run.epochs:
        came_to.insert(0, count(run.epochs, "epoch"))
    after = f"{' and '.join(came_to) or 'no iteration'} in {duration(run.seconds)}"
    if not run.story.sessions:
        return f"The end of the run is unknown, because run.json is missing. Its scalars cover {after}."
    last, number = run.story.sessions[-1], len(run.story.sessions)
    sessions = f", in {number} sessions" if number > 1 else ""
    reason = f": {last.reason.strip().rstrip('.')}" if last.reason.strip() else ""
    match run.story.state:
        case RunStatus.KILLED:
            return f"The run was killed after {after}{sessions}: its process ended without recording an end."
        case RunStatus.RUNNING:
            return f"The run is still training; so far {after}{sessions}."
        case RunStatus.UNKNOWN:
            return f"The run is on another machine ({last.environment.machine.host}), not ended; so far {after}{sessions}."
        case state:
            how = f"was {state}" if state in (RunStatus.STOPPED, RunStatus.INTERRUPTED) else state
            return f"The run {how} after {after}{sessions}{reason}."


def _not_finite(run: ReportedRun) -> Iterator[str]:
    for name, curve in run.curves.items():
        bad = np.flatnonzero(~np.isfinite(curve.values))
        if len(bad):
            where = f"first at iteration {curve.iterations[bad[0]]:,.0f}"
            yield f"{name} is NaN or infinite in {len(bad):,} of {count(len(curve.values), 'value')}, {where}."


def _abandoned(run: ReportedRun) -> Iterator[str]:
    cuts = [cut for cut in run.story.cuts if cut.lost]
    if not cuts:
        return
    last, validations = cuts[-1], sum(isinstance(line, Validation) for line in run.story.abandoned)
    lost = count(sum(cut.lost for cut in cuts), "iteration") + (
        f" and {count(validations, 'validation')}" if validations else ""
    )
    source = f", from {last.path.rstrip('/').rpartition('/')[2]}" if last.path else ""
    again = f" (it went back {len(cuts)} times)" if len(cuts) > 1 else ""
    yield (
        f"{lost} were abandoned when the run was resumed at epoch {last.epoch}, iteration {last.iter:,}{source}{again}; "
        "only the costs include them."
    )


def _best(run: ReportedRun, best: Best) -> Iterator[str]:
    validations = run.story.of(Validation)
    found = best([line.metrics for line in validations])
    if found is not None:
        text, index = found
        where = f"at epoch {validations[index].epoch}, iteration {validations[index].iter:,}"
        yield f"Best {text}, {where}; {count(len(validations), 'validation')}."


def _costs(run: ReportedRun) -> Iterator[str]:
    costs = run.costs
    if costs is None:
        yield "Costs were not measured: add RunRecordHook. It writes them every ten seconds and at the end of a run."
        return
    yield from expensive(costs, _MOST) or ["No hook, lane, checkpoint or wait for data took much of the time."]
    if costs.dropped:
        yield f"{costs.dropped:,} measurements were lost; their time is missing from the costs."


def _checkpoints(run: ReportedRun) -> Iterator[str]:
    if written := run.story.checkpoints():
        measured = 0.0 if run.costs is None else held_up(run.costs)  # with the waits for files, as the costs above have it
        seconds = measured or sum(line.stall for line in written)
        held = f"{count(len(written), 'checkpoint')} held training up for {duration(seconds)} in all"
        yield f"{held}; writing one took at most {duration(max(line.seconds for line in written))}."
    if failed := run.story.of(FailedCheckpoint):
        yield f"{count(len(failed), 'checkpoint')} could not be written, the last one at iteration {failed[-1].iter:,}."
    if skipped := run.story.of(SkippedCheckpoint):
        yield f"{count(len(skipped), 'checkpoint')} had to be skipped, the last one at iteration {skipped[-1].iter:,}."


def _lost(run: ReportedRun) -> Iterator[str]:
    costs = run.costs
    if costs is not None and costs.lanes:
        lost = sum(lane.dropped + lane.failed for lane in costs.lanes)
        handed = sum(lane.delivered + lane.dropped + lane.failed + lane.pending for lane in costs.lanes)
        yield f"{lost:,} of {handed:,} offloaded events were lost."
    for name, damage in run.damaged.items():
        yield f"{name} is damaged: {count(damage.lines, 'line')} could not be read, the first one is line {damage.first:,}."


def count(number: int, thing: str) -> str:
    """Return a number with its noun, such as ``"1 epoch"`` or ``"1,360 epochs"``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
