"""One process of the trainings that ``vanish.py`` cuts off: ``torchrun … -m benchmarks.vanish_job HOW SECONDS FOLDER``.

It waits for others ``SECONDS``, or as long as torch does by default, if that is 0. ``train`` uses trainbus. ``train_plainly``
has the same steps without it, and saves as often with ``torch.save``.
"""

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.elastic_job import GLOBAL_BATCH, INTERVAL, SECONDS, Sums, make_features, make_loop, make_optimizer
from benchmarks.elastic_machine import Log
from trainbus import CheckpointHook, Hook

ENDLESS = 1_000_000


class Teller(Hook):
    """Log each iteration."""

    def __init__(self, log: Log) -> None:
        self._tell = log.tell

    def before_train(self, event: Any) -> None:
        self._tell(begins=event.progress.iter, rank=event.run.rank, ranks=event.run.world_size)

    def after_train_iter(self, event: Any) -> None:
        self._tell(done=event.progress.iter)
        time.sleep(SECONDS)


def train(log: Log, folder: Path) -> None:
    saves = CheckpointHook(INTERVAL, by_epoch=False, max_keep_ckpts=3, out_dir=folder)
    make_loop(Teller(log), saves, work_dir="x", epochs=ENDLESS, parallel=True).run(resume="auto")


def train_plainly(log: Log, folder: Path) -> None:
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    model = DistributedDataParallel(Sums())
    optimizer = make_optimizer(model)
    file, iteration, first = folder / "last.pt", 0, 0
    if file.exists():
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        iteration, first = saved["iteration"], saved["epoch"]
    log.tell(begins=iteration, rank=rank, ranks=ranks)
    data = TensorDataset(make_features())
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    for epoch in range(first, ENDLESS):
        sampler.set_epoch(epoch)
        for (rows,) in DataLoader(data, batch_size=GLOBAL_BATCH // ranks, sampler=sampler):
            optimizer.zero_grad()
            (model(rows).sum() * (ranks / GLOBAL_BATCH)).backward()
            optimizer.step()
            log.tell(done=iteration)
            iteration += 1
            if iteration % INTERVAL == 0 and not rank:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({"iteration": iteration, "epoch": epoch, **state}, file.with_suffix(".new"))
                file.with_suffix(".new").replace(file)
            time.sleep(SECONDS)


def main(how: str, seconds: str, folder: str) -> None:
    log = Log()
    torch.set_num_threads(1)
    timeout = timedelta(seconds=float(seconds)) if float(seconds) else None
    distributed.init_process_group("gloo", timeout=timeout)
    try:
        {"trainbus": train, "plain": train_plainly}[how](log, Path(folder))
    except Exception as error:
        log.tell(failed="\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]))
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
