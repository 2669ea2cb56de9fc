"""Trainings with a fault each, as a user's script: ``main(fault, folder)``. Without a fault all is well."""

import os
import time
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from trainbus import Bus, CheckpointHook, EMAHook, Hook, LoggerHook, RunRecordHook, TrainLoop, mount

STEP = 0.01
"""Seconds of a step at least; three times as many where nothing of trainbus must come near a share that is a finding."""
EPOCHS, BATCHES = 4, 100
LONG = {"leak": 350, "list": 350, "rank": 200}
"""Batches of an epoch where a fault shows after ten seconds: memory is looked at once a second, ranks every two seconds."""


class Batches:
    """Batches that take a while to read."""

    def __init__(self, number: int, seconds: float = 0.0) -> None:
        rows = torch.randn(number, 16, 16, generator=torch.Generator().manual_seed(0))
        self.batches = [(one, one.sum(1, keepdim=True)) for one in rows]
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        for batch in self.batches:
            if self.seconds:  # even a sleep of no time hands the core to another process
                time.sleep(self.seconds)
            yield batch


class Plots(Hook):
    """Draws the weights after each iteration."""

    def after_train_iter(self, event: Any) -> None:
        time.sleep(0.004)


class Outputs(Hook):
    """Remembers outputs, and never forgets them."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def after_train_iter(self, event: Any) -> None:
        self.outputs.append(torch.ones(50_000))


class Uploader(Hook):
    """Is slower than its events come."""

    @mount(offload="thread", queue=16)
    def after_train_iter(self, event: Any) -> None:
        time.sleep(0.03)


class Telemetry(Hook):
    """Is slower than its events come, and loses them."""

    @mount(offload="thread", queue=16, full="drop_new")
    def after_train_iter(self, event: Any) -> None:
        time.sleep(0.03)


def main(fault: str, folder: str) -> None:
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    kept: list[Any] = []
    fsync = os.fsync

    def slow_fsync(descriptor: int) -> None:
        time.sleep(0.05)
        fsync(descriptor)

    def step(model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        time.sleep(3 * STEP if fault in ("none", "rate") or (fault == "rank" and rank == size - 1) else STEP)
        if fault == "list":  # keeps the inputs of each step for later
            kept.append(inputs.repeat(200, 1))
        return nn.functional.mse_loss(model(inputs), targets)

    def val_step(model: nn.Module, batch: Any) -> Any:
        time.sleep(3 * STEP if fault == "validation" else STEP / 10)
        return {"loss": nn.functional.mse_loss(model(batch[0]), batch[1])}

    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    if size > 1:
        distributed.init_process_group("gloo")
        model = DistributedDataParallel(model)
    if fault == "disk":
        os.fsync = slow_fsync
    own: dict[str, Any] = {"hook": Plots, "leak": Outputs, "lane": Uploader, "events": Telemetry}
    saves = CheckpointHook(10 if fault == "disk" else 100, by_epoch=False, max_keep_ckpts=2)
    hooks = [LoggerHook(interval=10), EMAHook(momentum=0.01), saves, RunRecordHook(), *([own[fault]()] if fault in own else [])]
    TrainLoop(
        model,
        torch.optim.SGD(model.parameters(), lr=50.0 if fault == "rate" else 0.01, momentum=0.9),
        train_data=Batches(LONG.get(fault, BATCHES), 0.015 if fault == "data" else 0.0),
        step=step,
        val_data=Batches(20),
        val_step=val_step,
        max_epochs=EPOCHS,
        bus=Bus(*hooks),
        work_dir=folder,
    ).run()
    if size > 1:
        distributed.destroy_process_group()
