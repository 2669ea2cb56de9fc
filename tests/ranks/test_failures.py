"""An error on one of two processes ends both, and says why; what would make them hang is refused."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from trainbus.eventloop.checkpoint import load
from trainbus.eventloop.training.distributed import ranks as agreements
from trainbus.eventloop.training.folders import DirectoryLock
from trainbus.hooks import CheckpointHook

from ..failing import fails
from . import jobs


def breaks(work_dir: str, where: str, shard: bool) -> None:
    def fail(event: Any) -> None:
        if event.progress.iter >= 5 or where in ("before_run", "before_train"):
            raise ValueError("one process has had enough")

    loop = jobs.make_loop(work_dir, CheckpointHook(interval=1), shard=shard)
    if jobs.rank_and_size()[0] == 1:
        mount_point = "after_train_iter" if where == "offloaded" else where
        loop.bus.on(mount_point, fail, offload="thread" if where == "offloaded" else None)
    loop.run()


@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "shard"),
    [
        *((where, False) for where in ("before_run", "after_train_iter", "after_val_iter", "after_run", "offloaded")),
        *((where, True) for where in ("before_train", "after_train_iter", "before_save_checkpoint")),
    ],
)
def test_an_exception_on_one_rank_ends_the_others_with_its_message(outcomes, tmp_path, where, shard):
    first, second = outcomes(breaks, str(tmp_path), where, shard)
    assert (first.exitcode, second.exitcode) == (1, 1)
    assert "ValueError: one process has had enough" in "\n".join([second.error, *second.notes])
    assert any("rank 1: ValueError: one process has had enough" in note for note in first.notes), first.output


def trains(work_dir: str, dies: bool) -> Any:
    loop = jobs.make_loop(work_dir, CheckpointHook(interval=1), epochs=4)

    def die(event: Any) -> None:
        if event.progress.epoch == 2 and event.run.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    if dies:
        loop.bus.on("checkpoint_staged", die, priority=0)
    loop.run(resume="auto")
    return jobs.weights(loop.model)


@pytest.mark.long
def test_a_process_killed_in_a_save_ends_the_others_and_the_previous_checkpoint_resumes(outcomes, ranks, tmp_path):
    place = tmp_path / "run"
    first, second = outcomes(trains, str(place), True)
    assert first.exitcode == -signal.SIGKILL
    assert second.exitcode == 1, second.output
    assert (place / "last_checkpoint").read_text() == "epoch_2.safetensors"
    assert load(place / "epoch_2.safetensors")["progress"]["epoch"] == 2
    straight = ranks(trains, str(tmp_path / "straight"), False)[0]
    resumed = ranks(trains, str(place), False)[1]
    torch.testing.assert_close(resumed, straight, rtol=0, atol=0)


def dies_before_it_joins() -> None:
    agreements._ANSWER = 0.2  # of this process
    loop = jobs.make_loop(None)
    if jobs.rank_and_size()[0] == 1:
        os._exit(3)
    loop.run()


def stands_still(work_dir: str, which: int) -> None:
    agreements._ANSWER = 0.2
    agreements._STORE_TIMEOUT = 2.0  # of a group that fails after 3 s
    rank, size = jobs.rank_and_size()
    if not which:  # with the store of the group
        store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if not rank else None
        ports = [store and store.port]
        distributed.broadcast_object_list(ports)
        store = store or distributed.TCPStore("127.0.0.1", ports[0])
        jobs.destroy_group()
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=3))
    loop = jobs.make_loop(work_dir, CheckpointHook(interval=1), shard=True)
    processes: list[Any] = [None, None]
    distributed.all_gather_object(processes, os.getpid())

    def stop(event: Any) -> None:
        if not os.fork():  # ends the one that stands still when the other has ended
            while Path(f"/proc/{processes[1 - which]}").exists():
                time.sleep(0.05)
            os.kill(processes[which], signal.SIGKILL)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)

    if rank == which:
        loop.bus.on("after_train_iter", stop, once=2)
    loop.run()


@pytest.mark.long
def test_ranks_wait_at_most_the_users_timeout_for_one_that_dies_before_it_joins(outcomes):
    first, second = outcomes(dies_before_it_joins, group_timeout=3)
    assert (first.exitcode, second.exitcode) == (1, 3)
    assert any(note.startswith("rank 1 did not answer") and "timeout=" in note for note in first.notes), first.output


@pytest.mark.long
@pytest.mark.parametrize("which", [0, 1], ids=["with the store", "without"])
def test_ranks_wait_at_most_the_users_timeout_for_a_silent_one_and_name_it(outcomes, tmp_path, which):
    found = outcomes(stands_still, str(tmp_path / "run"), which, group_timeout=3)
    assert found[which].exitcode == -signal.SIGKILL
    other = found[1 - which]
    assert other.exitcode == 1
    assert any(note.startswith(f"rank {which}") and "did not answer" in note for note in other.notes), other.output


def fails_twice() -> list[str]:
    told = []
    for what in ("first", "second"):
        loop = jobs.make_loop(None)
        loop.bus.on("after_train", fails(ValueError(what)))
        try:
            loop.run()
        except ValueError as error:
            told.append(f"{error} {getattr(error, '__notes__', [])}")
    return told


@pytest.mark.long
def test_a_later_run_does_not_raise_the_failure_of_an_earlier_one(ranks):
    for first, second in ranks(fails_twice):
        assert "first" in first
        assert "first" not in second.replace("failed first", "")


def reduces_offloaded(kind: str) -> None:
    loop = jobs.make_loop(None)
    gather = distributed.all_gather_object

    async def reduce(event: Any) -> None:
        distributed.all_reduce(torch.ones(1))

    if kind == "async":
        loop.bus.on("after_train_iter", reduce, once=1)
    elif kind == "timeout":
        loop.bus.on("after_train_iter", lambda event: distributed.barrier(), once=1, offload="thread", timeout=5)
    else:
        loop.bus.on("after_train_iter", lambda event: gather([None, None], 1), once=1, offload="thread")
    loop.run()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["async", "thread", "timeout"])
def test_a_collective_in_an_offloaded_handler_is_an_error_with_advice(outcomes, kind):
    for outcome in outcomes(reduces_offloaded, kind):  # the one that is first ends the other
        told = "\n".join([outcome.error, *outcome.notes])
        assert "OffloadError" in told
        assert "is offloaded and calls torch.distributed" in told
        assert "Make the handler inline" in told


def test_torchrun_without_a_process_group_is_an_error(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(ValueError, match="init_process_group"):
        jobs.make_loop(None).run()


@pytest.mark.long
def test_ranks_share_the_work_dir_lock_and_all_are_refused_a_locked_one(outcomes, ranks, tmp_path):
    lock = DirectoryLock(tmp_path)
    for outcome in outcomes(trains, str(tmp_path), False):
        assert outcome.exitcode == 1
        assert f"ConfigurationError: {tmp_path} is in use by process {os.getpid()}" in outcome.error
    lock.release()
    ranks(trains, str(tmp_path), False)
