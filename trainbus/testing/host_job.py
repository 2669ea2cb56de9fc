"""``HostJob``: what a trainer says about itself: how it trains, resumes and saves, and what it cannot publish."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainbus.bridges import attach
from trainbus.eventloop import Bus, Event, Hook
from trainbus.testing.events import capture_events

SIZE = 2
"""Samples in a batch."""


class Net(nn.Module):
    """A regression with buffers that change in each step. ``look(net)`` is called in each forward pass."""

    def __init__(self, look: Callable[[Net], object] | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.look, self.passes = look, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.look is not None:
            self.look(self)
        outputs: torch.Tensor = self.layers(x).squeeze(-1)
        return outputs

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x), y)


def samples(batches: int, seed: int = 1) -> TensorDataset:
    x = torch.randn(batches * SIZE, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1))


def loader(batches: int = 4, seed: int = 1) -> DataLoader[Any]:
    return DataLoader(samples(batches, seed), SIZE)


class HostJob:
    """A training of a few batches in one trainer (the host), with a bus or without; :class:`HostChecks` makes many.

    Override :meth:`make`, :meth:`fit` and :meth:`own`, and what else your trainer can; say what it cannot in the attributes.

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
    window_ends_with_epoch: ClassVar[bool] = True
    """Whether a window of accumulation that is open at the end of an epoch steps there."""
    resumes_without_bus: ClassVar[bool] = True
    """Whether it resumes a checkpoint that it has made without a bus."""
    resumes_at_end: ClassVar[bool] = True
    """Whether a resume from the end of the training trains nothing, instead of anew."""
    moves_files: ClassVar[bool] = True
    """Whether the files of an earlier run in the folder are moved; not where each new run has a folder of its own."""
    stops_itself: ClassVar[bool] = True
    """Whether callbacks of the trainer can stop it: :meth:`stop_itself`."""
    stops_at_begin: ClassVar[bool] = True
    """Whether a stop before the first iteration trains nothing."""
    keeps_rate: ClassVar[bool] = True
    """Whether the trainer leaves a learning rate as it was set."""
    takes_schedules: ClassVar[bool] = True
    """Whether schedules of ours may step its optimizer."""
    steps_itself: ClassVar[bool] = True
    """Whether the host steps the optimizer, so that no hook may."""
    passes_stop_iteration: ClassVar[bool] = True
    """Whether a StopIteration of the model leaves the trainer as it was raised."""
    evaluates: ClassVar[bool] = True
    """Whether :meth:`evaluate` after a training is part of that run."""
    times_callbacks: ClassVar[bool] = True
    """Whether callbacks of the trainer are timed by name: :meth:`call`."""
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

    @staticmethod
    def tensors(batch: Any) -> tuple[Any, ...]:
        """Return inputs and labels of a batch, as events have it."""
        return (batch["x"], batch["labels"]) if isinstance(batch, dict) else tuple(batch)

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


STEP = ["before_optimizer_step", "after_optimizer_step"]
VAL = ["before_val", "before_val_epoch", "before_val_iter", "after_val_iter", "after_val_epoch", "after_val"]


class Counting(Hook):
    """Keeps epoch, iteration and batch of each event by mount point; checkpoints hold them."""

    def __init__(self) -> None:
        self.seen: dict[str, list[tuple[int, int, int]]] = {}

    def count(self, event: Any) -> None:
        where = (event.progress.epoch, event.progress.iter, event.progress.batch_idx)
        self.seen.setdefault(event.mount_point, []).append(where)

    after_train_iter = after_train_epoch = after_val_epoch = after_optimizer_step = count

    @property
    def iters(self) -> list[tuple[int, int, int]]:
        return self.seen.get("after_train_iter", [])

    def state_dict(self) -> dict[str, Any]:
        return {"seen": {name: list(events) for name, events in self.seen.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = {name: list(events) for name, events in state["seen"].items()}


def heard(bus: Bus) -> list[str]:
    """Return a list that gets the mount point of each event."""
    return noted(bus, Event, "mount_point")


def noted(bus: Bus, mount_point: str | type[Event], *attributes: str) -> list[Any]:
    """Return a list that gets attributes of each event, as ``operator.attrgetter`` reads them."""
    return capture_events(bus, mount_point, read=attrgetter(*attributes))


def checkpoints(bus: Bus) -> list[Path]:
    """Return a list that gets the path of each checkpoint when it is committed; the file is there."""

    def path(event: Any) -> Path:
        assert all(Path(name).exists() for name in event.names)
        return Path(event.path)

    return capture_events(bus, "checkpoint_committed", read=path)


class Killed(BaseException):
    """Ends a training as if its process were killed."""


def fails(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    """Return a function that raises an error, whatever it is given."""

    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def at_steps(calls: Mapping[int, Callable[[Net], object]]) -> Callable[[Net], None]:
    """Return a look into the model that calls functions in training steps, counted from 1: ``at_steps({5: function})``."""

    def look(net: Net) -> None:
        net.passes += net.training
        if net.training and net.passes in calls:
            calls[net.passes](net)

    return look


def killing(at: int) -> Callable[[Net], None]:
    """Return a look into the model that ends the training in iteration ``at``."""
    return at_steps({at + 1: fails(Killed)})


def assert_same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    """Check that not one bit of the tensors differs."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
