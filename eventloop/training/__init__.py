"""The training loop: ``Run`` publishes the mount points in order, and ``TrainLoop`` is built on it."""

from typing import TYPE_CHECKING

from trainbus.eventloop.lazy import lazy

if TYPE_CHECKING:
    from trainbus.eventloop.training.distributed.mailbox import Mailbox
    from trainbus.eventloop.training.distributed.ranks import failed_first, own_group
    from trainbus.eventloop.training.distributed.samples import GlobalBatchSampler
    from trainbus.eventloop.training.driver import Driver
    from trainbus.eventloop.training.host import Host, HostFacts, OwnLoop
    from trainbus.eventloop.training.loop import TrainLoop
    from trainbus.eventloop.training.machine import Scope
    from trainbus.eventloop.training.metrics import ONE_NUMBER, Metric, missing_metric, not_a_number
    from trainbus.eventloop.training.optimizers import enter_training_mode, in_training_mode, optimizers_of
    from trainbus.eventloop.training.preflight import check_needs
    from trainbus.eventloop.training.rng import SeededDataset, set_sampler_epoch
    from trainbus.eventloop.training.run import HostedRun, Run
    from trainbus.eventloop.training.saves.best import Best, load_best_at_end
    from trainbus.eventloop.training.saves.contents import imported_state
    from trainbus.eventloop.training.saves.discover import is_candidate, newest_candidate, peek, read_pointer
    from trainbus.eventloop.training.saves.foreign import ForeignFormat, convert_foreign, register_format
    from trainbus.eventloop.training.saves.requests import SaveOutcome
    from trainbus.eventloop.training.saves.weights import checkpoint_keys, checkpoint_names, load_weights
    from trainbus.eventloop.training.schema import LAST, how_far
    from trainbus.eventloop.training.update import Update
    from trainbus.eventloop.training.worker_signals import WorkerSignals
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "LAST",
    "ONE_NUMBER",
    "Best",
    "Driver",
    "ForeignFormat",
    "GlobalBatchSampler",
    "Host",
    "HostFacts",
    "HostedRun",
    "Mailbox",
    "Metric",
    "OwnLoop",
    "Run",
    "SaveOutcome",
    "Scope",
    "SeededDataset",
    "TrainLoop",
    "Update",
    "WorkerSignals",
    "check_needs",
    "checkpoint_keys",
    "checkpoint_names",
    "convert_foreign",
    "enter_training_mode",
    "failed_first",
    "how_far",
    "imported_state",
    "in_training_mode",
    "is_candidate",
    "load_best_at_end",
    "load_weights",
    "missing_metric",
    "newest_candidate",
    "not_a_number",
    "optimizers_of",
    "own_group",
    "peek",
    "read_pointer",
    "register_format",
    "set_sampler_epoch",
]
