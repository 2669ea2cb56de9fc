"""Lightning: the Trainer's callback hooks, and the Trainer with EMA, LR monitor, CSV logger and checkpoint callback."""

import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, SimpleProfiler
from lightning.pytorch.trainer import call
from torch import Tensor, nn

from benchmarks.digits import LEARNING_RATE, MOMENTUM, Batch, Job
from benchmarks.peers import BY_NAME, IN_THE_REST, Profiled, Report, Saver, Statement, Told

CHECKPOINTS = "checkpoints/*.ckpt"
SCALARS = "**/metrics.csv"

QUIET = {"enable_progress_bar": False, "enable_model_summary": False}


class NoOp(Callback):
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        pass


def dispatch(names: Mapping[str, object], handlers: int) -> Statement:
    with hushed():
        trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **QUIET)
    trainer.callbacks = [NoOp() for _ in range(handlers)]
    trainer.strategy.connect(LightningModule())
    code = 'call._call_callback_hooks(trainer, "on_train_batch_end", None, None, 0)'
    return Statement(code, {**names, "call": call, "trainer": trainer})


class Classifier(LightningModule):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.net = job.model
        self.iterations = job.iterations

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = Job.loss(self.net, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.iterations)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(job: Job, work_dir: Path, profiler: Profiler | None = None) -> None:
    with hushed():
        trainer = Trainer(
            max_steps=job.iterations,
            accelerator="cpu",
            log_every_n_steps=1,
            logger=CSVLogger(work_dir),
            profiler=profiler,
            callbacks=[
                EMAWeightAveraging(decay=1 - MOMENTUM),
                LearningRateMonitor(logging_interval="step"),
                ModelCheckpoint(work_dir / "checkpoints", every_n_train_steps=job.checkpoint_interval, save_top_k=-1),
            ],
            **QUIET,
        )
        trainer.fit(Classifier(job), job.loader())


def profiled(kind: type[SimpleProfiler] | type[AdvancedProfiler], job: Job, work_dir: Path) -> Report:
    train(job, work_dir, kind(work_dir, "profile"))
    return (work_dir / "fit-profile.txt").read_text


PROFILERS = {
    "SimpleProfiler": Profiled(
        partial(profiled, SimpleProfiler),
        Told(IN_THE_REST, BY_NAME, shows=("save_checkpoint",), hides=("log_metrics", "CSVLogger")),
    ),
    "AdvancedProfiler": Profiled(
        partial(profiled, AdvancedProfiler), Told("among functions", BY_NAME, shows=("save_checkpoint", "log_metrics"))
    ),
}


def weights(path: Path) -> Iterable[Tensor]:
    # With an average, that is what "state_dict" holds; it has no other name for the weights that were trained.
    return torch.load(path, weights_only=False)["current_model_state"].values()


@contextmanager
def savers(model: nn.Module, work_dir: Path) -> Iterator[Saver]:
    """Save by its plugin that writes on a thread, without the Trainer around it."""
    weights = model.state_dict()
    plugin = AsyncCheckpointIO(TorchCheckpointIO())

    def save(path: Path) -> None:
        plugin.save_checkpoint({"state_dict": weights}, path)

    # Tearing down is the only way to wait; the next save starts a thread again.
    yield Saver(save, lambda path: torch.load(path)["state_dict"].values(), plugin.teardown, background=True)


SAVERS = {"Lightning AsyncCheckpointIO": savers}


@contextmanager
def stores(plugin: CheckpointIO, model: nn.Module, _: str) -> Iterator[Saver]:
    """Save by a Trainer, which takes URLs."""
    with hushed():
        trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, plugins=[plugin], **QUIET)
        module = LightningModule()
        module.net = model
        trainer.strategy.connect(module)

        def read(url: str) -> Iterable[Tensor]:
            return plugin.load_checkpoint(url)["state_dict"].values()

        asynchronous = isinstance(plugin, AsyncCheckpointIO)
        yield Saver(partial(trainer.save_checkpoint, weights_only=True), read, plugin.teardown, background=asynchronous)


STORES = {
    "Lightning": partial(stores, TorchCheckpointIO()),
    "Lightning AsyncCheckpointIO": partial(stores, AsyncCheckpointIO(TorchCheckpointIO())),
}


@contextmanager
def hushed() -> Iterator[None]:
    """Silence the hints on workers and accelerators, which would appear between the tables."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
