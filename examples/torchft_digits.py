"""Train a small network on scikit-learn's handwritten digits in replica groups of torchft, each of which may die.

    torchft_lighthouse --min_replicas 1 --quorum_tick_ms 100 --join_timeout_ms 3000 --bind "[::]:29510" &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    start="torchrun --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint localhost:0 --max-restarts 10"
    REPLICA_GROUP_ID=0 $start examples/torchft_digits.py &
    REPLICA_GROUP_ID=1 $start examples/torchft_digits.py

Kill the Python process of a group while they train: the other one goes on, and torchrun starts it again.
"""

import os
import time
from datetime import timedelta

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.data import DistributedSampler

from trainbus import Bus, CheckpointHook, DistSamplerSeedHook, EMAHook, LoggerHook, ParamSchedulerHook, Run

GROUPS = 2
EPOCHS = 20


def main() -> None:
    """Train one replica group."""
    group = int(os.environ["REPLICA_GROUP_ID"])
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=None,  # the run hands out models, optimizers, hooks and counts
        state_dict=None,
        min_replica_size=1,
        replica_id=f"digits{group}",
        timeout=timedelta(seconds=20),
    )
    adam = torch.optim.AdamW(model.parameters(), lr=5e-3)
    optimizer = Optimizer(manager, adam)
    sampler = DistributedSampler(data, group, GROUPS, group_rank=0, num_replicas=1)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, EPOCHS * len(loader))
    bus = Bus(
        LoggerHook(interval=20),
        ParamSchedulerHook(schedule, by="iter"),
        EMAHook(momentum=0.01),
        CheckpointHook(interval=1, max_keep_ckpts=2),
        DistSamplerSeedHook(),
    )
    with Run(bus, model=model, optimizer=optimizer, work_dir="runs/torchft", seed=0, replicas=manager) as run:
        for _ in run.epochs(EPOCHS):
            for inputs, targets in run.train(loader):
                optimizer.zero_grad()  # first: the groups meet beside the forward pass
                loss = cross_entropy(model(inputs), targets)
                loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
                for work in [manager.allreduce(one.grad) for one in model.parameters() if one.grad is not None]:
                    work.wait()
                optimizer.step()  # if the manager commits it
                run.report(loss=loss)
                time.sleep(0.05)  # so that there is time to kill a group
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
