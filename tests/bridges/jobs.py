"""What the tests of bridges have in common, and what their processes do, which import it by name."""

import os
import warnings
from pathlib import Path

import torch
from torch import distributed, nn

from trainbus import attach
from trainbus.bridges import TrainbusCheckpointIO
from trainbus.eventloop import Bus, Hook
from trainbus.hooks import CheckpointHook, EMAHook, LoggerHook
from trainbus.hooks.writers import JSONLinesWriter
from trainbus.testing.host_job import Counting


class OnFirst(Counting):
    """Counts on rank 0 only."""

    ranks = "rank0"


def weights_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _as_torchrun():
    """Make a library take the group that exists."""
    warnings.simplefilter("ignore")
    rank = distributed.get_rank()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


class AsksOnOne(Hook):
    """Asks for a save and a stop, on one rank only, as a dashboard or a signal handler does."""

    def __init__(self, rank=1):
        self.rank = rank

    def after_train_iter(self, event):
        if event.run.rank == self.rank and event.progress.iter == 5:
            event.run.checkpoints.save()
            event.run.stop("enough", instead="give more")


class Rank:
    """What one rank has seen of a training with a bus: ``seen`` of it can be pickled."""

    def __init__(self, *hooks):
        self.first, self.ema, self.committed, self.info, self.begun = OnFirst(), EMAHook(momentum=0.1), [], {}, []
        self.bus = Bus(self.first, self.ema, *hooks)
        self.bus.on("checkpoint_committed", lambda event: self.committed.append(Path(event.path).name))
        self.bus.on("before_train", lambda e: self.begun.append((e.run.rank, e.run.world_size, e.progress.iter)))
        self.bus.on("after_run", lambda event: self.info.update(event.run.info, steps=event.run.counters.iter))

    def seen(self, model):
        return {
            "weights": weights_of(model), "average": self.ema.average and dict(self.ema.average.tensors), "begun": self.begun,
            "first": len(self.first.iters), "committed": self.committed, "steps": self.info.get("steps"),
            "reason": self.info.get("stop_reason"),
        }  # fmt: skip


def in_lightning(folder: Path):
    """Train by DDP in Lightning: without a bus, with one, with checkpoints beside the training, until rank 1 stops it."""
    import lightning.pytorch as pl

    from trainbus.testing.host_job import loader

    from .conformance.lightning import QUIET, Module

    def train(name, *hooks, attached=True, **options):
        torch.manual_seed(1)
        options = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "max_epochs": 2, **QUIET, **options}
        trainer, module = pl.Trainer(default_root_dir=folder / name, enable_checkpointing=False, **options), Module()
        logs, saves = LoggerHook(interval=1, writers=[JSONLinesWriter()]), CheckpointHook(interval=1, save_best="val_loss")
        rank = Rank(*hooks, logs, saves)
        if attached:
            attach(rank.bus, trainer)
        trainer.fit(module, loader(8), loader(8))
        if "plugins" in options:  # every rank reads what the first one has written
            saved = torch.load(folder / name / "epoch_2.ckpt", weights_only=False)
            assert saved["callbacks"]["trainbus"]["progress"]["iter"] == 8
        return rank.seen(module)

    _as_torchrun()
    beside = train("beside", plugins=[TrainbusCheckpointIO()])
    return train("plain", attached=False), train("bus"), beside, train("stops", AsksOnOne(), max_epochs=50)


def in_transformers(folder: Path):
    """Train with a ``transformers.Trainer`` as :func:`in_lightning` does, and stop and resume in step 7."""
    import transformers
    from packaging.version import Version

    from .conformance.transformers import WithLoss, make, plain_data

    def model():
        return WithLoss(nn.Linear(3, 1))  # without randomness, which evaluations change

    def train(name, *hooks, attached=True, beside=False, resume=None, **options):
        options = {"max_steps": 12, "eval_strategy": "epoch", "lr_scheduler_type": "constant", **options}
        if beside:
            options |= {"save_steps": 6, "eval_steps": 6, "save_total_limit": 1, "metric_for_best_model": "loss"}
            options |= {"save_strategy": "steps", "eval_strategy": "steps", "greater_is_better": False}
        trainer = make(folder / name, model=model, data=plain_data(32), options={"eval_dataset": plain_data(8)}, **options)
        rank = Rank(*hooks, CheckpointHook(interval=6, by_epoch=False, save_last=False))
        if attached:
            attach(rank.bus, trainer, checkpoints=beside)
        trainer.train(resume_from_checkpoint=resume)
        return rank.seen(trainer.model) | {"best": trainer.state.best_model_checkpoint}

    _as_torchrun()
    resumes = Version(transformers.__version__) >= Version("5.4")  # earlier ones load an optimizer to 'cpu:0'
    found = {"alone": train("alone", attached=False), "stops": train("stops", AsksOnOne(), max_steps=400)}
    for beside in (False, True):
        found["whole", beside] = train(f"whole {beside}", beside=beside)
        train(f"parts {beside}", beside=beside, max_steps=7)
        if resumes:
            found["rest", beside] = train(f"parts {beside}", beside=beside, resume=True)
    return found
