"""A training job in which everything depends on everything, and loaders of every kind, for tests of resumed runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812 - the usual name
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from eventloop import Bus, Run, SeededDataset, TrainLoop, Update

SAMPLES = 22  # five batches of four, and one of two


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(SAMPLES, 4, generator=generator), torch.arange(SAMPLES) % 3)


class Augmented(Dataset):
    """Draws from all three global generators."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        noise = torch.rand(4) + np.random.rand() + random.random()
        return torch.full((4,), float(index)) * 0.1 + noise, index % 3


class Stream(IterableDataset):
    def __iter__(self):
        return iter(samples())


class StatefulLoader:
    """Knows its place, as torchdata's StatefulDataLoader does; has a length or not."""

    def __init__(self, batches, *, sized=True):
        self.batches = batches
        self.position = self.start = 0
        self.reads = 0
        if sized:
            self.__class__ = SizedStatefulLoader

    def __iter__(self):
        for position in range(self.start, len(self.batches)):
            self.start = 0
            self.position = position + 1
            self.reads += 1
            yield self.batches[position]
        self.start = self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = self.start = state["position"]


class SizedStatefulLoader(StatefulLoader):
    def __len__(self):
        return len(self.batches)


def shuffled(**options: Any) -> DataLoader:
    return DataLoader(options.pop("dataset", None) or samples(), batch_size=4, shuffle=True, **options)


LOADERS: dict[str, Callable[[Any], Any]] = {
    "shuffled": lambda parts: shuffled(),
    "two workers": lambda parts: shuffled(num_workers=2),
    "generator of its own": lambda parts: shuffled(generator=torch.Generator().manual_seed(9)),
    "sampler with a generator of its own": lambda parts: DataLoader(
        samples(), batch_size=4, sampler=RandomSampler(samples(), generator=torch.Generator().manual_seed(9))
    ),
    "with replacement": lambda parts: DataLoader(samples(), batch_size=4, sampler=RandomSampler(samples(), replacement=True)),
    "batches from the sampler": lambda parts: DataLoader(
        samples(), batch_size=None, sampler=BatchSampler(RandomSampler(samples()), 4, drop_last=False)
    ),
    "seeded augmentation": lambda parts: shuffled(dataset=SeededDataset(Augmented(), seed=3)),
    "seeded augmentation in workers": lambda parts: shuffled(dataset=SeededDataset(Augmented(), seed=3), num_workers=2),
    "persistent workers": lambda parts: shuffled(num_workers=2, persistent_workers=True),
    "a list": lambda parts: parts.batches(6),
    "stateful": lambda parts: StatefulLoader(parts.batches(6)),
    "stateful without a length": lambda parts: StatefulLoader(parts.batches(6), sized=False),
}


def step(model, batch):
    inputs, labels = batch
    loss = F.cross_entropy(model(inputs), labels)
    return {"loss": loss, "noise": torch.rand(()) + random.random() + np.random.rand()}


class Job:
    """A training job in which everything depends on everything: what a resume forgets shows in the weights."""

    def __init__(
        self,
        parts: Any,
        work_dir: Path,
        loader: str = "shuffled",
        *,
        train_data: Any = None,
        val_data: Any = None,
        accumulate: int = 1,
        scaler: Any = None,
        **options: Any,
    ) -> None:
        self.bus = Bus()
        self.model = parts.model(dropout=0.3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        by_iter = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.95)
        by_metric = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.5, patience=0)
        self.bus.add(Update(accumulate=accumulate, scaler=scaler))
        self.bus.on("after_train_iter", lambda e: by_iter.step() if e.run.updated else None, priority=70)
        # The metric is random: validations must draw what they would have drawn, and be made once.
        self.bus.on("after_val_epoch", lambda e: by_metric.step(e.metrics["noise"]), priority=70)
        self.scores: dict[int, Any] = {}
        self.bus.on("after_val_epoch", lambda e: self.scores.update({e.progress.iter: dict(e.metrics)}))
        self.trace = parts.Trace(self.bus)
        if "max_iters" not in options:
            options.setdefault("max_epochs", 2)
        self.loop = TrainLoop(
            self.model,
            self.optimizer,
            step=step,
            train_data=train_data or LOADERS[loader](parts),
            val_data=val_data or shuffled(),
            bus=self.bus,
            work_dir=work_dir,
            seed=7,
            stateful={"by_iter": by_iter, "by_metric": by_metric},
            **options,
        )

    def at(self, mount_point: str, count: int, act: Callable[[Run], None]) -> Job:
        heard = []

        def handler(event):
            heard.append(event)
            if len(heard) == count:
                act(event.run)

        self.bus.on(mount_point, handler, priority=95)
        return self

    def save_at(self, mount_point: str, count: int) -> Job:
        return self.at(mount_point, count, lambda run: run.request_save("here.safetensors"))

    def run(self, **options: Any) -> Job:
        self.loop.run(**options)
        return self

    @property
    def resumed_from(self) -> Path | None:
        return self.trace.of("before_run")[0].run.resumed_from

    @property
    def outcome(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state()[1].tolist(),
            "python": random.getstate(),
            "counters": self.loop.counters.saved(),
        }
