"""One rank of a replica group, started by ``torchrun``: ``group_job.py FOLDER GROUP EPOCHS``.

Rank 1 of group ``b`` asks for a stop, a rate and a checkpoint, which only its own group must hear of.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed
from torch.utils.data import DataLoader

from tests.bridges.torchft import groups
from trainbus import Bus, CheckpointHook, DistSamplerSeedHook, Hook, Run


class Asks(Hook):
    """Write down each iteration; ask for things on rank 1 of group b."""

    def __init__(self, file, group, manager) -> None:
        self._file, self._asks = file, group == "b" and os.environ["RANK"] == "1"
        self._manager = manager

    def after_train_iter(self, event):
        at = event.progress
        rate = next(iter(event.run.optimizers.values())).param_groups[0]["lr"]
        samples = None if event.run.healed else event.batch[0].tolist()
        facts = {"iter": at.iter, "epoch": at.epoch, "rate": rate, "samples": samples}
        self._file.write(json.dumps(facts) + "\n")
        self._file.flush()
        alone = self._manager.num_participants() == 1
        # Alone, group a is slow before the iterations of these requests: the other one may take half a minute to come.
        waits = alone and at.iter < 25 and int(os.environ["WORLD_SIZE"]) > 1
        time.sleep((0.3 if at.iter < 5 else 2.0) if waits else 0.02)
        if self._asks and at.iter == 30:
            event.run.set_lr(0.005)
        if self._asks and at.iter == 50:
            event.run.stop("rank 1 of b wants to")


def main():
    import torchft

    folder, group, epochs = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size > 1:
        distributed.init_process_group("gloo", timeout=groups.TIMEOUT)
    manager = groups.manager(group, launched=True)
    torch.manual_seed(0)
    model = groups.Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = torchft.Optimizer(manager, inner)
    data = groups.rows(160)
    sampler = torchft.data.DistributedSampler(data, "ab".index(group), 2, group_rank=rank, num_replicas=size)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    with (Path(folder) / f"{group}{rank}.jsonl").open("a") as file:
        bus = Bus(DistSamplerSeedHook(), CheckpointHook(1), Asks(file, group, manager))
        options = {"work_dir": Path(folder) / "run", "seed": 0, "replicas": manager}
        with Run(bus, model=model, optimizer=optimizer, **options) as run:
            for _ in run.epochs(int(epochs)):
                for _, rows, targets in run.train(loader):
                    optimizer.zero_grad()
                    (model(rows) - targets).pow(2).mean().backward()
                    for one in (
                        model.parameters() if size > 1 else ()
                    ):  # as in DistributedDataParallel: ranks of a group are alike
                        distributed.all_reduce(one.grad)
                        one.grad /= size
                    for work in [manager.allreduce(one.grad) for one in model.parameters()]:
                        work.wait()
                    optimizer.step()
    manager.shutdown(wait=False)
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
