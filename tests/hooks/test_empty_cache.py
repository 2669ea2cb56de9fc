"""When EmptyCacheHook empties the cache of the device's allocator. The device is played by a function."""

import pytest
import torch

from trainbus.hooks import EmptyCacheHook


@pytest.mark.parametrize(
    ("options", "epoch", "test"),
    [
        ({}, ["after_train_epoch", "after_val_epoch"], ["after_test_epoch"]),
        ({"before_epoch": True, "after_epoch": False}, ["before_train_epoch", "before_val_epoch"], ["before_test_epoch"]),
        ({"after_iter": True, "after_epoch": False}, ["after_train_iter"] * 4 + ["after_val_iter"], ["after_test_iter"]),
    ],
)
def test_by_default_after_each_epoch_of_all_stages_or_where_it_is_asked_to(job, monkeypatch, options, epoch, test):
    points, emptied = [], []
    monkeypatch.setattr("trainbus.hooks.empty_cache.empty_cache", lambda: emptied.append(points[-1]))
    loop = job.loop(EmptyCacheHook(**options), val_data=job.batches(1), test_data=job.batches(1))
    loop.bus.on("before_epoch", "after_epoch", "after_iter", lambda event: points.append(event.mount_point), priority=0)
    loop.run()
    loop.test()
    assert emptied == [*epoch, *epoch, *test]


def test_nothing_happens_without_an_accelerator(job, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    loop = job.loop(EmptyCacheHook(True, True, True))
    loop.run()
    assert loop.counters.epoch == loop.max_epochs
