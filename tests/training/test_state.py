"""The order of a run's events, and the counts that they carry."""

from typing import Any

import pytest
import torch

from eventloop import Bus, Update
from eventloop.events import AfterTrainIter

ITER = "before_train_iter after_train_iter"
VAL = "before_val before_val_epoch 2*(before_val_iter after_val_iter) after_val_epoch after_val"
TEST = "before_test before_test_epoch 2*(before_test_iter after_test_iter) after_test_epoch after_test"
EPOCH = f"before_train_epoch 3*({ITER}) after_train_epoch"


def counts(event: Any) -> tuple[int, int, int, int]:
    progress = event.progress
    return progress.epoch, progress.iter, progress.update, progress.batch_idx


def test_an_iteration_based_run_is_one_long_epoch_with_validation_inside(parts, bus, trace):
    parts.loop(bus, max_iters=5, val_interval=2).run()
    assert trace.names == parts.spell(
        f"before_run before_train before_train_epoch 2*({ITER}) {VAL} 2*({ITER}) {VAL} {ITER} {VAL} "
        "after_train_epoch after_train after_run"
    )
    assert [(e.batch_idx, e.progress.epoch) for e in trace.of("after_train_iter")] == [(index, 0) for index in range(5)]


def test_the_mount_points_inside_an_iteration_surround_forward_backward_and_step_with_one_snapshot_of_progress(parts, bus):
    trace = parts.Trace(bus, inside=True)
    parts.loop(bus, train_data=parts.batches(1), val_data=None, max_epochs=1).run()
    iteration = trace.events[trace.names.index("before_train_iter") : trace.names.index("after_train_epoch")]
    assert [event.mount_point for event in iteration] == [
        *("before_train_iter", "before_forward", "after_forward"),
        "after_train_iter",  # heard here at priority 0; the update comes at 30
        *("before_backward", "after_backward", "before_optimizer_step", "after_optimizer_step"),
    ]
    assert len({id(event.progress) for event in iteration}) == 1


def test_handlers_of_after_train_iter_see_old_weights_before_priority_30_and_new_ones_after(parts, bus):
    seen: dict[int, list[torch.Tensor]] = {29: [], 31: []}
    for priority, weights in seen.items():
        bus.on(AfterTrainIter, lambda e, w=weights: w.append(e.run.model[0].weight.detach().clone()), priority=priority)
    parts.loop(bus, val_data=None, max_epochs=1).run()
    assert not torch.equal(seen[29][0], seen[31][0])
    assert torch.equal(seen[31][0], seen[29][1])


def test_the_loop_adds_its_update_at_priority_30_unless_the_bus_has_one(parts, bus):
    parts.loop(bus)
    (update,) = bus.hooks
    assert isinstance(update, Update)
    assert [s.priority for s in bus.subscriptions if s.hook is update and s.mount_point == "after_train_iter"] == [30]
    other = Bus()
    other.add(mine := Update(accumulate=3), priority=20)
    parts.loop(other)
    assert other.hooks == (mine,)


def test_the_events_of_a_run_by_epochs_and_of_a_test_after_it_and_their_counts(parts, bus, trace):
    """They count from zero, and grow after the events of an iteration, epoch or validation."""
    loop = parts.loop(bus, test_data=parts.batches(2))
    metrics = loop.run()
    loop.test()
    assert trace.names == parts.spell(
        f"before_run before_train {EPOCH} {VAL} {EPOCH} {VAL} after_train after_run before_run {TEST} after_run"
    )
    for name in ("before_train_iter", "after_train_iter"):
        assert [counts(e) for e in trace.of(name)] == [
            *((0, 0, 0, 0), (0, 1, 1, 1), (0, 2, 2, 2)),
            *((1, 3, 3, 0), (1, 4, 4, 1), (1, 5, 5, 2)),
        ]
        assert [e.batch_idx for e in trace.of(name)] == [0, 1, 2, 0, 1, 2]
        assert {e.progress.stage for e in trace.of(name)} == {"train"}
    for name in ("before_train_epoch", "after_train_epoch"):
        assert [e.progress.epoch for e in trace.of(name)] == [0, 1]
    assert [(e.progress.epoch, e.progress.iter) for e in trace.of("before_val")] == [(1, 3), (2, 6)]
    for name in ("before_val_iter", "after_val_iter"):
        assert [e.batch_idx for e in trace.of(name)] == [0, 1, 0, 1]
        assert [e.progress.batch_idx for e in trace.of(name)] == [0, 1, 0, 1]
        assert {(e.progress.stage, e.progress.max_epochs, e.progress.max_iters) for e in trace.of(name)} == {("val", 2, None)}
    assert [e.progress.validation for e in trace.of("after_val")] == [0, 1]
    for name in ("after_train", "after_run"):
        event = trace.of(name)[0]
        assert (event.progress.stage, *counts(event)[:3]) == ("train", 2, 6, 6)
    assert metrics == trace.of("after_val_epoch")[-1].metrics
    assert metrics.keys() == {"loss"}


@pytest.mark.parametrize(
    ("options", "done"),
    [
        ({"max_epochs": 5}, [1, 2, 3, 4, 5]),
        ({"max_epochs": 5, "val_begin": 3, "val_interval": 2}, [4, 5]),
        ({"max_epochs": 5, "val_interval": 7}, [5]),
        ({"max_epochs": 5, "val_begin": 9}, [5]),
        ({"max_iters": 7}, [7]),
        ({"max_iters": 7, "val_interval": 3}, [3, 6, 7]),
        ({"max_iters": 7, "val_interval": 2, "val_begin": 4}, [4, 6, 7]),
        ({"max_iters": 7, "val_interval": 7}, [7]),
    ],
)
def test_validation_runs_every_val_interval_from_val_begin_and_at_the_end(parts, bus, trace, options, done):
    parts.loop(bus, **options).run()
    assert [e.progress.epoch if "max_epochs" in options else e.progress.iter for e in trace.of("before_val")] == done


def test_the_model_trains_in_training_mode_validates_without_gradients_and_keeps_the_mode_of_every_submodule(parts, bus):
    modes = {}
    model = parts.model()
    model[1].eval()  # a frozen batch norm
    for name in ("before_train_iter", "before_val", "after_val_iter", "after_val_epoch", "after_val", "after_run"):
        bus.on(name, lambda e: modes.setdefault(e.mount_point, (e.run.model.training, torch.is_grad_enabled())))
    parts.loop(bus, model=model).run()
    validating = ("before_val", "after_val_iter", "after_val_epoch")  # in which ``after_val`` is no more
    assert modes == {name: (name not in validating, name not in validating) for name in modes}
    assert len(modes) == 6
    assert [module.training for module in model] == [True, False, True, True, True]


def test_a_run_knows_its_lengths_from_the_loader_and_the_last_batch_of_an_epoch_with_and_without_a_length(parts, bus):
    lengths, last = [], []
    bus.on("before_train_epoch", lambda e: lengths.append((e.run.epoch_length, e.run.total_iters)))
    bus.on("after_train_iter", lambda e: last.append(e.run.last_batch))
    parts.loop(bus, max_epochs=2, val_data=None).run()
    parts.loop(bus, max_iters=4, val_data=None).run()
    parts.loop(bus, max_epochs=1, val_data=None, train_data=(b for b in parts.batches(3))).run()
    assert lengths == [(3, 6), (3, 6), (3, 4), (None, None)]
    assert last == [*[False, False, True] * 2, *[False] * 3, True, *[False, False, True]]
