"""The training that ``ray_train.py`` strikes, in workers of Ray: with trainbus, and as Ray's documentation writes it.

Both train the model of ``elastic_job.py``, whose weights after some iterations are the same bits for any history of failures.
"""

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import ray.train
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.elastic_job import GLOBAL_BATCH, SAMPLES, Sums, make_features, make_optimizer, step
from trainbus import Bus, CheckpointHook, GlobalBatchSampler, Hook, RayTrainHook, Run

PADDING = 4_000_000  # numbers that are not trained, so that a checkpoint has 32 MB
SECONDS = 0.05  # of an iteration, at least
INTERVAL = 50  # iterations between saves: Ray takes a report each 2 s


class Log:
    """Lines of JSON in a file of this process. Each is there as soon as it is written, also if the process is killed."""

    def __init__(self, place: str) -> None:
        self.finish = Path(place) / "finish"
        """When this file is there, the training ends."""
        self._always = {"rank": ray.train.get_context().get_world_rank(), "pid": os.getpid()}
        self._file = os.open(f"{place}/{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self.tell(started=True)

    def tell(self, **line: Any) -> None:
        os.write(self._file, json.dumps({"at": time.time(), **self._always, **line}).encode() + b"\n")


class Teller(Hook):
    """Log where a training begins, and its saves; end it when it is time."""

    observes = True

    def __init__(self, log: Log) -> None:
        self._log = log

    def before_train(self, event: Any) -> None:
        self._log.tell(begins=event.progress.iter)

    def after_train_epoch(self, event: Any) -> None:
        if self._log.finish.exists():
            event.run.stop("it was struck often enough")

    def checkpoint_committed(self, event: Any) -> None:
        self._log.tell(committed=event.progress.iter, path=event.path)


def with_trainbus(config: dict[str, Any]) -> None:
    log, model = Log(config["log"]), DistributedDataParallel(Sums(PADDING))
    torch.set_num_threads(1)
    optimizer = make_optimizer(model)
    data = TensorDataset(torch.arange(SAMPLES), make_features())
    loader = DataLoader(data, batch_sampler=GlobalBatchSampler(data, GLOBAL_BATCH, seed=1))
    bus = Bus(CheckpointHook(INTERVAL, by_epoch=False), RayTrainHook(), Teller(log))
    bus.timing = True
    with Run(bus, model=model, optimizer=optimizer, resume="auto", seed=1) as run:
        for _ in run.epochs(1_000_000):
            for batch in run.train(loader):
                loss = step(model, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.report(loss=loss)
                time.sleep(SECONDS)
                log.tell(done=run.progress.iter + 1)
    log.tell(handlers={part.name: [part.mean, part.p99] for part in bus.costs().parts if "RayTrainHook" in part.name})


def as_ray_documents(config: dict[str, Any]) -> None:
    log, model, done = Log(config["log"]), DistributedDataParallel(Sums(PADDING)), 0
    torch.set_num_threads(1)
    optimizer = make_optimizer(model)
    if (known := ray.train.get_checkpoint()) is not None:
        with known.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["done"]
    log.tell(begins=done)
    rank, share, features = ray.train.get_context().get_world_rank(), GLOBAL_BATCH // 2, make_features()
    ends = torch.zeros(1)
    while not ends:
        rows = [(done * GLOBAL_BATCH + rank * share + number) % SAMPLES for number in range(share)]
        loss = step(model, [torch.tensor(rows), features[rows]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(SECONDS)
        done += 1
        log.tell(done=done)
        if done % INTERVAL == 0:
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = None
                if not rank:
                    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "done": done}
                    torch.save(state, Path(folder) / "state.pt")
                    checkpoint = ray.train.Checkpoint.from_directory(folder)
                ray.train.report({"loss": loss.item(), "iter": done}, checkpoint=checkpoint)
            log.tell(committed=done)
            ends.fill_(log.finish.exists())
            distributed.broadcast(ends, 0)
