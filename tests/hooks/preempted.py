"""A training job for ``test_preemption.py``.

At the mount point ``at`` (the first time in or after iteration ``iteration``) the run prints ``here`` and waits for a line on
its standard input, ``times`` times; so its parent decides what happens in between.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from trainbus.eventloop import Bus, RunPreempted, TrainLoop
from trainbus.hooks import EMAHook, ParamSchedulerHook, PreemptionHook, preemption

ITERATIONS = 20  # 4 epochs of 5


def make_loop(work_dir: Path | None, *hooks: Any, **workers: Any) -> TrainLoop:
    """A job that draws random numbers in every corner: shuffling, dropout, running statistics, averages, a schedule.

    Args:
        work_dir: of the run.
        hooks: beside its own.
        workers: options of its DataLoaders.
    """
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(20, 3), torch.randint(0, 2, (20,)))
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=ITERATIONS)
    bus = Bus(EMAHook(momentum=0.1), ParamSchedulerHook(schedule, by="iter"), *hooks)
    train, val = DataLoader(data, batch_size=4, shuffle=True, **workers), DataLoader(data, batch_size=4, **workers)
    options = {"train_data": train, "val_data": val, "max_epochs": 4, "work_dir": work_dir, "seed": 0, "sanity": 0}
    return TrainLoop(model, optimizer, step=lambda model, batch: cross_entropy(model(batch[0]), batch[1]), bus=bus, **options)


def main(
    work_dir: str | None,
    signals: list[int],
    at: str = "before_forward",
    iteration: int = 8,
    times: int = 1,
    workers: dict[str, Any] | None = None,
    early: bool = False,
    moment: float = 60.0,
    late: str = "",
    hold: str = "",
    held: int = 0,
) -> None:
    os.setsid()
    if hold:
        forks: list[None] = []
        os.register_at_fork(
            before=lambda: forks.append(None),
            after_in_child=lambda: _wait_for(Path(hold)) if len(forks) == held else None,
        )
    torch.set_num_threads(1)
    preemption._ONE_REQUEST = moment
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins with SIGINT ignored
    signal.signal(signal.SIGUSR1, lambda number, frame: say("the handler from before"))
    hook = PreemptionHook(signals)
    if early:
        workers = {**(workers or {}), "worker_init_fn": hook.worker_init_fn}
    loop = make_loop(None if work_dir is None else Path(work_dir), hook, **(workers or {}))
    if early:
        next(iter(loop._data["train"]))

    @loop.bus.on(at, once=iteration)
    def wait_here(event: Any) -> None:
        for _ in range(times):
            say("here")
            sys.stdin.readline()
            wait([worker.sentinel for worker in multiprocessing.active_children()], 0.2)  # for one that does not outlive it

    def wait_once() -> None:
        say("here")
        sys.stdin.readline()

    if late == "atexit":
        atexit.register(wait_once)
    loop.bus.on("after_run", lambda event: say(event.run.info.get("stop_reason", "by itself")))
    try:
        loop.run()
    except RunPreempted:
        say(f"{loop.counters.iter} iterations")
        signal.raise_signal(signal.SIGUSR1)
        if late == "except":
            wait_once()
        raise


def _wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
