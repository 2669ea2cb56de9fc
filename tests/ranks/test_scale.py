"""What a training thread does for the other ranks grows with the logarithm of their number, at most."""

import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed

from eventloop.training import agree as agreements
from eventloop.training.distributed.ranks import Ranks, own_group
from hooks import CheckpointHook

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
            counts[name] += threading.current_thread() is threading.main_thread() and caller.startswith("eventloop.")
            return operation(*args, **options)

        return count

    for name in FEW | MANY:
        setattr(distributed, name, counting(name, getattr(distributed, name)))
    return counts


def trains_and_resumes(folder: str, shard: bool) -> dict[str, int]:
    """Train with validations and saves until rank 1 stops the run, and resume it; return the operations of this rank."""
    agreements.INTERVAL = 0.0  # an exchange in every iteration: their number must not depend on the time
    counts = count_operations()
    loop = jobs.make_loop(folder, CheckpointHook(interval=3, by_epoch=False), epochs=3, shard=shard)
    if jobs.rank_and_size()[0] == 1:
        loop.bus.on("after_train_epoch", lambda event: loop.stop(), after=1)
    loop.run()
    jobs.make_loop(folder, epochs=3, shard=shard).run(resume="auto")
    return dict(+counts)  # without the zeros


@pytest.mark.parametrize("shard", [False, True])
def test_with_four_times_the_ranks_a_training_thread_has_at_most_three_times_the_operations(ranks, tmp_path, shard):
    two = ranks(trains_and_resumes, str(tmp_path / "two"), shard)
    eight = ranks(trains_and_resumes, str(tmp_path / "eight"), shard, size=8)
    assert two[0].keys() & MANY == set()
    assert two[0]["all_reduce"] > 0
    for counts in eight:
        assert counts.keys() & MANY == set()
        for name, count in counts.items():
            assert count <= 3 * max(one.get(name, 0) for one in two), name
