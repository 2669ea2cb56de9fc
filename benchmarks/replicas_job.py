"""One replica group of the training that ``replicas.py`` strikes: ``python -m benchmarks.replicas_job KIND GROUP STEPS``.

All groups train the same batches, so the averaged gradients, and with them all numbers, are those of one group alone.
"""

import json
import os
import sys
import time
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn, optim
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from trainbus import Bus, CheckpointHook, EMAHook, Hook, LoggerHook, ParamSchedulerHook, Run
from trainbus.hooks.writers import JSONLinesWriter

INTERVAL = 20
SAMPLES, BATCH = 960, 8
PADDING = 1_000_000  # numbers in the weights, so that a save has 16 MB: weights, momentum, average
TOGETHER, ALONE = 0.03, 0.15  # seconds of an iteration at least; alone slower, so that the other group comes back in time
TIMEOUT = timedelta(seconds=20)


class Net(nn.Module):
    """A small network, with a dropout and much padding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 32), nn.Dropout(0.2), nn.Linear(32, 1)
        self.padding = nn.Parameter(torch.zeros(PADDING))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.first(rows).relu())) + self.padding[0]


class Log:
    """Write down what this group does, in lines that a kill does not tear."""

    def __init__(self, group: str) -> None:
        self._file = Path(f"{group}.{os.getpid()}.jsonl").open("a")  # noqa: SIM115 - until the end of the process

    def tell(self, **facts: Any) -> None:
        self._file.write(json.dumps({"time": time.time(), **facts}) + "\n")
        self._file.flush()


def sum_of(tensors: Any) -> int:
    """Return a number that tells whether tensors have the same bits."""
    return zlib.crc32(b"".join(one.detach().flatten()[:64].numpy().tobytes() for one in tensors))


class Job:
    """What both kinds of training have."""

    def __init__(self, kind: str, group: str, steps: int) -> None:
        import torchft

        self.log = Log(group)
        self.log.tell(start=True)
        self.kind, self.group, self.steps = kind, group, steps
        torch.manual_seed(0)
        self.model = Net()
        inner = optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        own = kind == "own"
        self.manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
            load_state_dict=self.load_state_dict if own else None,
            state_dict=self.state_dict if own else None,
            min_replica_size=1,
            rank=0,
            world_size=1,
            store_addr="localhost",
            store_port=self.store.port,
            replica_id=group,
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
            # The groups have the same weights. To synchronize them, a group that joins at step 0 heals: it gives no gradient,
            # and is counted in the mean.
            init_sync=False,
        )
        self.inner, self.optimizer = inner, torchft.Optimizer(self.manager, inner)
        self.schedule = optim.lr_scheduler.CosineAnnealingLR(inner, steps)
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(SAMPLES, 4, generator=generator)
        data = TensorDataset(torch.arange(SAMPLES), rows, rows.sum(1, keepdim=True))
        self.loader = DataLoader(data, batch_size=BATCH, shuffle=True)

    def learn(self, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = (self.model(rows) - targets).pow(2).mean()
        loss.backward()
        # Not by torchft's DistributedDataParallel: with 0.2.0 a group fails whose backward pass another one leaves.
        for work in [self.manager.allreduce(one.grad) for one in self.model.parameters() if one.grad is not None]:
            work.wait()
        self.optimizer.step()
        return loss

    def pace(self) -> None:
        if self.kind != "alone":
            time.sleep(ALONE if self.manager.num_participants() == 1 else TOGETHER)

    # ------------------------------------------------------------------------------------------------ with trainbus

    def train(self) -> None:
        ema = EMAHook(momentum=0.05)
        logger = LoggerHook(interval=1, writers=[JSONLinesWriter()])
        saves = CheckpointHook(INTERVAL, by_epoch=False)
        bus = Bus(ema, logger, ParamSchedulerHook(self.schedule, by="iter"), saves, Teller(self, ema))
        options: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "seed": 0, "work_dir": "run"}
        with Run(bus, replicas=self.manager, **options) as run:
            for _ in run.epochs(max_iters=self.steps):
                for _, rows, targets in run.train(self.loader, endless=True):
                    run.report(loss=self.learn(rows, targets))

    # ------------------------------------------------------------------- as torchft's documentation and examples do

    def state_dict(self) -> dict[str, Any]:
        parts = {"model": self.model, "optim": self.inner, "average": self.average, "schedule": self.schedule}
        return {name: part.state_dict() for name, part in parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parts: dict[str, Any] = {"model": self.model, "optim": self.inner, "average": self.average, "schedule": self.schedule}
        for name, part in parts.items():
            part.load_state_dict(state[name])

    def train_own(self) -> None:
        manager, folder = self.manager, Path("run")
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
        folder.mkdir(exist_ok=True)
        for path in sorted(folder.glob("*.pt"), key=lambda path: int(path.stem), reverse=True):
            try:
                saved = torch.load(path)
            except (RuntimeError, EOFError) as error:  # it was being written
                self.log.tell(damaged=path.name, error=type(error).__name__)
                continue
            manager.load_state_dict(saved["torchft"])
            self.load_state_dict(saved["user"])
            break
        while manager.current_step() < self.steps:
            for numbers, rows, targets in self.loader:
                if manager.current_step() >= self.steps:
                    break
                before = manager.current_step()
                self.learn(rows, targets)
                step = manager.current_step()
                if step == before:
                    continue
                self.average.update_parameters(self.model)
                self.schedule.step()
                first = manager.participating_rank() == 0
                if step % INTERVAL == 0 and first:
                    self.log.tell(saves=step)
                    torch.save({"torchft": manager.state_dict(), "user": self.state_dict()}, folder / f"{step}.pt")
                    self.log.tell(saved=step)
                self.log.tell(done=step - 1, first=first, samples=numbers.tolist())
                self.pace()


class Teller(Hook):
    """Write down each committed step."""

    priority = 100

    def __init__(self, job: Job, ema: EMAHook) -> None:
        self._job, self._ema = job, ema

    def after_train_iter(self, event: Any) -> None:
        job, run, average = self._job, event.run, self._ema.average
        at = event.progress
        counts = {"done": at.iter, "epoch": at.epoch, "update": at.update, "rate": job.inner.param_groups[0]["lr"]}
        sums = {"weights": sum_of(job.model.parameters()), "average": sum_of(average.tensors.values()) if average else 0}
        samples = None if run.healed else event.batch[0].tolist()
        job.log.tell(**counts, **sums, samples=samples, first=run.host.replicas.first)
        job.pace()

    def checkpoint_staged(self, event: Any) -> None:
        self._job.log.tell(saves=int(Path(event.path).stem.rpartition("_")[2]))

    def checkpoint_committed(self, event: Any) -> None:
        self._job.log.tell(saved=event.progress.iter)


def main() -> None:
    torch.set_num_threads(1)
    kind, group, steps = sys.argv[1:]
    job = Job(kind, group, int(steps))
    (job.train_own if kind == "own" else job.train)()
    job.log.tell(end=True)
    job.manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
