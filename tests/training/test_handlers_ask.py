"""What a handler asks of the loop: to end the epoch early, and to validate now."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eventloop import Bus, Run, TrainingError
from hooks import CheckpointHook, OptimizerHook

ITERATION = "before_train_iter after_train_iter"
VALIDATION = "before_val before_val_epoch 2*(before_val_iter after_val_iter) after_val_epoch after_val"


def ask(bus: Bus, mount_point: str, what: str, *, at: int) -> None:
    """Call a method of the run at one iteration (or epoch)."""

    def handler(event: Any) -> None:
        counted = event.progress.iter if mount_point == "after_train_iter" else event.progress.epoch
        if counted == at:
            getattr(event.run, what)()

    bus.on(mount_point, handler)


def test_end_epoch_ends_the_epoch_after_the_iteration_and_the_next_one_has_all_batches(parts, bus, trace):
    ask(bus, "after_train_iter", "end_epoch", at=1)
    parts.loop(bus, val_data=None).run()
    epochs = [f"before_train_epoch {count}*({ITERATION}) after_train_epoch" for count in (2, 3)]
    assert trace.names == parts.spell(f"before_run before_train {' '.join(epochs)} after_train after_run")


def test_an_epoch_that_was_ended_is_followed_by_its_validation(parts, bus, trace):
    ask(bus, "after_train_iter", "end_epoch", at=0)
    parts.loop(bus, max_epochs=1).run()
    epoch = f"before_train_epoch {ITERATION} after_train_epoch {VALIDATION}"
    assert trace.names == parts.spell(f"before_run before_train {epoch} after_train after_run")


def test_end_epoch_waits_for_the_step_of_an_accumulation_window(parts, bus, trace):
    bus.add(OptimizerHook(accumulate=2))
    ask(bus, "after_train_iter", "end_epoch", at=0)
    parts.loop(bus, max_epochs=1, val_data=None).run()
    assert [event.progress.iter for event in trace.of("after_train_iter")] == [0, 1]


def test_end_epoch_works_in_a_loop_of_ones_own(parts, bus):
    seen = []
    ask(bus, "after_train_iter", "end_epoch", at=1)
    with Run(bus, model=parts.model()) as run:
        for epoch in run.epochs(2):
            seen += [epoch for _ in run.train(parts.batches(3))]
    assert seen == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("options", [{"max_iters": 4}, {"max_epochs": 1}], ids=["iterations", "validation"])
def test_end_epoch_without_an_epoch_that_can_end_early_is_an_error(parts, bus, options):
    by_iter = "max_iters" in options
    bus.on("after_train_iter" if by_iter else "after_val", lambda event: event.run.end_epoch())
    with pytest.raises(TrainingError, match="needs an epoch of"):
        parts.loop(bus, **options).run()


def test_validate_now_validates_between_two_iterations_of_an_epoch(parts, bus, trace):
    ask(bus, "after_train_iter", "validate_now", at=1)
    parts.loop(bus, max_epochs=1, val_interval=2, val_begin=9).run()
    epoch = f"before_train_epoch 2*({ITERATION}) {VALIDATION} {ITERATION} after_train_epoch {VALIDATION}"
    assert trace.names == parts.spell(f"before_run before_train {epoch} after_train after_run")


def test_validate_now_validates_after_an_epoch_and_once_only_if_a_validation_is_due(parts, bus, trace):
    ask(bus, "after_train_epoch", "validate_now", at=0)
    ask(bus, "after_train_epoch", "validate_now", at=2)
    parts.loop(bus, max_epochs=3, val_interval=3).run()
    assert [event.progress.epoch for event in trace.of("before_val")] == [1, 3]


def test_validate_now_is_met_by_the_validation_that_is_due_in_iteration_based_training(parts, bus, trace):
    ask(bus, "after_train_iter", "validate_now", at=1)
    ask(bus, "after_train_iter", "validate_now", at=2)
    parts.loop(bus, max_iters=4, val_interval=2).run()
    assert [event.progress.iter for event in trace.of("before_val")] == [2, 3, 4]


def test_validate_now_waits_for_the_step_of_an_accumulation_window(parts, bus, trace):
    bus.add(OptimizerHook(accumulate=2))
    ask(bus, "after_train_iter", "validate_now", at=0)
    parts.loop(bus, max_epochs=1, val_interval=2, val_begin=9).run()
    assert [event.progress.iter for event in trace.of("before_val")] == [2, 3]


def test_run_returns_the_metrics_of_a_validation_that_was_asked_for(parts, bus):
    ask(bus, "after_train_iter", "validate_now", at=5)
    bus.on("after_train_iter", lambda event: event.run.stop() if event.progress.iter == 6 else None)
    loop = parts.loop(bus, max_epochs=9, val_interval=9)
    assert loop.run().keys() == {"loss"}


def test_validate_now_without_a_loop_that_can_is_an_error(parts, bus):
    bus.on("after_train_iter", lambda event: event.run.validate_now())
    with pytest.raises(TrainingError, match="val_data="):
        parts.loop(bus, val_data=None).run()
    bus = Bus()
    bus.on("after_train_iter", lambda event: event.run.validate_now())
    with pytest.raises(TrainingError, match=r"run\.validate"), Run(bus, model=parts.model()) as run:
        for _ in run.train(parts.batches(1)):
            pass


def test_a_checkpoint_before_a_validation_that_was_asked_for_resumes_with_it(parts, tmp_path):
    def trained(folder: Any, *, resume: Any = None) -> Any:
        bus = Bus()
        ask(bus, "after_train_iter", "validate_now", at=1)
        bus.add(CheckpointHook(interval=2, by_epoch=False))
        trace = parts.Trace(bus)
        loop = parts.loop(bus, val_interval=2, val_begin=9, work_dir=folder)
        loop.run(resume=resume)
        return trace, loop

    whole, ended = trained(tmp_path / "whole")
    trace, resumed = trained(tmp_path / "resumed", resume=tmp_path / "whole" / "iter_2.safetensors")
    assert [event.progress.iter for event in whole.of("before_val")] == [2, 6]
    assert [event.progress.iter for event in trace.of("before_val")] == [2, 6]
    assert trace.names.index("before_val") < trace.names.index("before_train_iter")
    parts.assert_same(resumed.model.state_dict(), ended.model.state_dict())


@pytest.mark.parametrize("named", [None, 4])
def test_accumulation_is_that_of_the_update(parts, bus, named):
    if named:
        bus.add(OptimizerHook(accumulate=named))
    seen = []
    bus.on("before_train", lambda event: seen.append(event.run.accumulation))
    parts.loop(bus, max_epochs=1, val_data=None).run()
    assert seen == [named or 1]


def test_accumulation_is_unknown_in_a_loop_of_ones_own(parts):
    model = parts.model()
    assert Run(Bus(), model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)).accumulation is None


def test_evaluation_data_is_the_loader_of_the_validation(parts, bus):
    data, seen = parts.batches(2), []
    bus.on("before_val", lambda event: seen.append(event.run.evaluation_data))
    loop = parts.loop(bus, max_epochs=1, val_data=data)
    loop.run()
    assert seen[0] is data
