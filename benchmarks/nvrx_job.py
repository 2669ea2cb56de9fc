"""The training that ``nvrx.py`` strikes, under ``ft_launcher``: with trainbus, and as NVRx's own example writes it.

    ft_launcher ... -m benchmarks.nvrx_job trainbus|example FOLDER

Files in the folder strike it: ``hang`` has the training thread hang, ``slow`` makes the disk so slow that the next save takes
:data:`SLOW` seconds, ``finish`` ends the training. The example sends a heartbeat after each iteration, and saves with
``torch.save`` on the training thread.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from trainbus import Bus, CheckpointHook, HeartbeatHook, Hook, Run
from trainbus.eventloop.checkpoint import commit

COLUMNS = 64
PADDING = 4_000_000  # numbers that are not trained, so that a checkpoint has 32 MB
EPOCH = 100  # iterations
INTERVAL = 50  # iterations between saves
SECONDS = 0.02  # of an iteration, at least
KEPT = 3
SLOW = 8.0


class Model(nn.Module):
    """Add the columns of each sample, weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(COLUMNS, dtype=torch.float64))
        self.register_buffer("padding", torch.zeros(PADDING, dtype=torch.float64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.weights


def make() -> tuple[Model, torch.optim.Optimizer, list[torch.Tensor]]:
    """Return a model, its optimizer, and the batches of an epoch."""
    model, generator = Model(), torch.Generator().manual_seed(0)
    data = [torch.randint(-8, 8, (16, COLUMNS), generator=generator).double() for _ in range(EPOCH)]
    return model, torch.optim.SGD(model.parameters(), lr=2**-10, momentum=0.9), data


class Job:
    """What strikes the training, and a log of it: lines of JSON, each of which is there as soon as it is written."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._log = os.open(place / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._slow = False

    def tell(self, **line: Any) -> None:
        os.write(self._log, json.dumps({"at": time.time(), "pid": os.getpid(), **line}).encode() + b"\n")

    @property
    def finished(self) -> bool:
        return (self._place / "finish").exists()

    def end_iteration(self, done: int) -> None:
        time.sleep(SECONDS)
        self.tell(done=done)
        if self._takes("hang"):
            self.tell(hangs=done)
            time.sleep(3600)

    def begin_save(self) -> None:
        self._slow = self._takes("slow")
        if self._slow:
            self.tell(slow=True)

    def write(self, write: Callable[[Any], int], data: Any) -> int:
        """Write a part of a checkpoint."""
        if self._slow:
            time.sleep(SLOW * len(data) / (8 * PADDING))
        return write(data)

    def _takes(self, strike: str) -> bool:
        try:
            (self._place / strike).unlink()
        except FileNotFoundError:
            return False
        return True


class Teller(Hook):
    """Log where a training begins, and its saves."""

    observes = True

    def __init__(self, job: Job) -> None:
        self._job = job

    def before_train(self, event: Any) -> None:
        self._job.tell(begins=event.progress.iter)

    def checkpoint_staged(self, event: Any) -> None:
        self._job.begin_save()

    def checkpoint_committed(self, event: Any) -> None:
        self._job.tell(committed=event.progress.iter, stall=event.stall)


def with_trainbus(job: Job, place: Path) -> None:
    write = os.write

    def slow_write(descriptor: int, data: Any) -> int:
        # Of checkpoints: lines of the log are smaller.
        return job.write(partial(write, descriptor), data) if len(data) >= commit.CHUNK // 2 else write(descriptor, data)

    os.write = slow_write
    model, optimizer, data = make()
    bus = Bus(CheckpointHook(INTERVAL, by_epoch=False, max_keep_ckpts=KEPT), HeartbeatHook(), Teller(job))
    bus.timing = True
    with Run(bus, model=model, optimizer=optimizer, work_dir=place / "runs", resume="auto", seed=1) as run:
        for _ in run.epochs(1_000_000):
            for rows in run.train(data):
                loss = model(rows).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                job.end_iteration(run.progress.iter + 1)
            if job.finished:
                run.stop("it was struck often enough")
    (cost,) = [part for part in bus.costs().parts if part.name == "HeartbeatHook.move"]  # what an iteration calls
    job.tell(heartbeats=[cost.mean, cost.p99])


def as_the_example(job: Job, place: Path) -> None:
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

    client, path = RankMonitorClient(), place / "checkpoint.pt"
    model, optimizer, data = make()
    done, times = 0, []
    client.init_workload_monitoring()
    if path.exists():
        try:
            state = torch.load(path)
        except Exception as error:  # noqa: BLE001 - the example fails here at each start; a person then removes the file
            job.tell(damaged=str(error))
        else:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            done = state["done"]
    job.tell(begins=done)
    while not (job.finished and done % EPOCH == 0):
        loss = model(data[done % EPOCH]).sum()
        optimizer.zero_grad()
        loss.backward()
        begin = time.perf_counter()
        client.send_heartbeat()
        times.append(time.perf_counter() - begin)
        optimizer.step()
        done += 1
        job.end_iteration(done)
        if done % INTERVAL == 0:
            begin = time.perf_counter()
            job.begin_save()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": done}
            with path.open("wb") as file:  # as torch.save(state, path), on a disk that can be slow
                file.write = partial(job.write, file.write)  # type: ignore[method-assign]
                torch.save(state, file)
            job.tell(committed=done, stall=time.perf_counter() - begin)
    client.shutdown_workload_monitoring()
    job.tell(heartbeats=[statistics.mean(times), statistics.quantiles(times, n=100)[98]])


if __name__ == "__main__":
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    folder = Path(sys.argv[2])
    {"trainbus": with_trainbus, "example": as_the_example}[sys.argv[1]](Job(folder), folder)
    distributed.destroy_process_group()
