"""A training job for ``test_stopped.py``, and a server that forks a process for each run of it: torch is imported once.

The answer to an order says how the run ended. What a run leaves is a digest of all that its weights, optimizer, averages,
schedules and random states are.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import signal
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

from eventloop import Bus, SeededDataset, TrainLoop
from hooks import (
    CheckpointHook,
    EarlyStoppingHook,
    EMAHook,
    OptimizerHook,
    ParamSchedulerHook,
    PreemptionHook,
)

from ..scripts import start_processes_by_default

SAMPLES, BATCH = 22, 4  # an epoch is six iterations, the last one with half a batch: three windows of two


class Augmented(Dataset):
    """Draws from all three global generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(5) + np.random.rand() + random.random()
        return torch.linspace(-1, 1, 5) * index / SAMPLES + noise, index % 3


def model_step(model: nn.Module, batch: Any) -> Any:
    return {"loss": cross_entropy(model(batch[0]), batch[1]), "noise": torch.rand(()) + random.random() + np.random.rand()}


def make_loop(
    work_dir: str | None, *, workers: int = 0, by_iter: bool = False, patience: int = 9, saving: dict | None = None
) -> TrainLoop:
    """Everything at once: whatever a resumed run forgets shows in the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedules = torch.optim.lr_scheduler
    bus = Bus()
    bus.add(
        OptimizerHook(accumulate=2),
        EMAHook(momentum=0.1),
        ParamSchedulerHook(schedules.StepLR(optimizer, 1, 0.8), by="epoch"),
        # The metric is random: what a validation draws must be what it would have drawn, once.
        ParamSchedulerHook(schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0), by="metric", monitor="noise"),
        EarlyStoppingHook("noise", rule="less", min_delta=0.05, patience=patience),
        PreemptionHook([signal.SIGTERM]),
    )
    if saving is not None:
        bus.add(CheckpointHook(by_epoch=False, max_keep_ckpts=2, save_best="loss", **saving))
    length = {"max_iters": 20, "val_interval": 5} if by_iter else {"max_epochs": 4}
    return TrainLoop(
        model,
        optimizer,
        step=model_step,
        train_data=DataLoader(SeededDataset(Augmented(), seed=3), batch_size=BATCH, shuffle=True, num_workers=workers),
        val_data=DataLoader(TensorDataset(torch.randn(8, 5), torch.arange(8) % 3), batch_size=4, shuffle=True),
        bus=bus,
        work_dir=work_dir,
        seed=5,
        **length,
    )


def end_at(loop: TrainLoop, mount_point: str, count: int, how: str) -> None:
    """End the run when ``mount_point`` is published for the ``count``-th time."""
    heard = []

    def strike(event: Any) -> None:
        heard.append(event)
        if len(heard) != count:
            return
        if how == "clean":
            event.run.checkpoint_now()
            event.run.stop()
        else:
            if how == "SIGKILL":
                event.run.wait_for_saves()  # so that there is something to go on from
            os.kill(os.getpid(), signal.Signals[how])

    loop.bus.on(mount_point, strike, priority=95)


def digest(*things: Any) -> str:
    found = hashlib.sha256()

    def take(thing: Any) -> None:
        if isinstance(thing, torch.Tensor):
            found.update(f"{thing.dtype}{tuple(thing.shape)}".encode() + thing.numpy(force=True).tobytes())
        elif isinstance(thing, dict):
            for key in sorted(thing, key=repr):
                found.update(repr(key).encode())
                take(thing[key])
        elif isinstance(thing, list | tuple):
            for one in thing:
                take(one)
        else:
            found.update(repr(thing).encode())

    take(things)
    return found.hexdigest()


def run(
    work_dir: str, *, resume: bool = False, end: list | None = None, kill_after: float = 0, **options: Any
) -> dict[str, Any]:
    """One life of the job; the parent kills it where ``kill_after`` seconds are given."""
    start = time.perf_counter()
    loop = make_loop(work_dir, **options)
    began, optimizers = [], []
    loop.bus.on("before_train", lambda event: began.append(event.progress.iter))
    loop.bus.on("after_run", lambda event: optimizers.append(event.run.optimizers["optimizer"].state_dict()))
    if end is not None:
        end_at(loop, *end)
    loop.run(resume="auto" if resume else None)
    random_states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    saved = loop.bus.state_dict()["hooks"]
    hooks = {name: saved[name] for name in saved if not name.startswith("CheckpointHook")}
    state = digest(loop.model.state_dict(), optimizers[0], hooks, random_states)
    return {"began": began[0], "ended": loop.counters.iter, "digest": state, "seconds": time.perf_counter() - start}


def serve(orders: Connection) -> None:
    """Answer orders until the other end is closed."""
    start_processes_by_default()
    torch.set_num_threads(1)
    make_loop(None).run()  # imports all that is imported late
    gc.freeze()
    while True:
        try:
            order = orders.recv()
        except EOFError:
            return
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            live(order, writing)
        os.close(writing)
        if order.get("kill_after"):
            time.sleep(order["kill_after"])
            os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status < 0:
            end_group(pid)
        with os.fdopen(reading, "rb") as answer:
            said = answer.read()
        orders.send({"status": status, **json.loads(said or b"{}")})


def end_group(pid: int) -> None:
    """End the workers of a loader, which would notice the end of their parent only after seconds."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def live(order: dict[str, Any], writing: int) -> None:
    os.setsid()
    try:
        os.write(writing, json.dumps(run(**order)).encode())
        status = 0
    except BaseException:  # noqa: BLE001 - the test hears of it
        os.write(writing, json.dumps({"error": traceback.format_exc()}).encode())
        status = 1
    os._exit(status)
