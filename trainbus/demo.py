"""``trainbus demo``: train a small network on scikit-learn's handwritten digits, with many hooks and all I/O offloaded.

A fifth of the training labels are replaced by random ones. The weights run after them, and their average does not: that is
what ``EMAHook`` is for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from trainbus import hooks
from trainbus.eventloop import Bus, Hook, TrainLoop
from trainbus.eventloop.errors import cannot_import
from trainbus.eventloop.terminal import cell
from trainbus.observe import RunRecordHook, last_lines

BATCH: Final = 32
WRONG: Final = 0.2  # share of the training labels that are replaced by random ones


class Accuracy:
    """Share of right predictions, with the interface of torchmetrics. No number leaves the device before ``compute``."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._right: torch.Tensor | int = 0
        self._seen = 0

    def update(self, logits: torch.Tensor, target: torch.Tensor) -> None:
        self._right = self._right + (logits.argmax(1) == target).sum()
        self._seen += len(target)

    def compute(self) -> float:
        return float(self._right) / max(1, self._seen)


def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the loss to train on, and the outputs that the metrics take."""
    images, target = batch
    logits = model(images)
    return {"loss": functional.cross_entropy(logits, target), "logits": logits, "target": target}


def digits(seed: int, wrong: float = 0.0) -> dict[str, TensorDataset]:
    """Return the 1,797 images (1 × 8 × 8, 0 to 1) of scikit-learn, split 60 : 20 : 20 into train, val and test.

    The share ``wrong`` of the training labels is replaced by random ones.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise cannot_import("the demo", "scikit-learn", "demo", error, "sklearn") from error
    bundle = load_digits()
    images = torch.tensor(bundle.images / 16.0, dtype=torch.float32).unsqueeze(1)
    target = torch.tensor(bundle.target, dtype=torch.int64)
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(target))
    parts = np.split(order, [int(0.6 * len(order)), int(0.8 * len(order))])
    replaced = parts[0][: int(wrong * len(parts[0]))]
    target[replaced] = torch.from_numpy(generator.integers(10, size=len(replaced)))
    return {name: TensorDataset(images[part], target[part]) for name, part in zip(("train", "val", "test"), parts, strict=True)}


def loader(
    part: Literal["train", "val", "test"], batch_size: int = BATCH, seed: int = 0, wrong: float = 0.0
) -> DataLoader[Any]:
    """Return a loader of one part of the digits; the training data is shuffled."""
    return DataLoader(digits(seed, wrong)[part], batch_size=batch_size, shuffle=part == "train")


def network() -> nn.Module:
    """Return a small convolutional network for 8 × 8 images."""
    features = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
    classes = [nn.Linear(32 * 16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10)]
    return nn.Sequential(*features, nn.MaxPool2d(2), nn.Flatten(), *classes)


class Evidence(Hook):
    """Collect the figures for the demo's last lines, and print a line every few epochs."""

    observes = True

    def __init__(self, console: Console, epochs: int) -> None:
        self.checkpoints, self.bytes, self.stall = 0, 0, 0.0
        self.best = (0.0, 0)  # best accuracy of a validation, and its epoch
        self._console, self._epochs = console, epochs

    def after_val_epoch(self, event: Any) -> None:
        epoch, accuracy = event.progress.epoch, event.metrics["accuracy"]
        if accuracy > self.best[0]:
            self.best = accuracy, epoch
        if epoch % 4 == 0 or epoch == self._epochs:
            text = f"epoch {epoch:2}/{self._epochs}   validation: accuracy {accuracy:.1%}, loss {event.metrics['loss']:.3f}"
            self._console.print(text, highlight=False)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best = state["best"]

    def checkpoint_committed(self, event: Any) -> None:
        if event.bytes:  # not a second name of a file
            self.checkpoints, self.bytes, self.stall = self.checkpoints + 1, event.bytes, self.stall + event.stall

    @property
    def sentence(self) -> str:
        if not self.checkpoints:
            return ""
        size, waited = f"{self.bytes / 1e3:.0f} kB", f"{self.stall * 1e3:.0f} ms in all"
        many = "" if self.checkpoints == 1 else "s"
        return f"{self.checkpoints} checkpoint{many} of {size} written beside the training, which waited {waited}\n"


