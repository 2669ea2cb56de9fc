"""What a training thread does for the other ranks grows with the logarithm of their number, at most."""

import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import distributed

from trainbus.eventloop.training.distributed import blocks, collectives
from trainbus.eventloop.training.distributed.collectives import Collectives
from trainbus.eventloop.training.distributed.mailbox import missing_of
from trainbus.eventloop.training.distributed.ranks import own_group
from trainbus.hooks import CheckpointHook
from trainbus.observe.exchange import Comparison

from . import jobs

FEW = {"all_reduce", "broadcast", "broadcast_object_list", "irecv", "isend", "recv_object_list", "send_object_list"}
"""Operations that give the calling thread a logarithmic number of messages at most."""
MANY = {
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "gather", "gather_object", "reduce"),
    *("scatter", "scatter_object_list"),
}
"""Operations that give it as many messages, or values, as there are ranks."""


def count_operations() -> Counter[str]:
    """Count the operations between ranks that trainbus calls on the main thread of this process from now on."""
    counts: Counter[str] = Counter()

    def counting(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **options: Any) -> Any:
            caller = sys._getframe(1).f_globals["__name__"]
            counts[name] += threading.current_thread() is threading.main_thread() and caller.startswith("trainbus.eventloop.")
            return operation(*args, **options)

        return count

    for name in FEW | MANY:
        setattr(distributed, name, counting(name, getattr(distributed, name)))
    return counts


def trains_and_resumes(folder: str, shard: bool, ring: int) -> dict[str, int]:
    """Train with validations and saves until rank 1 stops the run, and resume it; return the operations of this rank."""
    collectives.INTERVAL = 0.0  # an exchange in every iteration: their number must not depend on the time
    collectives.RING = ring  # type: ignore[misc]
    counts = count_operations()
    loop = jobs.make_loop(folder, CheckpointHook(interval=3, by_epoch=False), epochs=3, shard=shard)
    if jobs.rank_and_size()[0] == 1:
        loop.bus.on("after_train_epoch", lambda event: loop.stop(), after=1)
    loop.run()
    jobs.make_loop(folder, epochs=3, shard=shard).run(resume="auto")
    return dict(+counts)  # without the zeros


@pytest.mark.long
@pytest.mark.parametrize(
    ("shard", "ring"),
    [(False, 64), (False, 1), (True, 1)],
)
def test_with_four_times_the_ranks_a_training_thread_has_at_most_three_times_the_operations(ranks, tmp_path, shard, ring):
    two = ranks(trains_and_resumes, str(tmp_path / "two"), shard, ring)
    eight = ranks(trains_and_resumes, str(tmp_path / "eight"), shard, ring, size=8)
    assert two[0].keys() & MANY == set()
    assert ("irecv" in two[0]) == (ring == 1)
    for counts in eight:
        assert counts.keys() & MANY == set()
        for name, count in counts.items():
            assert count <= 3 * max(one.get(name, 0) for one in two), name


def takes_the_maximum(ring: int) -> tuple[list[int], list[str], int]:
    collectives.RING = ring  # type: ignore[misc]
    ranks = Collectives(own_group("control"))
    values = torch.tensor([ranks.rank, -ranks.rank, 7])
    counts = count_operations()
    for _ in collectives.Maximum(ranks, values).steps():
        pass
    everyone = ranks.merged([f"of rank {ranks.rank}"], list.__add__)
    return values.tolist(), everyone, counts["isend"]


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3, 5])
def test_values_of_any_number_of_ranks_are_merged_in_a_logarithmic_number_of_messages(ranks, size):
    for ring, messages in ((1, (size - 1).bit_length()), (64, 0)):
        expected = [size - 1, 0, 7], [f"of rank {rank}" for rank in range(size)], messages
        assert ranks(takes_the_maximum, ring, size=size) == [expected] * size


def asks_alone(folder: str, rank: int) -> None:
    collectives.INTERVAL, collectives.RING = 0.0, 1  # type: ignore[misc]
    loop = jobs.make_loop(folder, epochs=1)
    if jobs.rank_and_size()[0] == rank:
        loop.bus.on("after_train_iter", lambda event: event.run.checkpoints.save("mine.safetensors"))
    loop.run()


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 3])
def test_a_save_that_one_of_many_ranks_requests_is_an_error(outcomes, tmp_path, rank):
    ended = outcomes(asks_alone, str(tmp_path / "run"), rank, size=4)
    assert [one.exitcode for one in ended] == [1] * 4
    told = "\n".join(text for one in ended for text in (one.error, *one.notes))
    assert "TrainingError: the ranks request different checkpoints at the same time" in told


def test_missing_messages_of_thousands_of_ranks_are_found_in_few_round_trips():
    asked: list[int] = []
    there = {f"answer/{rank}" for rank in range(4096) if rank not in (7, 4000)}

    def are_there(keys: Sequence[str]) -> bool:
        asked.append(len(keys))
        return there.issuperset(keys)

    assert missing_of(are_there, sorted(there)) == []
    assert asked == [4094]
    assert missing_of(are_there, [f"answer/{rank}" for rank in range(4096)]) == ["answer/7", "answer/4000"]
    assert len(asked) < 60
    assert missing_of(are_there, []) == []


def test_beyond_512_ranks_their_times_are_compared_less_often():
    assert [Comparison(size).period for size in (2, 512, 4096)] == [2.0, 2.0, 16.0]


@pytest.mark.parametrize("size", [1, 2, 64, 65, 130, 4096, 20_000])
def test_no_rank_has_messages_of_more_than_its_block_and_the_first_ranks_of_blocks(monkeypatch, size):
    monkeypatch.setattr(blocks, "default_store", lambda: None)
    monkeypatch.setattr(blocks, "tcp_store", lambda store: store or "a TCPStore")
    every = [blocks.Blocks(rank, size) for rank in range(size)]
    assert all(rank in one.members and one.leads == (rank == one.members[0]) for rank, one in enumerate(every))
    assert [one.first for one in every if one.leads] == [*every[0].firsts]
    assert sorted(rank for one in every if one.leads for rank in one.members) == [*range(size)]
    most = size + 1 if size <= 64 else max(128, 2 * math.isqrt(size) + 2)
    assert len(every[0].members) + len(every[0].firsts) <= most


def test_without_a_store_that_has_an_address_all_ranks_are_one_block(monkeypatch):
    monkeypatch.setattr(blocks, "default_store", distributed.HashStore)
    assert [*blocks.Blocks(99, 100).firsts] == [0]
