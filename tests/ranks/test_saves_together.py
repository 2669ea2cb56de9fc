"""Saves of several processes: all of them ask for the same ones, and leave the same ones out."""

from __future__ import annotations

import time
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel

from eventloop import Hook
from eventloop.checkpoint import load_whole, sharded
from eventloop.training import agree as agreements
from hooks import CheckpointHook

from . import jobs


class AsksAlone(Hook):
    """Asks for a file at one mount point, on one rank."""

    def __init__(self, mount_point: str, rank: int) -> None:
        self.mount_point, self.rank = mount_point, rank

    def after_train_iter(self, event: Any) -> None:
        self.ask(event, "after_train_iter")

    def after_train_epoch(self, event: Any) -> None:
        self.ask(event, "after_train_epoch")

    def ask(self, event: Any, mount_point: str) -> None:
        if mount_point == self.mount_point and event.run.rank == self.rank and event.progress.iter >= 3:
            event.run.request_save("mine.safetensors")


def asks_alone(work_dir: str, mount_point: str, rank: int, shard: bool = False) -> None:
    agreements.INTERVAL = 0.0  # as with iterations of 50 ms
    jobs.make_loop(work_dir, AsksAlone(mount_point, rank), epochs=1, shard=shard).run()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("shard", [False, True])
def test_a_save_requested_by_one_rank_within_an_epoch_is_an_error(outcomes, tmp_path, rank, shard):
    ended = outcomes(asks_alone, str(tmp_path / "run"), "after_train_iter", rank, shard)
    assert [one.exitcode for one in ended] == [1, 1]
    told = "\n".join(text for one in ended for text in (one.error, *one.notes))
    assert (
        f"TrainingError: the ranks request different checkpoints at the same time: rank {rank} requests mine.safetensors"
        in told
    )
    assert "not under a condition on run.rank" in told


@pytest.mark.parametrize("shard", [False, True])
def test_at_an_epochs_end_rank_0_decides_and_a_request_of_another_rank_alone_is_an_error(ranks, outcomes, tmp_path, shard):
    ranks(asks_alone, str(tmp_path / "first"), "after_train_epoch", 0, shard)
    assert load_whole(tmp_path / "first" / "mine.safetensors")["state_dict"]["0.weight"].shape == (16, 4)
    for one in outcomes(asks_alone, str(tmp_path / "second"), "after_train_epoch", 1, shard):
        assert "rank 1 requests the checkpoint mine.safetensors, but rank 0 does not" in one.error
    assert not list((tmp_path / "second").glob("*.safetensors"))


def asks_between_exchanges(work_dir: str) -> None:
    agreements.PATIENCE = 0.2
    agreements.INTERVAL = 60.0  # as with short iterations
    loop = jobs.make_loop(work_dir, AsksAlone("after_train_iter", 0), epochs=1)
    assert isinstance(loop.model, DistributedDataParallel)
    loop.model = loop.model.module  # whose collective would be what the other waits in
    loop.bus.on("after_train_iter", lambda event: time.sleep(0.1))
    loop.run()


def test_a_rank_that_waits_for_others_logs_it_until_they_request_the_save(outcomes, tmp_path):
    first, second = outcomes(asks_between_exchanges, str(tmp_path))
    assert "waiting for the other ranks to request this checkpoint" in first.output
    assert "mine.safetensors" in first.output
    assert any("the ranks request different checkpoints" in text for one in (first, second) for text in (one.error, *one.notes))
    assert (first.exitcode, second.exitcode) == (1, 1)


def saves_by_iterations(work_dir: str, shard: bool, busy: str, slow_rank: int | None) -> Any:
    if jobs.rank_and_size()[0] == slow_rank:
        write = sharded.Parts._write_parts

        def slowly(self: Any) -> Any:
            time.sleep(0.3)
            return write(self)

        sharded.Parts._write_parts = slowly
    loop = jobs.make_loop(work_dir, CheckpointHook(3, by_epoch=False, busy=busy), shard=shard)
    skipped: list[str] = []
    loop.bus.on("checkpoint_skipped", lambda event: skipped.extend(event.names))
    loop.run()
    return skipped


@pytest.mark.parametrize("shard", [False, True])
def test_saves_in_the_middle_of_an_epoch_are_made_by_all_ranks(ranks, tmp_path, shard):
    ranks(saves_by_iterations, str(tmp_path), shard, "wait", None)
    iterations = [3, 6, 9, 12, 15, 16]
    assert {file.name for file in tmp_path.glob("*.safetensors")} == {f"iter_{number}.safetensors" for number in iterations}
    for number in iterations:
        state = load_whole(tmp_path / f"iter_{number}.safetensors")
        assert state["progress"]["iter"] == number
        assert len(state["ranks"]) == 2


@pytest.mark.parametrize("slow", [0, 1])
def test_sharded_saves_due_while_a_rank_is_writing_are_skipped_by_all(ranks, tmp_path, slow):
    first, second = ranks(saves_by_iterations, str(tmp_path), True, "skip", slow)
    assert first == second
    assert first
    left = {file.name for file in tmp_path.glob("*.safetensors")}
    made = {f"iter_{number}.safetensors" for number in (3, 6, 9, 12, 15)} - {name.split("/")[-1] for name in first}
    assert left == {*made, "iter_16.safetensors"}  # the last one waits
    for name in left:
        assert load_whole(tmp_path / name)["state_dict"]["0.weight"].shape == (16, 4)
