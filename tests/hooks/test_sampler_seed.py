"""DistSamplerSeedHook: another order in every epoch, the same again after a resume."""

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, TensorDataset

from trainbus.hooks import CheckpointHook, DistSamplerSeedHook

ROWS = 8
DATASET = TensorDataset(torch.arange(float(ROWS))[:, None].repeat(1, 3), torch.zeros(ROWS, dtype=torch.int64))


def sampler():
    return DistributedSampler(DATASET, num_replicas=2, rank=0, shuffle=True, seed=3)


def order_of(epoch):
    one = sampler()
    one.set_epoch(epoch)
    return list(one)


def rows_of(loop, resume=None):
    """Run a loop; return which rows of the data set came."""
    seen: list[int] = []
    loop.bus.on("before_train_iter", lambda event: seen.extend(event.batch[0][:, 0].int().tolist()))
    loop.run(resume=resume)
    return seen


def test_without_it_all_epochs_have_the_same(job):
    assert rows_of(job.loop(train_data=DataLoader(DATASET, 2, sampler=sampler()))) == order_of(0) * 2


def test_the_sampler_inside_a_batch_sampler_is_found(job):
    loader = DataLoader(DATASET, batch_sampler=BatchSampler(sampler(), 2, drop_last=False))
    assert rows_of(job.loop(DistSamplerSeedHook(), train_data=loader)) == order_of(0) + order_of(1)


def test_a_batch_sampler_with_set_epoch_gets_the_epoch(job):
    epochs = []

    class Buckets(list):
        def set_epoch(self, epoch):
            epochs.append(epoch)

    loader = DataLoader(DATASET, batch_sampler=Buckets([[0, 1], [2, 3]]))
    job.loop(DistSamplerSeedHook(), train_data=loader, max_epochs=3).run()
    assert epochs == [0, 1, 2]


@pytest.mark.parametrize("data", [[(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))], DataLoader(DATASET, 2)])
def test_loaders_without_set_epoch_are_unchanged(job, data):
    assert rows_of(job.loop(DistSamplerSeedHook(), train_data=data))


def test_a_random_sampler_draws_as_it_does_without_the_hook(job):
    def order(*hooks):
        return rows_of(job.loop(*hooks, train_data=DataLoader(DATASET, 2, sampler=RandomSampler(DATASET)), seed=1))

    assert order() == order(DistSamplerSeedHook())


@pytest.mark.parametrize("limit", [{"max_epochs": 4}, {"max_iters": 8}])
def test_a_resumed_run_has_the_order_of_one_that_was_never_stopped(job, tmp_path, limit):
    """Stopped in the middle of the third pass over the data; by iterations, that is within the only epoch."""

    def loop(folder, *more):
        data = DataLoader(DATASET, 2, sampler=sampler())
        return job.loop(DistSamplerSeedHook(), *more, CheckpointHook(), train_data=data, work_dir=tmp_path / folder, **limit)

    straight = rows_of(loop("straight"))
    assert straight == order_of(0) + order_of(1) + order_of(2) + order_of(3)
    first = rows_of(loop("stopped", job.StopAfter(5)))
    assert first + rows_of(loop("stopped"), resume="auto") == straight
