"""``trainbus demo``: train a small network on scikit-learn's handwritten digits, with many hooks and all I/O offloaded."""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hooks
from eventloop import Bus, ConfigurationError, TrainLoop
from eventloop.observe import last_lines

BATCH = 32


class Accuracy:
    """Share of right predictions, with the interface of torchmetrics. No number leaves the device before ``compute``."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._right: torch.Tensor | int = 0
        self._seen = 0

    def update(self, logits: torch.Tensor, target: torch.Tensor) -> None:
        """Count a batch: logits of shape (batch, classes), targets of shape (batch,)."""
        self._right = self._right + (logits.argmax(1) == target).sum()
        self._seen += len(target)

    def compute(self) -> float:
        """Return the share, 0 to 1."""
        return float(self._right) / max(1, self._seen)


def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the loss to train on, and the outputs that the metrics take."""
    images, target = batch
    logits = model(images)
    return {"loss": functional.cross_entropy(logits, target), "logits": logits, "target": target}


def digits(seed: int) -> dict[str, TensorDataset]:
    """Return the 1,797 images (1 × 8 × 8, 0 to 1) of scikit-learn, split 60 : 20 : 20 into train, val and test."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigurationError('the demo needs scikit-learn for its images: pip install "trainbus[demo]"') from None
    bundle = load_digits()
    images = torch.tensor(bundle.images / 16.0, dtype=torch.float32).unsqueeze(1)
    target = torch.tensor(bundle.target, dtype=torch.int64)
    order = np.random.default_rng(seed).permutation(len(target))
    parts = np.split(order, [int(0.6 * len(order)), int(0.8 * len(order))])
    return {name: TensorDataset(images[part], target[part]) for name, part in zip(("train", "val", "test"), parts, strict=True)}


def loader(part: Literal["train", "val", "test"], batch_size: int = BATCH, seed: int = 0) -> DataLoader[Any]:
    """Return a loader of one part of the digits; the training data is shuffled."""
    return DataLoader(digits(seed)[part], batch_size=batch_size, shuffle=part == "train")


def network() -> nn.Module:
    """Return a small convolutional network for 8 × 8 images."""
    features = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
    classes = [nn.Linear(32 * 16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10)]
    return nn.Sequential(*features, nn.MaxPool2d(2), nn.Flatten(), *classes)


def make_bus(optimizer: torch.optim.Optimizer, iterations: int, console: Console) -> Bus:
    """Return a bus with all the hooks of the demo."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(warm_up_and_decay, total=iterations))
    bus = Bus()
    bus.add(
        hooks.OptimizerHook(grad_clip=5.0),
        hooks.EMAHook(momentum=0.02),
        hooks.ParamSchedulerHook(schedule, by="iter"),
        hooks.RuntimeInfoHook(),
        hooks.IterTimerHook(),
        hooks.CheckInvalidLossHook(),
        hooks.LoggerHook(interval=20, writers=[hooks.ConsoleWriter(console), hooks.JSONLinesWriter(interval=1)]),
        hooks.ProgressBar(console),
        hooks.CheckpointHook(interval=1, save_best="accuracy", max_keep_ckpts=2),
        hooks.RunRecordHook(),
    )
    return bus


def warm_up_and_decay(iteration: int, total: int) -> float:
    """Return the factor of the learning rate: up over the first tenth, then down along a cosine."""
    rising = total / 10
    if iteration < rising:
        return (iteration + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (iteration - rising) / max(1.0, total - rising)))


def make_loop(work_dir: Path, epochs: int, seed: int, console: Console) -> TrainLoop:
    """Return the loop of the demo."""
    data = digits(seed)
    loaders = {name: DataLoader(part, batch_size=BATCH, shuffle=name == "train") for name, part in data.items()}
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=1e-2)
    sizes = ", ".join(f"{len(part)} {name}" for name, part in data.items())
    title = f"[bold]trainbus demo[/]: handwritten digits ({sizes}), {epochs} epochs → {work_dir}"
    console.print(title, highlight=False, soft_wrap=True)
    return TrainLoop(
        model,
        optimizer,
        step=step,
        train_data=loaders["train"],
        val_data=loaders["val"],
        test_data=loaders["test"],
        metrics={"accuracy": Accuracy()},
        bus=make_bus(optimizer, epochs * len(loaders["train"]), console),
        max_epochs=epochs,
        work_dir=work_dir,
        seed=seed,
    )


def run_demo(work_dir: Path, *, epochs: int = 30, seed: int = 0, resume: bool = False) -> int:
    """Train for ``epochs`` in total, test, and print the table of hooks and a summary; return the exit status.

    ``seed`` is that of weights, shuffling and split; ``resume`` continues from the newest checkpoint in ``work_dir``.
    """
    torch.set_num_threads(1)  # the network is too small for more; offloaded work uses the other cores
    console = Console()
    loop = make_loop(work_dir, epochs, seed, console)
    tables: list[Any] = []

    @loop.bus.on("after_run", priority="LOWEST")  # while the run's own checkpoint writer is on the bus
    def take_table(event: Any) -> None:
        loop.bus.drain()  # so that every delivery is counted
        tables.append(loop.bus.describe(stats=True))

    began = time.perf_counter()
    loop.run(resume="auto" if resume else None)
    seconds = time.perf_counter() - began
    averaged = loop.test()["accuracy"]
    raw = TrainLoop(loop.model, step=step, test_data=loader("test", seed=seed), metrics={"accuracy": Accuracy()}).test()
    summary = Table.grid(padding=(0, 2))
    summary.add_row("test accuracy", f"raw weights {raw['accuracy']:.2%}, averaged weights {averaged:.2%}")
    summary.add_row("trained", f"{loop.counters.iter} iterations, {seconds:.1f} s, all I/O off the training thread")
    summary.add_row("files in", str(work_dir))
    for path in sorted(work_dir.iterdir()):
        summary.add_row("", f"{path.name}  ({path.stat().st_size / 1e3:.0f} kB)")
    console.print("", *tables[:1], summary, "", last_lines(work_dir, loop.bus))
    return 0
