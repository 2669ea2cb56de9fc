"""The ranks tell each other what they spend their time on, and the straggler gets a name."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from trainbus.observe import AlertHook, RankCosts, RunFolder, RunRecordHook, exchange

from ..webhooks import Server
from . import jobs

RANKS = (0, 1, 2, 3)
WITHOUT_VALIDATION = dict.fromkeys(("val_data", "val_step", "metrics"))
ENOUGH = 4000  # iterations: more than any of these trainings makes before it is stopped


class Data:
    """Batches without end, each after a while."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(ENOUGH):
            time.sleep(self.seconds)
            yield torch.zeros(2, 4), torch.zeros(2, 1)


class Histograms:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, event: Any) -> None:
        time.sleep(self.seconds)


def slow_step(seconds: float, *, apart: bool) -> Any:
    def step(model: Any, batch: Any) -> torch.Tensor:
        time.sleep(seconds)
        return jobs.step(model.module if apart else model, batch)

    return step


def train(
    slow: dict[str, int],
    until: int = ENOUGH,
    timing: tuple[int, ...] = RANKS,
    period: float = 0.4,
    work_dir: str | None = None,
    apart: bool = False,
) -> Any:
    """Train until ``ranks_measured`` has come with a straggler twice, or ``until`` times.

    ``slow`` has the rank that is slow at each part; ranks that are ``apart`` exchange no gradients. Returns what the event had,
    the costs, and the warnings.
    """
    exchange.PERIOD = period  # type: ignore[misc]  # of this process, which ends after this
    rank, size = jobs.rank_and_size()
    took = {part: 0.05 if slow.get(part) == rank else 0.002 for part in ("data", "hook", "step")}
    hooks = [] if work_dir is None else [RunRecordHook(costs=rank in timing)]
    loop = jobs.make_loop(
        work_dir, *hooks, train_data=Data(took["data"]), step=slow_step(took["step"], apart=apart), **WITHOUT_VALIDATION
    )
    loop.bus.timing = rank in timing
    loop.bus.on("after_train_iter", Histograms(took["hook"]))
    measured: list[RankCosts] = []

    def hear(event: Any) -> None:
        measured.append(event.ranks)
        named = [one for one in measured if one.straggler is not None]
        if len(named) == 2 or len(measured) == until:  # the other ranks hear of it a moment after rank 0
            loop.stop()

    loop.bus.on("ranks_measured", hear)
    if len(timing) == 1 or size == 1:  # there will be no such event
        loop.bus.on("after_train_iter", lambda event: loop.stop(), after=80)
    with capture_logs() as logs:
        loop.run()
    told = [line["event"] for line in logs if line["log_level"] == "warning"]
    warnings = [one for one in told if "has no work dir" not in one]  # nor has it any in most of these tests
    return measured, loop.bus.costs() if loop.bus.timing else None, warnings


@pytest.mark.long
def test_a_straggler_among_four_ranks_is_named_with_what_it_is_slow_at(ranks):
    found = ranks(train, {"data": 2}, ENOUGH, RANKS, 1.0, size=4)
    for measured, costs, _ in found:
        told = next(one.straggler for one in measured if one.straggler is not None)
        assert (told.rank, told.host, told.name) == (2, socket.gethostname(), "waiting for data")
        assert told.seconds > 0.04 > 0.02 > told.others
        assert "waiting for data" in [one.name for one in costs.ranks.times if one.rank == 2]
        assert "rank 2" in str(costs)
    warnings = [one for _, _, warnings in found for one in warnings]
    assert len(warnings) == 1
    assert f"the other ranks wait for rank 2 on {socket.gethostname()}" in warnings[0]
    assert "waiting for data takes" in warnings[0]


@pytest.mark.long
def test_the_rank_that_waits_for_another_at_an_agreement_is_not_the_straggler(ranks):
    """Without gradients to exchange, the ranks meet where they agree whether to stop, at the end of an iteration."""
    for measured, costs, _ in ranks(train, {"step": 1}, ENOUGH, RANKS, 0.4, None, True):
        told = next(one.straggler for one in measured if one.straggler is not None)
        assert (told.rank, told.name) == (1, "forward")
        assert "waiting for the other ranks" in [one.name for one in costs.parts]


