"""The training that ``elastic.py`` strikes. Its weights after some epochs are the same bits for any history of machines.

Each gradient is a sum of small integers over the global batch, divided by a power of two. That is exact in float64, in
whatever order the processes add it. The momentum makes the weights depend on the order of the global batches.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.elastic_machine import LOGS, Log
from trainbus import Bus, CheckpointHook, Hook, PreemptionHook, TrainLoop

SAMPLES = 1000
GLOBAL_BATCH = 16
COLUMNS = 64
PADDING = 100_000  # numbers that are not trained, so that a checkpoint has 0.8 MB
INTERVAL = 20
KEPT = 3
SECONDS = 0.03  # of an iteration, at least
URL = "s3://bucket/runs"
WORK_DIR = "x"


class Sums(nn.Module):
    """Add the columns of each sample, weighted."""

    def __init__(self, padding: int = PADDING) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(COLUMNS, dtype=torch.float64))
        self.padding = nn.Parameter(torch.zeros(padding, dtype=torch.float64), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.weights


def step(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the loss: the sum over the samples of all processes, divided by the global batch."""
    processes = distributed.get_world_size() if distributed.is_initialized() else 1
    return model(batch[1]).sum() * (processes / GLOBAL_BATCH)  # DDP takes the mean over the processes


class Teller(Hook):
    """Log what this process does."""

    def __init__(self, log: Log) -> None:
        self._tell = log.tell
        self._finish = Path(os.environ[LOGS]) / "finish"

    def before_train(self, event: Any) -> None:
        attempt = [time.time_ns()]
        distributed.broadcast_object_list(attempt)
        self._tell(attempt=attempt[0], rank=event.run.rank, ranks=event.run.world_size, begins=event.progress.iter)

    def before_forward(self, event: Any) -> None:
        # Before: once one process has the new weights, or saves them, all have written down what these saw.
        self._tell(takes=event.progress.iter, epoch=event.progress.epoch, samples=event.batch[0].tolist())

    def after_train_iter(self, event: Any) -> None:
        self._tell(done=event.progress.iter)
        time.sleep(SECONDS)

    def after_train_epoch(self, event: Any) -> None:
        if self._finish.exists():
            event.run.stop("it was struck often enough")

    def checkpoint_staged(self, event: Any) -> None:
        self._tell(staged=event.path)

    def checkpoint_uploaded(self, event: Any) -> None:
        self._tell(committed=event.path)  # where another machine finds it

    def checkpoint_failed(self, event: Any) -> None:
        self._tell(kept=event.kept, error=event.error)


def iteration(path: str) -> int:
    """Return the number of iterations in a checkpoint, by its name."""
    return int(path.rpartition("_")[2].removesuffix(".safetensors"))


def make_features() -> torch.Tensor:
    """Return the samples, by row: small integers."""
    return torch.randint(-8, 8, (SAMPLES, COLUMNS), generator=torch.Generator().manual_seed(0)).double()


def make_optimizer(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=2**-10, momentum=0.9)


def make_loop(*hooks: Hook, work_dir: str | Path, epochs: int, parallel: bool = False) -> TrainLoop:
    model: nn.Module = DistributedDataParallel(Sums()) if parallel else Sums()
    bus = Bus()
    bus.add(*hooks)
    return TrainLoop(
        model,
        make_optimizer(model),
        step=step,
        train_data=DataLoader(TensorDataset(torch.arange(SAMPLES), make_features()), batch_size=GLOBAL_BATCH, shuffle=True),
        bus=bus,
        max_epochs=epochs,
        work_dir=work_dir,
        seed=1,
        global_batch=GLOBAL_BATCH,
    )


def train(log: Log) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    saves = CheckpointHook(INTERVAL, by_epoch=False, max_keep_ckpts=KEPT, out_dir=URL)
    make_loop(Teller(log), saves, PreemptionHook(), work_dir=WORK_DIR, epochs=1_000_000, parallel=True).run(resume="auto")
    distributed.destroy_process_group()
