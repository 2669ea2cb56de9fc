"""Saves of several processes: all of them ask for the same ones, leave the same ones out, and go on from their own states."""

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch.nn.parallel import DistributedDataParallel

from trainbus.eventloop import Bus, ConfigurationError, Run, TrainLoop
from trainbus.eventloop.checkpoint import load, load_whole, packed
from trainbus.eventloop.training.distributed import collectives
from trainbus.eventloop.training.distributed.mailbox import Mailbox
from trainbus.eventloop.training.saves import capture, rank_states
from trainbus.hooks import CheckpointHook, DistSamplerSeedHook, EMAHook, PreemptionHook

from . import jobs


def asking(loop: TrainLoop, mount_point: str, rank: int) -> TrainLoop:
    """Have one rank ask for a file at one mount point."""

    def ask(event: Any) -> None:
        if event.run.rank == rank and event.progress.iter >= 3:
            event.run.checkpoints.save("mine.safetensors")

    loop.bus.on(mount_point, ask)
    return loop


def asks_alone(work_dir: str, mount_point: str, rank: int, shard: bool = False) -> None:
    collectives.INTERVAL = 0.0  # as with iterations of 50 ms
    asking(jobs.make_loop(work_dir, epochs=1, shard=shard), mount_point, rank).run()


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize("shard", [False, True])
def test_at_an_epochs_end_rank_0_decides_and_a_request_of_another_rank_alone_is_an_error(ranks, outcomes, tmp_path, shard):
    ranks(asks_alone, str(tmp_path / "first"), "after_train_epoch", 0, shard)
    assert load_whole(tmp_path / "first" / "mine.safetensors")["state_dict"]["0.weight"].shape == (16, 4)
    for one in outcomes(asks_alone, str(tmp_path / "second"), "after_train_epoch", 1, shard):
        assert "rank 1 requests the checkpoint mine.safetensors, but rank 0 does not" in one.error
    assert not list((tmp_path / "second").glob("*.safetensors"))


def asks_between_exchanges(work_dir: str) -> None:
    collectives.PATIENCE = 0.2
    collectives.INTERVAL = 60.0  # as with short iterations
    loop = asking(jobs.make_loop(work_dir, epochs=1), "after_train_iter", 0)
    assert isinstance(loop.model, DistributedDataParallel)
    loop.model = loop.model.module  # whose collective would be what the other waits in
    loop.bus.on("after_train_iter", lambda event: time.sleep(0.1))
    loop.run()


@pytest.mark.long
def test_a_rank_that_waits_for_others_logs_it_until_they_request_the_save(outcomes, tmp_path):
    first, second = outcomes(asks_between_exchanges, str(tmp_path))
    assert "waiting for the other ranks to request this checkpoint" in first.output
    assert "mine.safetensors" in first.output
    assert any("the ranks request different checkpoints" in text for one in (first, second) for text in (one.error, *one.notes))
    assert (first.exitcode, second.exitcode) == (1, 1)


def asks_for_one(folder: str) -> dict[tuple[str, float], list[str]]:
    """Train for each way in which ranks may ask for one save; return the committed files."""
    found: dict[tuple[str, float], list[str]] = {}
    ways = {"rank 0": [3, None], "rank 1": [None, 3], "both": [3, 3], "one after the other": [3, 4], "signals": [3, 4]}
    for (way, iterations), interval in itertools.product(ways.items(), (0.0, 60.0)):
        collectives.INTERVAL = interval  # as with iterations of 50 ms, and with short ones
        loop = jobs.make_loop(f"{folder}/{len(found)}", *[PreemptionHook(exit_code=None)] * (way == "signals"), epochs=2)
        saved = found[way, interval] = []
        loop.bus.on("checkpoint_committed", lambda event, saved=saved: saved.append(Path(event.path).name))
        own = iterations[jobs.rank_and_size()[0]]

        def ask(event: Any, own: int | None = own, way: str = way) -> None:
            if event.progress.iter == own:
                os.kill(os.getpid(), signal.SIGTERM) if way == "signals" else event.run.checkpoints.save()

        loop.bus.on("after_train_iter", ask)
        loop.run()
    return found


@pytest.mark.long
def test_a_save_without_a_name_is_one_save_whichever_ranks_call_it(ranks, tmp_path):
    saved, _ = ranks(asks_for_one, str(tmp_path))
    assert {way: len(names) for way, names in saved.items()} == dict.fromkeys(saved, 1)


def sends_nothing(work_dir: str, waits: float) -> Any:
    """Train one epoch, in which rank 1 does not send its random states; return the warnings and the messages that are left."""
    rank_states._PATIENCE = waits  # type: ignore[misc]
    if jobs.rank_and_size()[0]:
        rank_states.RankStates.put = lambda self, own: None  # type: ignore[method-assign]
    with capture_logs() as logs:
        jobs.make_loop(work_dir, CheckpointHook(1), epochs=1).run()
    return [entry["ranks"] for entry in logs if "random states" in entry["event"]]


@pytest.mark.long
def test_a_rank_that_sends_no_random_states_costs_no_file_and_resumes_with_derived_ones(ranks, tmp_path):
    assert ranks(sends_nothing, str(tmp_path), 0.2) == [["1"], []]
    first, second = load(tmp_path / "epoch_1.safetensors")["ranks"]
    assert first["rng"] is not None
    assert second["rng"] is None
    ranks(sends_nothing, str(tmp_path), 0.2)  # another run


