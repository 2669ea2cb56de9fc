"""What several processes do in the tests of bridges; they import it by name."""

import os
import warnings
from pathlib import Path

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Bus, Hook
from hooks import CheckpointHook, EMAHook, LoggerHook
from hooks.writers import JSONLinesWriter


class OnFirst(Hook):
    """Counts iterations, on rank 0 only."""

    ranks = "rank0"

    def __init__(self):
        self.seen = 0

    def after_train_iter(self, event):
        self.seen += 1


def lightning(folder: Path, attached: bool):
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

    warnings.simplefilter("ignore")
    rank = distributed.get_rank()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # a group exists already
    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(torch.randn(16, 4), torch.randn(16, 1)), 2)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, default_root_dir=folder, **quiet)
    module, committed, first = Module(), [], OnFirst()
    if attached:
        bus = Bus()
        bus.add(first, EMAHook(momentum=0.1), LoggerHook(interval=1, writers=[JSONLinesWriter()]))
        bus.add(CheckpointHook(interval=1, save_best="val_loss"))
        bus.on("checkpoint_committed", lambda event: committed.extend(Path(name).name for name in event.names))
        bus.attach(trainer)
    trainer.fit(module, loader, loader)
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return rank, weights, first.seen, committed