def make_bus(optimizer: torch.optim.Optimizer, epochs: int, console: Console) -> Bus:
    """Return a bus with all the hooks of the demo."""
    writers: list[hooks.Writer] = [hooks.JSONLinesWriter(interval=1)]
    if find_spec("tensorboard") is not None:
        writers.append(hooks.TensorBoardWriter())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(warm_up, over=34))
    return Bus(
        hooks.OptimizerHook(grad_clip=5.0),
        hooks.EMAHook(momentum=0.01),
        hooks.ParamSchedulerHook(schedule, by="iter"),
        hooks.RuntimeInfoHook(),
        hooks.CheckInvalidLossHook(),
        hooks.LoggerHook(interval=20, writers=writers),
        hooks.ProgressBar(console),
        hooks.CheckpointHook(interval=1, save_best="accuracy", max_keep_ckpts=2),
        RunRecordHook(),
        Evidence(console, epochs),
    )


def warm_up(iteration: int, over: int) -> float:
    """Return the factor of the learning rate: up to 1 in the first ``over`` iterations."""
    return min(1.0, (iteration + 1) / over)


def make_loop(work_dir: Path, epochs: int, seed: int, console: Console) -> TrainLoop:
    """Return the loop of the demo."""
    data = digits(seed, WRONG)
    loaders = {name: DataLoader(part, batch_size=BATCH, shuffle=name == "train") for name, part in data.items()}
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
    return TrainLoop(
        model,
        optimizer,
        step=step,
        train_data=loaders["train"],
        val_data=loaders["val"],
        test_data=loaders["test"],
        metrics={"accuracy": Accuracy()},
        bus=make_bus(optimizer, epochs, console),
        max_epochs=epochs,
        work_dir=work_dir,
        seed=seed,
    )


def run_demo(work_dir: Path, *, epochs: int = 20, seed: int = 0, resume: bool = False, table: bool = False) -> int:
    """Train for ``epochs`` in total, test, and print what happened; return the exit status.

    ``seed`` sets weights, shuffling and split. ``resume`` continues from the newest checkpoint in ``work_dir``. ``table`` also
    prints the table of hooks.
    """
    torch.set_num_threads(1)  # the network is too small for more; offloaded work uses the other cores
    console = Console()
    loop = make_loop(work_dir, epochs, seed, console)
    console.print(
        Text.assemble(("trainbus demo", "bold"), cell(_INTRODUCTION.format(epochs=epochs, folder=work_dir), keep="\n"))
    )
    tables: list[Any] = []

    def take_table(event: Any) -> None:
        loop.bus.drain()  # so that every delivery is counted
        tables.append(loop.bus.describe(stats=True))

    if table:
        loop.bus.on("after_run", take_table, priority="LOWEST")  # while the run's own checkpoint writer is on the bus
    began = time.perf_counter()
    loop.run(resume=work_dir if resume else None)
    seconds = time.perf_counter() - began
    averaged = loop.test()["accuracy"]
    raw = TrainLoop(loop.model, step=step, test_data=loader("test", seed=seed), metrics={"accuracy": Accuracy()}).test()
    evidence = next(hook for hook in loop.bus.hooks if isinstance(hook, Evidence))
    summary = Table.grid(padding=(0, 2))
    summary.add_row("test accuracy", f"averaged weights {averaged:.2%}, raw weights {raw['accuracy']:.2%}")
    if evidence.best[1]:
        summary.add_row("best epoch", f"{evidence.best[1]}, validation accuracy {evidence.best[0]:.2%}")
    summary.add_row("trained", f"{loop.counters.iter} iterations in all, {seconds:.1f} s in this session")
    console.print("", *tables, summary, Text(evidence.sentence), last_lines(work_dir, loop.bus), "")
    curves = _CURVES if any(work_dir.glob("tensorboard/*")) else ""
    console.print(cell((_NEXT + curves).format(folder=work_dir, more=epochs + 20), keep="\n"), soft_wrap=True)
    return 0


_INTRODUCTION: Final = """\
: a small network learns handwritten digits for {epochs} epochs.
A fifth of its labels are wrong. Checkpoints and logs are written beside the
training, into {folder}.
"""

_NEXT: Final = """\
next: trainbus report {folder}    curves, costs and checkpoints on a page
      trainbus demo --resume --out {folder} --epochs {more}
      trainbus demo --hooks    the table of hooks
      trainbus init    a training of your own to begin with"""

_CURVES: Final = "\n      tensorboard --logdir {folder}"
