"""What hooks keep for each other in a run: typed, and gone with the run."""

import gc
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from trainbus import hooks
from trainbus.eventloop import Bus, ConfigurationError, Hook, Run, TrainingError, TrainLoop
from trainbus.eventloop.events import Slot

from ..hooks.conftest import batches, make_loop

NORM = Slot("gradient norm", torch.Tensor)
COUNT = Slot("count", int)


class Thing:
    """Something that can be referred to weakly."""


def train(*found: Hook, **options: Any) -> TrainLoop:
    loop = make_loop(*found, train_data=batches(3), max_epochs=1, **options)
    loop.run()
    return loop


def test_a_hook_reads_the_value_that_another_hook_has_set(bus: Bus) -> None:
    taken: list[Any] = []
    bus.on("after_train_iter", lambda event: taken.append(event.run.shared[COUNT]), priority=60)

    @bus.on("after_train_iter")
    def give(event: Any) -> None:
        event.run.shared[COUNT] = event.run.shared.get(COUNT, 0) + 1

    train(bus=bus)
    assert taken == [1, 2, 3]


def test_slots_are_typed_and_independent_and_reading_an_empty_one_is_an_error() -> None:
    run = Run(model=torch.nn.Linear(1, 1))
    run.shared[COUNT] = 3
    with pytest.raises(TrainingError, match=r"gradient norm.*count"):
        run.shared[NORM]
    assert run.shared.get(NORM) is None
    assert NORM not in run.shared
    with pytest.raises(TypeError, match=r"count.*int.*Tensor"):
        run.shared[COUNT] = torch.ones(())  # type: ignore[assignment]
    other = Slot("count", int)  # of the same name
    run.shared[other] = 2
    assert (run.shared[COUNT], run.shared[other]) == (3, 2)
    del run.shared[other]
    assert other not in run.shared
    assert list(run.shared) == [COUNT]


@pytest.mark.long
@pytest.mark.parametrize("end", ["in order", "by an error"])
def test_values_are_cleared_when_the_run_ends(end: str) -> None:
    slot = Slot("thing", Thing)
    bus, model = Bus(), torch.nn.Linear(1, 1)
    thing = Thing()
    gone = weakref.ref(thing)
    run = Run(bus, model=model)
    with suppress(ArithmeticError), capture_logs(), run:
        run.shared[slot] = thing
        del thing
        gc.collect()
        assert gone() is not None
        if end == "by an error":
            raise ArithmeticError
    gc.collect()
    assert len(run.shared) == 0
    assert gone() is None


def test_hooks_and_slots_do_not_keep_a_run_alive(tmp_path: Any) -> None:
    runs: list[weakref.ref[Any]] = []

    class Watches(Hook):
        def before_run(self, event: Any) -> None:
            runs.append(weakref.ref(event.run))
            event.run.shared[Slot("itself", Run)] = event.run

    kept = [
        *(Watches(), hooks.OptimizerHook(accumulate=2), hooks.RuntimeInfoHook(), hooks.IterTimerHook(), hooks.EMAHook()),
        *(hooks.LoggerHook(writers=[]), hooks.CheckpointHook(1, save_best="loss"), hooks.EarlyStoppingHook("loss")),
        *(hooks.PreemptionHook(), hooks.ProgressBar(), hooks.CheckInvalidLossHook(), hooks.SyncBuffersHook()),
        *(hooks.ProfilerHook(on_trace_ready=lambda profiler: None), hooks.AutogradAnomalyDetectHook()),
    ]
    loop = train(*kept, work_dir=tmp_path, val_data=batches(1))
    bus = loop.bus
    del loop
    gc.collect()
    assert [run() for run in runs] == [None]
    assert bus.hooks  # which are all still there


@pytest.mark.parametrize("arguments", [("", int), (3, int), ("count", "int"), ("count", None)])
def test_a_slot_needs_a_name_and_a_type(arguments: Any) -> None:
    with pytest.raises(ConfigurationError, match="give"):
        Slot(*arguments)
