"""What a handler asks of the loop: to end the epoch early, and to validate now."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eventloop import Bus, Run, TrainingError
from hooks import CheckpointHook, OptimizerHook

ITERATION = "before_train_iter after_train_iter"
VALIDATION = "before_val before_val_epoch 2*(before_val_iter after_val_iter) after_val_epoch after_val"


def ask(bus: Bus, mount_point: str, what: str, *at: int) -> None:
    """Call a method of the run at some iterations (or epochs)."""

    def handler(event: Any) -> None:
        counted = event.progress.iter if mount_point == "after_train_iter" else event.progress.epoch
        if counted in at:
            getattr(event.run, what)()

    bus.on(mount_point, handler)


def epoch(count: int) -> str:
    return f"before_train_epoch {count}*({ITERATION}) after_train_epoch"


@pytest.mark.parametrize(
    ("what", "mount_point", "at", "options", "names"),
    [
        # The next epoch has all batches; an epoch that was ended is followed by its validation.
        ("end_epoch", "after_train_iter", [1], {"val_data": None}, f"{epoch(2)} {epoch(3)}"),
        ("end_epoch", "after_train_iter", [0], {"max_epochs": 1}, f"{epoch(1)} {VALIDATION}"),
        (
            *("validate_now", "after_train_iter", [1], {"max_epochs": 1, "val_interval": 2, "val_begin": 9}),
            f"before_train_epoch 2*({ITERATION}) {VALIDATION} {ITERATION} after_train_epoch {VALIDATION}",
        ),
        # After an epoch, and once only if a validation is due.
        (
            *("validate_now", "after_train_epoch", [0, 2], {"max_epochs": 3, "val_interval": 3}),
            f"{epoch(3)} {VALIDATION} {epoch(3)} {epoch(3)} {VALIDATION}",
        ),
        (
            *("validate_now", "after_train_iter", [1, 2], {"max_iters": 4, "val_interval": 2}),
            f"before_train_epoch {ITERATION} {f'{ITERATION} {VALIDATION} ' * 3} after_train_epoch",
        ),
    ],
)
def test_what_a_handler_asks_for_comes_at_the_next_place_for_it(parts, bus, trace, what, mount_point, at, options, names):
    ask(bus, mount_point, what, *at)
    parts.loop(bus, **options).run()
    assert trace.names == parts.spell(f"before_run before_train {names} after_train after_run")


def test_what_is_asked_for_waits_for_the_step_of_an_accumulation_window(parts):
    for what, options in (("end_epoch", {"val_data": None}), ("validate_now", {"val_interval": 2, "val_begin": 9})):
        bus = Bus(OptimizerHook(accumulate=2))
        trace = parts.Trace(bus)
        ask(bus, "after_train_iter", what, 0)
        parts.loop(bus, max_epochs=1, **options).run()
        ended = [event.progress.iter for event in trace.of("before_val")]
        trained = [event.progress.iter for event in trace.of("after_train_iter")]
        assert (trained, ended) == (([0, 1], []) if what == "end_epoch" else ([0, 1, 2], [2, 3]))


def test_end_epoch_works_in_a_loop_of_ones_own(parts, bus):
    seen = []
    ask(bus, "after_train_iter", "end_epoch", 1)
    with Run(bus, model=parts.model()) as run:
        for epoch in run.epochs(2):
            seen += [epoch for _ in run.train(parts.batches(3))]
    assert seen == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("options", [{"max_iters": 4}, {"max_epochs": 1}], ids=["iterations", "validation"])
def test_end_epoch_without_an_epoch_that_can_end_early_is_an_error(parts, bus, options):
    by_iter = "max_iters" in options
    bus.on("after_train_iter" if by_iter else "after_val", lambda event: event.run.end_epoch())
    with pytest.raises(TrainingError, match="end_epoch"):
        parts.loop(bus, **options).run()


def test_run_returns_the_metrics_of_a_validation_that_was_asked_for(parts, bus):
    ask(bus, "after_train_iter", "validate_now", 5)
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
        ask(bus, "after_train_iter", "validate_now", 1)
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


def test_a_run_knows_the_accumulation_of_its_update_and_the_loader_of_its_validation(parts):
    for hooks, accumulation in (([], 1), ([OptimizerHook(accumulate=4)], 4)):
        bus, seen, data = Bus(*hooks), [], parts.batches(2)
        bus.on("before_train", lambda event: seen.append(event.run.accumulation))  # noqa: B023 - called in this pass
        bus.on("before_val", lambda event: seen.append(event.run.evaluation_data))  # noqa: B023
        parts.loop(bus, max_epochs=1, val_data=data).run()
        assert seen[0] == accumulation
        assert seen[1] is data
    model = parts.model()
    assert Run(Bus(), model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)).accumulation is None  # unknown
