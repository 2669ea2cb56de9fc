"""A training with a slow hook, a leaking hook, a full lane, slow data and a slow disk: each is named, with its figure.

The faults are large, and the bounds are wide, so that a busy machine does not hide them. A sleep takes at least as long as
asked, so lower bounds are sharp.
"""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trainbus.eventloop import Hook, mount
from trainbus.hooks import CheckpointHook
from trainbus.observe import Costs, Part, RunFolder, RunRecordHook, expensive
from trainbus.observe.report import ReportedRun, verdict
from trainbus.observe.verdict import held_up

from ..hooks.conftest import batches, make_loop

pytestmark = pytest.mark.long

ITERATIONS = 350
DATA, HOOK, LANE, DISK = 0.008, 0.005, 0.025, 0.3
"""Seconds of a batch, of a call of the slow hook, of an event in the lane, and of an fsync."""
KEPT = 200_000
"""Bytes that the leaking hook keeps each iteration."""


class SlowData:
    def __len__(self) -> int:
        return ITERATIONS

    def __iter__(self) -> Iterator[Any]:
        for index in range(ITERATIONS):
            time.sleep(DATA)
            yield batches(1, seed=index)[0]


class Histograms(Hook):
    """Slow."""

    def after_train_iter(self, event: Any) -> None:
        time.sleep(HOOK)


class Keeper(Hook):
    """Leaks."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def after_train_iter(self, event: Any) -> None:
        self.kept.append((bytearray(KEPT // 2), torch.zeros(KEPT // 2, dtype=torch.uint8)))


class Uploader(Hook):
    """Slower than its events come."""

    @mount(offload="thread", queue=8)
    def after_train_iter(self, event: Any) -> None:
        time.sleep(LANE)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Costs, Path]:
    folder = tmp_path_factory.mktemp("run")
    checkpoints = CheckpointHook(interval=50, by_epoch=False, max_keep_ckpts=1)
    found = (Histograms(), Keeper(), Uploader(), checkpoints, RunRecordHook())
    loop = make_loop(*found, train_data=SlowData(), max_epochs=1, work_dir=folder)
    fsync = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(DISK)
        fsync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", slow)
        loop.run()
    return loop.bus.costs(), folder


def the_part(costs: Costs, name: str) -> Part:
    [part] = [one for one in costs.parts if name in one.name]
    return part


def figure(sentences: list[str], pattern: str) -> float:
    """Return the number in the one sentence that matches."""
    [found] = [match for match in (re.search(pattern, sentence) for sentence in sentences) if match]
    return float(found[1])


def about(expected: float) -> Any:
    """Not less, because it was slept; up to three times as much, on a busy machine."""
    return pytest.approx(2 * expected, rel=0.525)


def test_slow_data_is_the_time_of_waiting_for_it(trained):
    costs, _ = trained
    assert the_part(costs, "waiting for data").seconds / ITERATIONS == about(DATA)
    assert costs.steps.quantile(0.5) >= DATA


def test_the_slow_hook_has_its_calls_and_their_time(trained):
    part = the_part(trained[0], "Histograms")
    assert (part.mount_point, part.calls) == ("after_train_iter", ITERATIONS)
    assert part.mean == about(HOOK)
    assert part.seconds == about(ITERATIONS * HOOK)


def test_the_full_lane_has_the_time_of_its_handler_and_of_waiting_for_it(trained):
    costs, _ = trained
    [lane] = [one for one in costs.lanes if "Uploader" in one.name]
    assert (lane.delivered, lane.dropped, lane.depth_max) == (ITERATIONS, 0, 8)
    assert lane.seconds == about(ITERATIONS * LANE)
    assert 0.1 * lane.seconds < lane.waited < costs.wall
    [waiting] = [one for one in costs.parts if one.group == "waiting"]
    assert "Uploader" in waiting.name
    assert waiting.seconds == pytest.approx(lane.waited, rel=1e-6)
    assert waiting.calls >= 1
    assert "waiting for the full lane of Uploader" in str(costs)


def test_the_slow_disk_is_in_the_checkpoints_and_in_what_training_waited_for_them(trained):
    costs, folder = trained
    written = [line for line in RunFolder(folder).record() if line["kind"] == "checkpoint"]
    assert len(written) == ITERATIONS // 50
    assert all(line["seconds"] >= 2 * DISK for line in written)  # the file, and its folder
    waited = sum(part.seconds for part in costs.parts if part.name in ("waiting for checkpoints", "copying for checkpoints"))
    stalls, last = sum(line["stall"] for line in written), written[-1]["seconds"]  # the end of the run waits for the last one
    assert 0.9 * stalls <= waited <= 1.1 * (stalls + last)
    assert stalls > 2 * DISK


def test_the_leaking_hook_is_named_with_what_it_keeps(trained):
    growth = {one.name: one for one in trained[0].growth}
    assert growth["Keeper"].bytes / growth["Keeper"].iterations == pytest.approx(KEPT, rel=0.2)
    assert growth["process"].bytes / growth["process"].iterations > 0.5 * KEPT
    assert growth.keys() <= {"Keeper", "process"}


def test_the_parts_add_up_to_the_wall_time(trained):
    costs, _ = trained
    assert sum(part.seconds for part in costs.parts) == pytest.approx(costs.wall, rel=1e-6)


def test_the_report_names_all_five_with_the_right_figures(trained):
    costs, folder = trained
    told = verdict(ReportedRun(folder), lambda metrics: None)
    assert figure(told, r"% of the time is waiting for data: ([\d.]+) ms an iteration") / 1e3 == about(DATA)
    assert figure(told, r"Histograms takes .*: ([\d.]+) ms an iteration") / 1e3 == about(HOOK)
    assert figure(told, r"full lane of Uploader: its handler takes ([\d.]+) ms an event") / 1e3 == about(LANE)
    assert figure(told, r"Keeper keeps ([\d.]+) kB more each iteration") * 1e3 == pytest.approx(KEPT, rel=0.2)
    stall = sum(line["stall"] for line in RunFolder(folder).record() if line["kind"] == "checkpoint")
    held = r"Checkpoints hold training up .* \(([\d.]+) s, mostly because the one before was still being written\)"
    seconds = held_up(costs)  # with what the training waited for beside the copies
    assert stall <= seconds
    assert figure(told, held) == pytest.approx(seconds, rel=0.1)


def test_the_three_most_expensive_of_them_end_the_run(trained):
    assert len(expensive(trained[0])) == 3
