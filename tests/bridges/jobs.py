"""What the tests of bridges have in common, and what their processes do, which import it by name."""

import os
import warnings
from pathlib import Path

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Bus, Event, Hook, TrainbusCheckpointIO
from hooks import CheckpointHook, EMAHook, LoggerHook
from hooks.writers import JSONLinesWriter


class Counting(Hook):
    """Keeps epoch, iteration and batch of what it hears, by mount point; a checkpoint has it."""

    def __init__(self):
        self.seen = {}

    def count(self, event):
        where = (event.progress.epoch, event.progress.iter, event.progress.batch_idx)
        self.seen.setdefault(event.mount_point, []).append(where)

    after_train_iter = after_train_epoch = after_val_epoch = after_optimizer_step = count

    @property
    def iters(self):
        return self.seen.get("after_train_iter", [])

    def state_dict(self):
        return {"seen": {name: list(events) for name, events in self.seen.items()}}

    def load_state_dict(self, state):
        self.seen = {name: list(events) for name, events in state["seen"].items()}


class OnFirst(Counting):
    """Counts on rank 0 only."""

    ranks = "rank0"


def heard(bus):
    """The names of all events, as they come."""
    names = []
    bus.on(Event, lambda event: names.append(event.mount_point))
    return names


def weights_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(one, other):
    """Not one bit of the tensors differs."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def network():
    """A classifier whose steps depend on random numbers and on buffers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))


def batches(count=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(8, 4, generator=generator), torch.arange(8) % 3) for _ in range(count)]


def _as_torchrun():
    """Make a library take the group that exists."""
    warnings.simplefilter("ignore")
    rank = distributed.get_rank()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def lightning(folder: Path, attached: bool, *, asks: bool = False, plugin: bool = False):
    """Train by DDP in Lightning, with a bus or without; return what this rank has seen."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            return (self.net(batch[0]) - batch[1]).square().mean()

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.net(batch[0]).square().mean(), sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    _as_torchrun()
    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(torch.randn(16, 4), torch.randn(16, 1)), 2)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, default_root_dir=folder, **quiet)
    module, committed, first = Module(), [], OnFirst()
    if plugin:
        trainer.strategy.checkpoint_io = TrainbusCheckpointIO()
    if asks:
        trainer.fit_loop.max_epochs = 50
    if attached:
        bus = Bus()
        bus.add(first, EMAHook(momentum=0.1), LoggerHook(interval=1, writers=[JSONLinesWriter()]))
        bus.add(CheckpointHook(interval=1, save_best="val_loss"))
        bus.on("checkpoint_committed", lambda event: committed.extend(Path(name).name for name in event.names))
        if asks:
            bus.add(AsksOnOne())
        bridge = bus.attach(trainer)
    trainer.fit(module, loader, loader)
    if plugin:  # every rank reads what the first one has written
        assert torch.load(folder / "epoch_2.ckpt", weights_only=False)["callbacks"]["trainbus"]["progress"]["iter"] == 8
    if asks:
        return trainer.fit_loop.epoch_loop.total_batch_idx + 1, bridge.run.info.get("stop_reason"), committed
    return distributed.get_rank(), weights_of(module), len(first.iters), committed


class AsksOnOne(Hook):
    """Asks for a save and a stop, on rank 1 only, as a dashboard or a signal handler does."""

    def after_train_iter(self, event):
        if event.run.rank == 1 and event.progress.iter == 5:
            event.run.checkpoint_now()
            event.run.stop("enough")


def stops_in_lightning(folder: Path):
    """Train in Lightning until rank 1 stops it; return what this rank has done."""
    return lightning(folder, True, asks=True)


def stops_in_transformers(folder: Path):
    """Train with a ``transformers.Trainer`` until rank 1 stops it; return what this rank has done."""
    from .conformance.transformers import make

    _as_torchrun()
    bus, committed = Bus(), []
    bus.add(AsksOnOne())
    bus.on("checkpoint_committed", lambda event: committed.extend(Path(name).name for name in event.names))
    trainer = make(folder, num_train_epochs=50)
    bridge = bus.attach(trainer)
    trainer.train()
    return trainer.state.global_step, bridge.run.info.get("stop_reason"), committed


def lightning_saves(folder: Path):
    """Train as :func:`lightning` does, with checkpoints that are written beside the training."""
    return lightning(folder, True, plugin=True)
