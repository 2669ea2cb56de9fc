"""Measure the cost of publishing the end of an iteration to 10, 1 or no hooks.

With hooks, the event is ready-made and the same for all. Without hooks, the time includes making the event (for the others, the
arguments); the floor is then the event alone, made and thrown away.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from timeit import Timer

from benchmarks.harness import SUBJECT, Budget, Comparison, Sample, Samples, Settings, Tick, in_blocks, measure
from benchmarks.peers import Statement, direct, load, trainbus
from trainbus.eventloop import Progress
from trainbus.eventloop.events import AfterTrainIter

PEERS = ("pyee", "mmengine", "psygnal", "pluggy", "ignite", "blinker", "lightning")
EMPTY_LOOP = "empty loop"
SECONDS_PER_SAMPLE = 0.002
"""Short, so that the machine's speed is constant within a round; long enough for a clock of 50 ns."""

Dispatch = Callable[[Mapping[str, object], int], Statement]


def run(settings: Settings) -> list[Comparison]:
    return [
        compare(settings, 10, "Ten no-op hooks", floor="direct calls", budget=Budget(1, 1.35)),
        compare(settings, 1, "One no-op hook", floor="direct calls"),
        compare(settings, 0, "No subscriber: make an event, publish it", floor="event alone", budget=Budget(2, 2.0)),
    ]


def compare(settings: Settings, handlers: int, title: str, floor: str, budget: Budget | None = None) -> Comparison:
    modules, left_out = load(PEERS)
    # trainbus next to the floor, so that their ratio is taken over the shortest time.
    dispatchers: dict[str, Dispatch] = {floor: direct.calls, SUBJECT: trainbus.dispatch, "for-loop": direct.for_loop}
    dispatchers |= {peer: module.dispatch for peer, module in modules.items()}

    def block(tick: Tick) -> Samples:
        names = announcement()
        with ExitStack() as scopes:
            samples = {EMPTY_LOOP: timed(Statement("pass", {}))}
            for name, dispatch in dispatchers.items():
                statement = dispatch(names, handlers)
                scopes.enter_context(statement.scope)
                samples[name] = timed(statement)
            return without_loop(measure(samples, settings.rounds(quick=5, full=15), tick))

    samples = in_blocks(settings, 12, block)
    return Comparison(title, "ns", floor, samples, budget=budget, left_out=left_out)


def announcement() -> dict[str, object]:
    """Return the globals of a script that has a run, its progress, and an event."""
    run = object()
    progress = Progress(epoch=0, iter=0, max_iters=300)
    event = AfterTrainIter(run=run, progress=progress, batch_idx=0, batch=None, outputs=None)
    return {"AfterTrainIter": AfterTrainIter, "run": run, "progress": progress, "event": event}


def timed(statement: Statement) -> Sample:
    """Time a statement in a loop inside a function, its names looked up as globals, as in a training script."""
    timer = Timer(statement.code, globals=dict(statement.names), timer=time.perf_counter)
    trial = 50
    number = max(1, round(trial * SECONDS_PER_SAMPLE / min(timer.repeat(5, trial))))

    def sample() -> float:
        return timer.timeit(number) / number

    return sample


def without_loop(samples: Samples) -> Samples:
    """Subtract the cost of the timing loop: its minimum, because a disturbed loop would make all others too fast."""
    loop = min(samples.pop(EMPTY_LOOP))
    return {name: [time - loop for time in times] for name, times in samples.items()}
