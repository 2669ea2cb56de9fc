"""A training job in which everything depends on everything, and loaders of every kind, for tests of resumed runs."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812 - the usual name
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from trainbus.eventloop import Bus, Run, SeededDataset, TrainLoop, Update

from ..conftest import act_at

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
    """Knows its place, as torchdata's StatefulDataLoader does."""

    def __init__(self, batches):
        self.batches = batches
        self.position = self.start = self.reads = 0

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


def a_part(generator: torch.Generator, **options: Any) -> DataLoader[Any]:
    """Other samples in each pass."""
    sampler = RandomSampler(samples(), replacement=True, num_samples=6, generator=generator)
    return DataLoader(samples(), batch_size=3, sampler=sampler, **options)


class Shuffling:
    """A batch sampler as people write it, shuffled by a generator of its own in an attribute of any name."""

    def __init__(self, name: str, generator: Any) -> None:
        self._name = name
        setattr(self, name, generator)

    def __len__(self) -> int:
        return SAMPLES // 4

    def __iter__(self) -> Any:
        order = [*range(SAMPLES)]
        getattr(self, self._name).shuffle(order)
        yield from (order[start : start + 4] for start in range(0, SAMPLES - 3, 4))


class Redrawing(SizedStatefulLoader):
    """A loader with a state that draws its order again when it goes on, as torchdata's nodes do."""

    def __iter__(self) -> Any:
        start, self.start = self.start, 0
        self.position = start
        return self._rest(torch.randperm(len(self.batches)).tolist()[start:])

    def _rest(self, order: list[int]) -> Any:
        for index in order:
            self.position += 1
            yield self.batches[index]
        self.position = 0


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
    "sampler with NumPy's generator": lambda parts: DataLoader(
        samples(), batch_sampler=Shuffling("generator", np.random.default_rng(5))
    ),
    "sampler with NumPy's old generator": lambda parts: DataLoader(
        samples(), batch_sampler=Shuffling("state", np.random.RandomState(5))
    ),
    "sampler with Python's generator": lambda parts: DataLoader(samples(), batch_sampler=Shuffling("rng", random.Random(5))),
    "stateful, drawn again": lambda parts: Redrawing(parts.batches(6)),
    "stateful": lambda parts: SizedStatefulLoader(parts.batches(6)),
    "stateful without a length": lambda parts: StatefulLoader(parts.batches(6)),
}
VALIDATIONS: dict[str, Callable[[Any], Any]] = {
    "generator of its own": lambda train: a_part(torch.Generator().manual_seed(2)),
    "generator of the training": lambda train: a_part(train.generator),
    "persistent workers": lambda train: DataLoader(list(samples())[:8], batch_size=4, num_workers=1, persistent_workers=True),
    "both": lambda train: a_part(torch.Generator().manual_seed(2), num_workers=1, persistent_workers=True),
    "a list": lambda train: [*DataLoader(samples(), batch_size=4)][:2],
}
"""Loaders of validations, beside one for the training."""


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
        validation: str | None = None,
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
        self.outcome: dict[str, Any] = {}
        train_data = LOADERS[loader](parts)
        if "max_iters" not in options:
            options.setdefault("max_epochs", 2)
        val_data = shuffled() if validation is None else VALIDATIONS[validation](train_data)
        options |= {"stateful": {"by_iter": by_iter, "by_metric": by_metric}, "work_dir": work_dir, "seed": 7}
        data = {"train_data": train_data, "val_data": val_data}
        self.loop = TrainLoop(self.model, self.optimizer, step=step, bus=self.bus, **data, **options)

    def at(self, mount_point: str, count: int, act: Callable[[Run], None]) -> Self:
        act_at(self.bus, mount_point, count, lambda event: act(event.run))
        return self

    def save_at(self, mount_point: str, count: int) -> Self:
        return self.at(mount_point, count, lambda run: run.checkpoints.save("here.safetensors"))

    def run(self, **options: Any) -> Self:
        self.loop.run(**options)
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        drawn = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        self.outcome = {**states, "random": drawn, "counters": self.loop.counters.saved()}
        return self

    @property
    def resumed_from(self) -> Path | None:
        return self.trace.of("before_run")[0].run.checkpoints.resumed_from
