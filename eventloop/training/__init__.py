"""The training loop: ``Run`` publishes the mount points in order, and ``TrainLoop`` is built on it."""

from eventloop.training.distributed.mailbox import Mailbox
from eventloop.training.distributed.ranks import failed_first
from eventloop.training.distributed.samples import GlobalBatchSampler
from eventloop.training.driver import Driver
from eventloop.training.host import Host, OwnLoop
from eventloop.training.loop import TrainLoop
from eventloop.training.machine import Scope
from eventloop.training.metrics import ONE_NUMBER, Metric, missing_metric, not_a_number
from eventloop.training.optimizers import enter_training_mode, in_training_mode, optimizers_of
from eventloop.training.rng import SeededDataset, set_sampler_epoch
from eventloop.training.run import Run
from eventloop.training.sanity import check_needs
from eventloop.training.saves.best import Best, load_best_at_end
from eventloop.training.saves.contents import imported_state
from eventloop.training.saves.discover import peek
from eventloop.training.saves.weights import checkpoint_keys, checkpoint_names, load_weights
from eventloop.training.update import Update
from eventloop.training.worker_signals import WorkerSignals

__all__ = [
    "ONE_NUMBER",
    "Best",
    "Driver",
    "GlobalBatchSampler",
    "Host",
    "Mailbox",
    "Metric",
    "OwnLoop",
    "Run",
    "Scope",
    "SeededDataset",
    "TrainLoop",
    "Update",
    "WorkerSignals",
    "check_needs",
    "checkpoint_keys",
    "checkpoint_names",
    "enter_training_mode",
    "failed_first",
    "imported_state",
    "in_training_mode",
    "load_best_at_end",
    "load_weights",
    "missing_metric",
    "not_a_number",
    "optimizers_of",
    "peek",
    "set_sampler_epoch",
]