def leaves_messages(work_dir: str, busy: str) -> bool:
    """Return whether a message of a save is left in the store after a training that saves after each iteration."""
    loop = jobs.make_loop(work_dir, CheckpointHook(1, by_epoch=False, busy=busy), epochs=2)
    capture.secrets.token_hex = lambda size: "one"  # type: ignore[assignment]
    loop.run()
    mailbox = Mailbox("saves/1/one")
    return any(mailbox.has(f"{number}/1") for number in range(40))


@pytest.mark.long
@pytest.mark.parametrize("busy", ["wait", "skip", "replace"])
def test_no_message_of_a_save_stays_in_the_store(ranks, tmp_path, busy):
    assert ranks(leaves_messages, str(tmp_path), busy)[0] is False


def finds_a_message(work_dir: str) -> None:
    """Begin with a store that has a message of processes that torchrun has ended; rank 1 sends its own one late."""
    Mailbox("saves/1").put("1/1", packed({"rng": None, "data": None}))
    put = rank_states.RankStates.put

    def late(self: Any, own: Any) -> Any:
        time.sleep(0.5 * jobs.rank_and_size()[0])
        return put(self, own)

    rank_states.RankStates.put = late  # type: ignore[method-assign]
    jobs.make_loop(work_dir, CheckpointHook(1), epochs=1).run()


@pytest.mark.long
def test_a_message_of_processes_before_is_not_taken_for_a_rank_s(ranks, tmp_path):
    ranks(finds_a_message, str(tmp_path))
    assert [one["rng"] is not None for one in load(tmp_path / "epoch_1.safetensors")["ranks"]] == [True, True]


def changes_ranks(work_dir: str) -> None:
    def change(event: Any) -> None:
        event.checkpoint["ranks"] = [{"rng": None, "data": None, "more": torch.zeros(4)}]
        event.checkpoint["after"] = torch.ones(4)

    loop = jobs.make_loop(work_dir, CheckpointHook(1), epochs=1)
    loop.bus.on("before_save_checkpoint", change)
    loop.run()


def test_what_a_hook_puts_in_place_of_the_random_states_is_saved(ranks, tmp_path):
    ranks(changes_ranks, str(tmp_path))
    state = load(tmp_path / "epoch_1.safetensors")
    assert torch.equal(state["after"], torch.ones(4))
    assert torch.equal(state["ranks"][0]["more"], torch.zeros(4))


def saves_by_iterations(work_dir: str, shard: bool) -> None:
    jobs.make_loop(work_dir, CheckpointHook(3, by_epoch=False), shard=shard).run()


@pytest.mark.long
@pytest.mark.parametrize("shard", [False, True])
def test_saves_in_the_middle_of_an_epoch_are_made_by_all_ranks(ranks, tmp_path, shard):
    ranks(saves_by_iterations, str(tmp_path), shard)
    iterations = [3, 6, 9, 12, 15, 16]
    assert {file.name for file in tmp_path.glob("*.safetensors")} == {f"iter_{number}.safetensors" for number in iterations}
    for number in iterations:
        state = load_whole(tmp_path / f"iter_{number}.safetensors")
        assert state["progress"]["iter"] == number
        assert len(state["ranks"]) == 2


def trains(folder: str, part: str, shard: bool = False) -> Any:
    """Train two epochs; ``"half"`` ends after one, and rank 0 writes the state of both; ``"rest"`` goes on from that."""
    model, file = jobs.make_loop(None, dropout=0.3, shard=shard).model, Path(folder, "host.pt")
    optimizer, data, bus = torch.optim.AdamW(model.parameters(), lr=0.01), jobs.loader(shuffle=True), Bus()
    bus.add(EMAHook(), DistSamplerSeedHook())
    with Run(bus, model=model, optimizer=optimizer, seed=5) as run:
        torch.rand(run.rank)  # the ranks draw different numbers from here on
        if part == "rest":
            run.checkpoints.apply_state(torch.load(file, weights_only=True))
        for _ in run.epochs(2):
            for batch in run.train(data):
                optimizer.zero_grad()
                jobs.step(model, batch).backward()
                optimizer.step()
            if part == "half":
                checkpoint: dict[str, Any] = {}
                run.checkpoints.gather_state(checkpoint)
                if not run.rank:
                    torch.save(checkpoint, file)
                break
    return [value.tolist() for value in jobs.weights(model).values()], torch.rand(3).tolist()


@pytest.mark.long
def test_every_rank_resumes_bitwise_from_the_state_of_rank_0(ranks, tmp_path):
    whole = ranks(trains, str(tmp_path), "whole")
    ranks(trains, str(tmp_path), "half")
    assert len(torch.load(tmp_path / "host.pt", weights_only=True)["trainbus"]["ranks"]) == 2
    assert ranks(trains, str(tmp_path), "rest") == whole
    assert whole[0][0] == whole[1][0]
    assert whole[0][1] != whole[1][1]


def refused(folder: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        trains(folder, "half", shard=True)
    return str(caught.value)


def test_a_sharded_model_is_an_error_with_advice(ranks, tmp_path):
    for message in ranks(refused, str(tmp_path)):
        assert "does not support sharded models" in message
        assert "run.checkpoints.save()" in message
