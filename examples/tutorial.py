"""The end of the tutorial: digits, in one process or under torchrun, with all that one wants of a training.

The module ``digits`` is on the page docs/start/tutorial.md: ``data()`` and ``network()``.
"""

import os
from datetime import timedelta

import torch
from digits import data, network
from torch import distributed
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from trainbus import (
    Bus,
    CheckpointHook,
    DistSamplerSeedHook,
    EMAHook,
    LoggerHook,
    OptimizerHook,
    PreemptionHook,
    RunRecordHook,
    TrainLoop,
)


def step(model, batch):
    images, classes = batch
    logits = model(images)
    accuracy = (logits.argmax(1) == classes).float().mean()
    return {"loss": cross_entropy(logits, classes), "accuracy": accuracy}


def main():
    torch.set_num_threads(1)
    several = distributed.is_torchelastic_launched()
    if several:
        distributed.init_process_group("gloo", timeout=timedelta(minutes=2))
    train_set, val_set = data()
    sampler = DistributedSampler(train_set, shuffle=True) if several else None
    train = DataLoader(train_set, batch_size=32, sampler=sampler, shuffle=sampler is None)
    val = DataLoader(val_set, batch_size=128, sampler=DistributedSampler(val_set, shuffle=False) if several else None)
    model = network()
    if several:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    bus = Bus(
        OptimizerHook(grad_clip=5.0),
        EMAHook(momentum=0.01),
        DistSamplerSeedHook(),
        LoggerHook(interval=45),
        CheckpointHook(interval=1, save_best="accuracy"),
        PreemptionHook(),
        RunRecordHook(),
    )
    loop = TrainLoop(
        model,
        optimizer,
        step=step,
        train_data=train,
        val_data=val,
        bus=bus,
        max_epochs=int(os.environ.get("EPOCHS", "4")),
        work_dir="runs/digits",
        seed=0,
    )
    print(loop.run(resume="auto"))
    if several:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
