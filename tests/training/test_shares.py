"""What a rank's share of a validation counts, for all ranks in one process."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from trainbus.eventloop.training.distributed.shares import Share


class Reversed(DistributedSampler):
    """A sampler with an order of its own."""

    def __iter__(self):
        return reversed(list(super().__iter__()))


def batches(loader):
    """The batches of a pass with how many samples each counts, and whether they are as many as it says."""
    share = Share(loader)
    put_back = share.leave_out()
    length, read = len(loader), [batch if isinstance(batch, list) else [batch] for batch in loader]
    put_back()
    assert length == len(read)
    return [(batch, share.counts(index, torch.tensor(batch))) for index, batch in enumerate(read)]


@pytest.mark.parametrize("size", [None, 1, 2, 3, 4])
@pytest.mark.parametrize("shuffle", [False, True])
def test_each_sample_counts_once_and_all_ranks_have_as_many_batches(size, shuffle):
    for number, ranks in itertools.product(range(1, 10), (1, 2, 3, 4)):
        data = range(number)
        samplers = [DistributedSampler(data, ranks, rank, shuffle=shuffle) for rank in range(ranks)]
        loaders = [DataLoader(data, size, sampler=one, collate_fn=list if size else None) for one in samplers]
        before = [list(one) for one in loaders]
        shares = [batches(one) for one in loaders]
        counted = [sample for share in shares for batch, samples in share for sample in batch if samples]
        assert sorted(counted) == list(range(number)), (number, ranks)
        assert all(samples in (0, len(batch)) for share in shares for batch, samples in share)
        assert len({len(share) for share in shares}) == 1
        assert [list(one) for one in loaders] == before  # as training with the same loader needs it


def test_with_drop_last_a_batch_that_is_not_whole_without_a_repeated_sample_does_not_count():
    for number, ranks, size in itertools.product(range(1, 10), (2, 3), (1, 2, 3)):
        data = range(number)
        samplers = [DistributedSampler(data, ranks, rank, shuffle=False) for rank in range(ranks)]
        shares = [batches(DataLoader(data, size, sampler=one, drop_last=True, collate_fn=list)) for one in samplers]
        counted = [sample for share in shares for batch, samples in share for sample in batch if samples]
        assert len(counted) == len(set(counted))
        assert all(len(batch) == size and samples in (0, size) for share in shares for batch, samples in share)
        assert len({len(share) for share in shares}) == 1


@pytest.mark.parametrize(
    ("loader", "counted"),
    [
        ([[1, 2], [3]], [2, 1]),
        (DataLoader(range(3), 2, collate_fn=list), [2, 1]),
        (DataLoader(range(3), batch_sampler=[[0, 1], [2]], collate_fn=list), [2, 1]),
        (DataLoader(range(3), 2, sampler=DistributedSampler(range(3), 2, 1, drop_last=True), collate_fn=list), [1]),
        (DataLoader(range(3), 2, sampler=Reversed(range(3), 2, 1), collate_fn=list), [2]),
    ],
    ids=["list", "plain", "batches of its own", "drop_last", "an order of its own"],
)
def test_loaders_without_repeated_samples_are_unchanged(loader, counted):
    assert [samples for _, samples in batches(loader)] == counted
