"""The same jobs in other libraries' trainers, with checkpoints of their own or written beside the training by trainbus.

The control is the trainer without trainbus. What a trainer does not take (an optimizer that needs a closure), it refuses in the
control as well.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainbus import Bus, Run, attach

from .kit import BATCHES, DIE, EPOCHS, SAVE, Fit, Killed, Make, Parts, Way, made


class Dying:
    """Calls a step, and dies in iteration ``DIE``: the number of calls, or what ``iteration`` returns."""

    def __init__(self, parts: Parts, *, die: bool, iteration: Callable[[], int] | None = None) -> None:
        self._parts, self._die, self._calls = parts, die, 0
        self._iteration = iteration or (lambda: self._calls)

    def __call__(self, batch: Any) -> torch.Tensor:
        if self._die and self._iteration() == DIE:
            raise Killed
        self._calls += 1
        return self._parts.step(self._parts.model, batch)


def lightning(make: Make, folder: Path, *, bus: bool, die: bool, resume: bool) -> Parts:
    """Lightning restores no position in a list: ``Rest`` does, in both trainings."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from trainbus import TrainbusCheckpointIO

    from ..bridges.conformance.lightning import QUIET, Rest

    parts = made(make, resume=resume)
    step = Dying(parts, die=die, iteration=lambda: trainer.global_step)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = parts.model

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return step(batch)

        def configure_optimizers(self) -> Any:
            if parts.schedule is None:
                return parts.optimizer
            interval = "step" if parts.by == "iter" else "epoch"
            return [parts.optimizer], [{"scheduler": parts.schedule, "interval": interval}]

    saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVE, save_top_k=-1)
    plugins = [TrainbusCheckpointIO()] if bus else []
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=EPOCHS, default_root_dir=folder, callbacks=[saves], plugins=plugins, **QUIET
    )  # fmt: skip
    if bus:
        attach(Bus(), trainer)
    file = folder / f"step={SAVE}.ckpt" if resume else None
    data = Rest(parts.data, SAVE % BATCHES if resume else 0)  # a list would be several loaders
    trainer.fit(Module(), data, ckpt_path=file, **({"weights_only": False} if resume else {}))
    return parts


class Numbered(nn.Module):
    """Gives a ``transformers.Trainer``, which makes batches of numbers, the loss of the batch with a number."""

    def __init__(self, parts: Parts, *, die: bool) -> None:
        super().__init__()
        self.model = parts.model
        self.loss = Dying(parts, die=die)
        self.data = parts.data

    def forward(self, number: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        return {"loss": self.loss(self.data[int(number)])}


def transformers(make: Make, folder: Path, *, bus: bool, die: bool, resume: bool) -> Parts:
    from ..bridges.conformance.transformers import make as make_trainer

    parts = made(make, resume=resume)
    schedule = parts.schedule or torch.optim.lr_scheduler.LambdaLR(parts.optimizer, lambda _: 1.0)
    data = [{"number": number, "labels": number} for number in range(BATCHES)]
    trainer = make_trainer(
        folder, model=lambda: Numbered(parts, die=die), data=data, options={"optimizers": (parts.optimizer, schedule)},
        per_device_train_batch_size=1, num_train_epochs=EPOCHS, save_strategy="steps", save_steps=SAVE, max_grad_norm=0,
    )  # fmt: skip
    if bus:
        attach(Bus(), trainer, checkpoints=True)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVE}") if resume else None)
    return parts


def accelerate(make: Make, folder: Path, *, bus: bool, die: bool, resume: bool) -> Parts:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    parts = made(make, resume=resume)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(parts.model, parts.optimizer)
    schedules = [] if parts.schedule is None else [accelerator.prepare(parts.schedule)]
    loss, file, first = Dying(parts, die=die), folder / "saved", SAVE if resume else 0

    def learn(iteration: int, batch: Any) -> torch.Tensor:
        value = loss(batch)
        accelerator.backward(value)
        optimizer.step()
        for schedule in schedules:
            schedule.step()
        optimizer.zero_grad()
        if iteration + 1 == SAVE and not resume:
            accelerator.save_state(file)
        return value.detach()

    if not bus:
        if resume:
            accelerator.load_state(file)
        for iteration in range(first, EPOCHS * BATCHES):
            learn(iteration, parts.data[iteration % BATCHES])
        return parts
    with (
        attach(Bus(), accelerator, checkpoints=True),
        Run(Bus(), model=model, optimizer=optimizer, accelerator=accelerator, work_dir=folder) as run,
    ):
        if resume:
            accelerator.load_state(file)
        for _ in run.epochs(EPOCHS):
            for batch in run.train(parts.data):
                run.report(loss=learn(run.counters.iter, batch))
    accelerator.end_training()
    return parts


def ignite(make: Make, folder: Path, *, bus: bool, die: bool, resume: bool) -> Parts:
    from ignite.engine import Events
    from ignite.engine.deterministic import DeterministicEngine
    from ignite.handlers import Checkpoint, DiskSaver

    from trainbus import TrainbusSaver

    logging.getLogger("ignite").setLevel(logging.CRITICAL)
    parts = made(make, resume=resume)
    loss = Dying(parts, die=die)

    def learn(engine: Any, batch: Any) -> dict[str, torch.Tensor]:
        parts.optimizer.zero_grad()
        value = loss(batch)
        value.backward()
        parts.optimizer.step()
        return {"loss": value.detach()}

    trainer = DeterministicEngine(learn)
    to_save: dict[str, Any] = {"model": parts.model, "optimizer": parts.optimizer, "trainer": trainer}
    if parts.schedule is not None:
        to_save["schedule"] = parts.schedule
        when = Events.ITERATION_COMPLETED if parts.by == "iter" else Events.EPOCH_COMPLETED
        trainer.add_event_handler(when, lambda: parts.schedule.step())
    if bus:
        to_save["bus"] = attach(Bus(), trainer, model=parts.model, optimizer=parts.optimizer, work_dir=folder)
    if not resume:
        saver = TrainbusSaver(folder / "own", trainer) if bus else DiskSaver(folder / "own")
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=SAVE), Checkpoint(to_save, saver))
    else:
        saved = torch.load(folder / "own" / f"checkpoint_{SAVE}.pt", weights_only=False)
        Checkpoint.load_objects(to_save, saved)
    trainer.run(parts.data, max_epochs=EPOCHS)
    return parts


def _way(name: str, train: Any) -> Way:
    def fit(*, bus: bool) -> Fit:
        def trained(make: Make, folder: Path, *, die: bool = False, resume: bool = False) -> Parts:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the trainers, about jobs as small as these
                pytest.importorskip(name.lower())
                return train(make, folder, bus=bus, die=die, resume=resume)

        return trained

    return Way(name, fit(bus=True), fit(bus=False))


TRAINERS = [
    _way("Lightning", lightning),
    _way("Transformers", transformers),
    _way("Accelerate", accelerate),
    _way("Ignite", ignite),
]
