"""What a host says about itself: how it trains, resumes and saves, and what it cannot publish."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainbus import attach
from trainbus.eventloop import Bus

SIZE = 2
"""Samples in a batch."""


WARNINGS = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        ".*does not have many workers",
        "You defined a `validation_step` but have no",
        ".*treespec",
        ".*You're resuming from a checkpoint that ended before the epoch ended",
        "Checkpoint directory .* exists and is not empty",
        ".*callbacks used to create the checkpoint need to be provided",
    )
]
"""Those of Lightning about jobs as small as these."""


class Net(nn.Module):
    """A regression with buffers that change in each step. ``look(net)`` is called in each forward pass."""

    def __init__(self, look: Callable[[Net], object] | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.look = look

    def forward(self, x):
        if self.look is not None:
            self.look(self)
        return self.layers(x).squeeze(-1)

    def loss(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self(x), y)


def samples(batches: int, seed: int = 1) -> TensorDataset:
    x = torch.randn(batches * SIZE, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1))


def loader(batches: int = 4, seed: int = 1) -> DataLoader[Any]:
    return DataLoader(samples(batches, seed), SIZE)


class Job:
    """A training of a few batches in one host, with a bus or without.

    Args:
        folder: where the files of hooks and of the host go.
        bus: the bus; None trains as before trainbus was there.
        epochs: how many.
        batches: of each epoch.
        accumulate: micro-batches of one step.
        validate: validate one batch after each epoch.
        every: the host itself saves after so many batches; 0 for never.
        ends: it does so at the end of epochs, where it has a way of its own for that.
        beside: the checkpoints of the host are written beside the training, and one is kept.
        look: called with the model in each of its forward passes.
        options: of the host's own trainer.
    """

    suffix: ClassVar[str] = ".pt"
    """End of the names of files that hooks request."""
    metric: ClassVar[str] = "loss"
    """A metric of its validations."""
    missing: ClassVar[Mapping[str, str]] = {}
    attaches: ClassVar[bool] = True
    """By ``attach(bus, trainer)``; else the bus is an argument of ``Run`` or ``TrainLoop``."""
    validates: ClassVar[bool] = True
    knows_validations: ClassVar[bool] = True
    """Whether it knows at the beginning that no validation will come."""
    accumulates: ClassVar[bool] = True
    saves: ClassVar[bool] = True
    """Whether the host has checkpoints of its own."""
    repeats_epoch_end: ClassVar[bool] = True
    """Whether a resume from the last batch of an epoch passes the end of that epoch."""
    empty_epochs: ClassVar[bool] = True
    """Whether a resume from there may pass that epoch without a batch."""
    interrupts: ClassVar[tuple[type[BaseException], ...]] = (KeyboardInterrupt,)
    """What a user sees after Ctrl-C."""
    continues: ClassVar[str] = ""
    """How the log says to continue an interrupted training, with ``{}`` for the path."""

    def __init__(
        self,
        folder: Path,
        bus: Bus | None = None,
        *,
        epochs: int = 2,
        batches: int = 4,
        accumulate: int = 1,
        validate: bool = False,
        every: int = 0,
        ends: bool = False,
        beside: bool = False,
        look: Callable[[Net], object] | None = None,
        **options: Any,
    ):
        self.folder, self.bus, self.epochs, self.batches = folder, bus, epochs, batches
        self.accumulate, self.validate, self.every, self.ends, self.beside = accumulate, validate, every, ends, beside
        self.trainer: Any = None
        self.bridge: Any = None
        self.model = self.net = Net(look)
        self.make(**options)
        if bus is not None and self.attaches:
            self.attach(bus)
        elif beside:
            self.attach_saver()

    def make(self) -> None:
        """Make the trainer, its optimizer and its data."""
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    def attach(self, bus: Bus) -> Any:
        """Attach a bus, and return the bridge."""
        self.bridge = attach(bus, self.trainer)
        return self.bridge

    def attach_saver(self) -> None:
        """Have checkpoints written beside the training, without a bus of the user's."""

    def fit(self, resume: Path | None = None) -> None:
        """Train to the end, from the beginning or from a checkpoint of a hook or of the host."""
        raise NotImplementedError

    def again(self) -> None:
        """Train once more."""
        self.fit()

    def call(self, slow: Callable[..., None]) -> str:
        """Have the trainer call a function at the end of each batch; return its name in the costs of a run."""
        raise NotImplementedError

    def stop_itself(self) -> None:
        """End the training as the trainer's own callbacks do; called at the end of an iteration."""
        raise NotImplementedError

    def evaluate(self) -> Mapping[str, float]:
        """Validate outside of a training, and return the metrics by the host."""
        raise NotImplementedError

    def own(self) -> Path:
        """Return the host's own last checkpoint."""
        raise NotImplementedError

    def kept(self) -> list[int]:
        """Return the steps of the host's own complete checkpoints."""
        raise NotImplementedError

    def stored(self, path: Path) -> Mapping[str, torch.Tensor]:
        """Return the model's weights that a checkpoint has."""
        saved: Mapping[str, torch.Tensor] = torch.load(path, weights_only=False)["model"]
        return saved

    def files(self) -> list[str]:
        """Return the names of the checkpoints in the folder."""
        return sorted(path.name for path in self.folder.glob(f"*{self.suffix}"))

    def parts(self) -> list[dict[str, Any]]:
        """Return the attributes of all objects that attaching may change."""
        return [dict(vars(self.trainer))]

    def look_at(self, batches: Any) -> None:
        """Validate by hand."""
        self.net.eval()
        with torch.no_grad():
            for batch in batches:
                self.net.loss(batch)
        self.net.train()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of parameters and buffers."""
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
