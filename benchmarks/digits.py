"""The job of every training loop: scikit-learn's digits, a small MLP, AdamW; about 660 µs a step on one thread.

It has one long epoch, or ``epochs`` equal ones; a loop that knows iteration-based training uses that for the first.
"""

import functools
import statistics
import time
from itertools import pairwise
from operator import itemgetter

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset

Batch = tuple[Tensor, Tensor]

BATCH_SIZE = 96
HIDDEN = 128
LEARNING_RATE = 1e-3
MOMENTUM = 0.001
"""Of the average: avg = (1 - momentum) * avg + momentum * weights."""
CHECKPOINT_INTERVAL = 100


class Job:
    """One run's model, optimizer and data, the same for every contender, fresh for every phase."""

    def __init__(
        self,
        iterations: int,
        *,
        epochs: int = 1,
        hidden: int = HIDDEN,
        batch_size: int = BATCH_SIZE,
        checkpoint_interval: int = CHECKPOINT_INTERVAL,
    ) -> None:
        torch.manual_seed(0)
        self.iterations = iterations
        self.epochs = epochs
        self.checkpoint_interval = checkpoint_interval
        self.model = nn.Sequential(
            nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)
        )
        self.data = ClockedBatches(digits(batch_size), iterations // epochs)

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> CosineAnnealingLR:
        """The schedule, stepped after every iteration."""
        return CosineAnnealingLR(optimizer, T_max=self.iterations)

    def loader(self) -> DataLoader:
        """Ready-made batches, so that collating does not hide the measured cost. Iterate over it once per epoch."""
        return DataLoader(self.data, batch_size=1, collate_fn=itemgetter(0))

    @staticmethod
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)


class Clocked(Job):
    """A job that measures the duration of an iteration."""

    def __init__(self, iterations: int, **options: int) -> None:
        super().__init__(iterations, checkpoint_interval=iterations // 3, **options)
        self.data = TimedBatches(self.data.batches, self.data.length)

    def seconds(self) -> float:
        """The median from one batch to the next, in the second half of the run."""
        return statistics.median(after - before for before, after in pairwise(self.data.asked[self.iterations // 2 :]))


class ClockedBatches(Dataset[Batch]):
    """Batches by index, round and round; notes when the first one was asked for.

    That moment starts the clock: what a framework sets up once before its first step is not a cost per iteration.
    """

    def __init__(self, batches: list[Batch], length: int) -> None:
        self.batches = batches
        self.length = length
        self.started: float | None = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        if self.started is None:
            self.started = time.perf_counter()
        if index >= self.length:
            raise IndexError(index)
        return self.batches[index % len(self.batches)]


class TimedBatches(ClockedBatches):
    """Record when each batch is requested."""

    def __init__(self, batches: list[Batch], length: int) -> None:
        super().__init__(batches, length)
        self.asked: list[float] = []

    def __getitem__(self, index: int) -> Batch:
        self.asked.append(time.perf_counter())
        return super().__getitem__(index)


@functools.cache
def digits(batch_size: int) -> list[Batch]:
    """The 1,797 images of 8 × 8 pixels in shuffled batches; the incomplete last one is dropped."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    pixels = torch.as_tensor(images, dtype=torch.float32)[order] / 16
    classes = torch.as_tensor(labels, dtype=torch.long)[order]
    pairs = zip(pixels.split(batch_size), classes.split(batch_size), strict=True)
    return [pair for pair in pairs if len(pair[1]) == batch_size]
