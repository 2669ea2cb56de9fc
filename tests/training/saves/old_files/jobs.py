"""The trainings whose checkpoints of earlier versions are kept here, and the script that wrote them.

With the source of version 0.2 in ``PYTHONPATH``, ``python jobs.py 0.2`` writes its files beside this script. The
source of 0.1 is commit e1d512a, that of 0.2 is 861f002. Every number is a short
binary fraction, so that all machines compute the same weights.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from trainbus import attach
from trainbus.eventloop import Bus, Run, TrainLoop
from trainbus.hooks import CheckpointHook, EMAHook, ExponentialMovingAverage, ParamSchedulerHook

HERE = Path(__file__).parent
SAVED_AT = 8  # in the second epoch of six iterations


def data(*, shuffle: bool = True) -> DataLoader[Any]:
    inputs = torch.arange(88, dtype=torch.float64).reshape(22, 4) % 7
    generator = torch.Generator().manual_seed(5)
    return DataLoader(TensorDataset(inputs, torch.arange(22) % 3), 4, shuffle=shuffle, generator=generator)


def network() -> torch.nn.Sequential:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.5)).to(torch.float64)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) - 2)
    return model


def step(model: Any, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return model(inputs).gather(1, labels[:, None]).sum() / 4


def own_loop(work_dir: Path, *, save: bool = False, **options: Any) -> dict[str, torch.Tensor]:
    """Train two epochs with a loop of one's own; return the weights."""
    model, loader = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    with Run(Bus(), model=model, optimizer=optimizer, work_dir=work_dir, seed=3, **options) as run:
        for _ in run.epochs(2):
            for batch in run.train(loader):
                optimizer.zero_grad()
                step(model, batch).backward()
                optimizer.step()
                if save and run.counters.iter == SAVED_AT - 1:
                    run.checkpoints.save()
    return model.state_dict()


def train_loop(work_dir: Path, *, save: bool = False, **options: Any) -> dict[str, torch.Tensor]:
    """Train two epochs with averages, a schedule and validations; return the raw weights and the averages."""
    model, bus = network(), Bus()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    average = EMAHook(ExponentialMovingAverage, momentum=0.5)
    bus.add(average, ParamSchedulerHook(torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5), by="iter"))
    if save:
        bus.add(CheckpointHook(interval=SAVED_AT, by_epoch=False))
    shared = {"bus": bus, "max_epochs": 2, "work_dir": work_dir, "seed": 3}
    TrainLoop(model, optimizer, step=step, train_data=data(), val_data=data(), **shared).run(**options)
    averages = {f"average.{name}": value for name, value in average.average.tensors.items()}
    return {**model.state_dict(), **averages}


def lightning(work_dir: Path, *, save: bool = False, resume: Path | None = None) -> dict[str, torch.Tensor]:
    """Train two epochs in Lightning's trainer, which restores no random states; return the raw weights and the averages."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()[0]

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return step(self.net, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.5)

    class Saver(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            if save and trainer.current_epoch == 0:
                trainer.save_checkpoint(work_dir / "saved.ckpt")

    average = EMAHook(ExponentialMovingAverage, momentum=0.5)
    bus = Bus()
    bus.add(average)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = pl.Trainer(max_epochs=2, callbacks=[Saver()], accelerator="cpu", **quiet)
    attach(bus, trainer)
    module = Module()
    trainer.fit(module, data(shuffle=False), ckpt_path=resume)
    averages = {f"average.{name}": value for name, value in average.average.tensors.items()}
    return {**module.state_dict(), **averages}


def main(version: str) -> None:
    for job, found in ((own_loop, "*8.safetensors"), (train_loop, "*8.safetensors"), (lightning, "saved.ckpt")):
        if job is lightning and version == "0.1":
            continue  # it had no bridges
        with tempfile.TemporaryDirectory() as folder:
            job(Path(folder), save=True)
            (file,) = Path(folder).rglob(found)
            shutil.copy(file, HERE / f"{job.__name__}-{version}{file.suffix}")


if __name__ == "__main__":
    main(sys.argv[1])