@pytest.mark.long
@pytest.mark.parametrize("part", ["hook", "step"])
def test_a_straggler_in_a_hook_or_in_the_step_is_named(ranks, tmp_path, part):
    first, second = ranks(train, {part: 1}, ENOUGH, RANKS, 0.4, str(tmp_path / "run"))
    names = {"hook": "Histograms", "step": "forward"}
    for measured, _, _ in (first, second):
        told = next(one.straggler for one in measured if one.straggler is not None)
        assert told.rank == 1
        assert names[part] in told.name
    assert len(first[2]) == 1
    assert second[2] == []
    lines = list(RunFolder(tmp_path / "run").record())
    [line] = [one for one in lines if one["kind"] == "ranks"]
    assert (line["straggler"]["rank"], line["world_size"]) == (1, 2)
    assert lines[-2]["kind"] == "costs"
    assert lines[-2]["ranks"]["straggler"]["rank"] == 1


def train_until_told(url: str) -> None:
    exchange.PERIOD = 0.4  # type: ignore[misc]  # of this process, which ends after this
    rank, _ = jobs.rank_and_size()
    step = slow_step(0.05 if rank else 0.002, apart=False)
    loop = jobs.make_loop(None, AlertHook(url, "slow_rank"), train_data=Data(0.002), step=step, **WITHOUT_VALIDATION)
    loop.bus.on("ranks_measured", lambda event: loop.stop() if event.ranks.straggler is not None else None)
    loop.run()


@pytest.mark.long
def test_a_webhook_is_told_of_the_slow_rank(ranks):
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        ranks(train_until_told, server.url)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    [alert] = [one for one in server.got if one["kind"] == "slow_rank"]
    assert f"rank 1 ({socket.gethostname()}): forward takes" in alert["message"]


def test_the_event_and_the_costs_have_all_ranks_also_without_a_straggler(ranks):
    for measured, costs, _ in ranks(train, {}, 3, RANKS, 0.2):
        assert len(measured) >= 2
        for one in (measured[-1], costs.ranks):
            assert (one.world_size, one.missing) == (2, [])
            assert one.times[0].name == "iteration"
            assert {"waiting for data", "forward", "backward"} < {part.name for part in one.times}
            assert all(part.min <= part.median <= part.max for part in one.times)
        assert costs.ranks.iterations > measured[0].iterations > 0


@pytest.mark.long
@pytest.mark.parametrize("timing", [(0,), (1,)])
def test_with_one_rank_that_measures_nothing_is_compared(ranks, timing):
    for rank, (measured, costs, warnings) in enumerate(ranks(train, {}, 3, timing, 0.1)):
        assert (measured, warnings) == ([], [])
        assert (costs is not None) == (rank in timing)
        assert costs is None or costs.ranks is None
    [(measured, costs, _)] = ranks(train, {}, 3, RANKS, 0.1, size=1)
    assert (measured, costs.ranks) == ([], None)
    assert "ranks" not in str(costs)


def measured() -> Any:
    """Make a loop that measures, and tells the other ranks often."""
    exchange.PERIOD = 0.2  # type: ignore[misc]
    loop = jobs.make_loop(None, train_data=Data(0.002), **WITHOUT_VALIDATION)
    loop.bus.timing = True
    return loop


def dies(at: int) -> None:
    """Train until a rank kills itself."""
    loop = measured()
    if jobs.rank_and_size()[0] == at:
        loop.bus.on("ranks_measured", lambda event: os.kill(os.getpid(), signal.SIGKILL))
    loop.run()


@pytest.mark.long
@pytest.mark.parametrize("at", [0, 1])
def test_a_rank_that_dies_does_not_hang_the_others(outcomes, at):
    found = outcomes(dies, at, group_timeout=20)
    assert found[at].exitcode == -signal.SIGKILL
    assert found[1 - at].exitcode == 1
    assert "RuntimeError" in found[1 - at].error


def hangs(folder: str) -> list[str]:
    """Train until rank 1 was stopped like a process that hangs, and rank 0 has said so."""
    rank, _ = jobs.rank_and_size()
    loop, file = measured(), Path(folder) / "pid"

    def hang(event: Any) -> None:
        if rank == 1 and not file.exists():
            file.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)

    def wake() -> None:
        while not [line for line in logs if line.get("id") == "silent-rank"]:
            time.sleep(0.02)
        os.kill(int(file.read_text()), signal.SIGCONT)
        loop.stop()

    loop.bus.on("ranks_measured", hang)
    with capture_logs() as logs:
        if rank == 0:
            threading.Thread(target=wake, daemon=True).start()
        loop.run()
    return [line["event"] for line in logs]


@pytest.mark.long
def test_a_rank_that_hangs_is_named(ranks, tmp_path):
    first, _ = ranks(hangs, str(tmp_path))
    [told] = [line for line in first if "has not reported" in line]
    assert told.startswith(f"rank 1 on {socket.gethostname()}")
