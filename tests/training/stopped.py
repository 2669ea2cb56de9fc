"""A training job for ``test_stopped.py``, which runs it in processes of their own."""

import os
import random
import signal
import time
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainbus.eventloop import Bus, SeededDataset, TrainLoop
from trainbus.hooks import CheckpointHook, EarlyStoppingHook, EMAHook, OptimizerHook, ParamSchedulerHook, PreemptionHook

from .conftest import act_at
from .saves.jobs import Augmented, step


def make_loop(
    work_dir: str | None, *, workers: int = 0, by_iter: bool = False, patience: int = 9, saving: dict | None = None
) -> TrainLoop:
    """Everything at once: whatever a resumed run forgets shows in the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedules = torch.optim.lr_scheduler
    by, steps = ("iter", 6) if by_iter else ("epoch", 1)
    bus = Bus(
        OptimizerHook(accumulate=2),
        EMAHook(momentum=0.1),
        ParamSchedulerHook(schedules.StepLR(optimizer, steps, 0.8), by=by),
        # The metric is random: what a validation draws must be what it would have drawn, once.
        ParamSchedulerHook(schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0), by="metric", monitor="noise"),
        EarlyStoppingHook("noise", rule="less", min_delta=0.05, patience=patience),
        PreemptionHook([signal.SIGTERM]),
    )
    if saving is not None:
        bus.add(CheckpointHook(by_epoch=False, max_keep_ckpts=2, save_best="loss", **saving))
    length = {"max_iters": 20, "val_interval": 5} if by_iter else {"max_epochs": 4}
    # An epoch is six iterations, the last one with half a batch: three windows of two.
    data = DataLoader(SeededDataset(Augmented(), seed=3), batch_size=4, shuffle=True, num_workers=workers)
    val_data = DataLoader(TensorDataset(torch.randn(8, 4), torch.arange(8) % 3), batch_size=4, shuffle=True)
    options = {"train_data": data, "val_data": val_data, "work_dir": work_dir, "seed": 5, **length}
    return TrainLoop(model, optimizer, step=step, bus=bus, **options)


def end_at(loop: TrainLoop, mount_point: str, count: int, how: str) -> None:
    """End the run when ``mount_point`` is published for the ``count``-th time."""

    def strike(event: Any) -> None:
        if how == "clean":
            event.run.checkpoints.save()
            event.run.stop()
        else:
            if how == "SIGKILL":
                event.run.checkpoints.wait()  # so that there is something to go on from
            os.kill(os.getpid(), signal.Signals[how])

    act_at(loop.bus, mount_point, count, strike)


def run(
    work_dir: str, answer: str, *, resume: bool = False, end: list | None = None, kill_after: float = 0, **options: Any
) -> None:
    """One life of the job, and how it ended in the file ``answer``; it is killed ``kill_after`` seconds, if not 0."""
    os.setsid()  # its group has the workers of its loader, too
    signal.setitimer(signal.ITIMER_REAL, kill_after)  # without a handler the process ends at once, as by SIGKILL
    start = time.perf_counter()
    loop = make_loop(work_dir, **options)
    began, optimizers = [], []
    loop.bus.on("before_train", lambda event: began.append(event.progress.iter))
    loop.bus.on("after_run", lambda event: optimizers.append(event.run.optimizers["optimizer"].state_dict()))
    if end is not None:
        end_at(loop, *end)
    loop.run(resume="auto" if resume else None)
    signal.setitimer(signal.ITIMER_REAL, 0)
    random_states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    saved = loop.bus.state_dict()["hooks"]
    hooks = {name: saved[name] for name in saved if not name.startswith("CheckpointHook")}
    state = loop.model.state_dict(), optimizers[0], hooks, random_states
    found = {"began": began[0], "ended": loop.counters.iter, "state": state, "seconds": time.perf_counter() - start}
    torch.save(found, answer)
